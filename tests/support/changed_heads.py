"""The packaged head with another config: heads that do not fit the packaged model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from specmeter.commands.serve import packaged_head


def changed_head(folder: Path, **change: Any) -> Path:
    """A copy of the head whose config.json says something else (unless told: a hidden size of 64)."""
    head = packaged_head()
    assert head is not None
    shutil.copytree(head, folder)
    config = json.loads((head / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **(change or {"hidden_size": 64})}))
    return folder
