"""specmeter as pip leaves it in an environment, with the entry points that engines look for."""

from __future__ import annotations

from pathlib import Path

import tomli

ROOT = Path(__file__).parents[2]


def installed(folder: Path) -> Path:
    """A folder as pip leaves one: specmeter's package, and metadata with the entry points that pyproject declares."""
    folder.mkdir()
    (folder / "specmeter").symlink_to(ROOT / "src" / "specmeter")
    facts = folder / "specmeter-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: specmeter\nVersion: 0.1.0\n")
    groups = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in groups.items()]
    (facts / "entry_points.txt").write_text("\n".join(lines))
    return folder
