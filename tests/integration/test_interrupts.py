"""Ctrl-C in the middle of a command's load: exit 130, no process and no link left, nothing half-written."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from specmeter.engines.guardian import descendants
from specmeter.trace.rundir import load
from tests.support.descendants import LinkFolder, alive, servers_below, wait, words_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
LONG = ["--requests", "40", "--max-tokens", "400", "--out", "run"]
SERVE = ["--", sys.executable, "-m", "specmeter", "serve", "--threads", "1"]
COMMANDS = {
    "sweep": ["--steps", "1", *LONG, *SERVE],
    "bench": [*LONG, *SERVE],
    "compare": ["--arm", "k=1", "--arm", "k=2", "--starts", "3", *LONG, *SERVE],
    "demo": ["--threads", "1", *LONG],
    "train": ["--out", "run", "--tokens", "20000", "--generate-minutes", "0.2"],
}
WARM_UP_TOKENS = 32


def generated(root: int) -> float:
    """Tokens that the server below a process has generated; 0 until it answers."""
    for pid in servers_below(root):
        words = words_of(pid)
        with contextlib.suppress(OSError, ValueError, IndexError):
            url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/metrics"
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = re.search(r"^specmeter_generated_tokens_total (\S+)", answer.read().decode(), re.MULTILINE)
            return float(found[1]) if found else 0.0
    return 0.0


@pytest.mark.parametrize("name", COMMANDS)
def test_interrupted_in_the_middle(name: str, tmp_path: Path) -> None:
    folder, said = LinkFolder(tmp_path / "runtime"), tmp_path / "said"
    with said.open("w") as err:
        words = [sys.executable, "-m", "specmeter", name, *COMMANDS[name]]
        ours = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=err, env=folder.env)
    try:
        if name == "train":
            assert wait(lambda: "prompts after" in said.read_text() or ours.poll() is not None)
        elif name in ("sweep", "demo"):  # with the first record the measured load has begun
            assert wait(lambda: folder.recording() or ours.poll() is not None)
        else:  # more than its warm-up
            assert wait(lambda: generated(ours.pid) > WARM_UP_TOKENS + 4 or ours.poll() is not None)
        assert ours.poll() is None, said.read_text()
        below = descendants(ours.pid)
        assert below or name == "train"
        ours.send_signal(signal.SIGINT)
        assert ours.wait(60) == 130, said.read_text()
        assert "interrupted" in said.read_text() and "Traceback" not in said.read_text()
        assert wait(lambda: not any(map(alive, below)), 30), [words_of(pid) for pid in below]
        assert folder.links() == []
        assert not [path for path in tmp_path.rglob("*") if "part" in path.name]
        if name != "train":
            assert load(tmp_path / "run").run["status"] == "partial"
    finally:
        ours.kill()
        ours.wait()
