"""Links are listed while others are made and removed by other processes: none that goes away meanwhile is an error."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specmeter.cli import main
from specmeter.control import find_link, make_link, processes
from specmeter.control.link import links
from specmeter.errors import SpecmeterError

MAKER = """
import sys
from pathlib import Path
from specmeter.control import make_link, remove_link
print("ready", flush=True)
while True:
    link = make_link({"points": []}, {}, base=Path(sys.argv[1]), link_id="passing")
    (link.path / "7-1.json").write_text("{}")
    remove_link(link)
"""


def test_links_that_others_remove_meanwhile_are_no_error(tmp_path: Path) -> None:
    make_link({"points": []}, {}, base=tmp_path, link_id="standing")
    with subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE) as maker:
        try:
            assert maker.stdout is not None and maker.stdout.readline() == b"ready\n"
            seen, until = 0, time.monotonic() + 2
            while time.monotonic() < until or (not seen and time.monotonic() < until + 30):
                found = links(tmp_path)
                assert {link.id for link in found} <= {"standing", "passing"} and found[0].id == "standing"
                seen += sum(len(processes(link)) for link in found)
                assert find_link("standing", tmp_path).id == "standing"
            assert seen, "the passing link was never met"
        finally:
            maker.kill()


def test_status_names_the_engine_beside_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    plan = {"points": [], "engine": "vllm", "engine_version": "0.32.0"}
    make_link(plan, {}, link_id="mine", command=["python", "-m", "server"])
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("link mine  vllm 0.32.0  dormant  python -m server\n")
    assert main(["status", "--json"]) == 0
    link = json.loads(capsys.readouterr().out)["result"]["links"][0]
    assert link["engine"] == {"name": "vllm", "version": "0.32.0"}


def test_a_link_that_is_not_there_comes_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError) as error:
        find_link("mine", tmp_path)
    assert "specmeter status" in str(error.value)
