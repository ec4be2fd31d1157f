"""Links are listed while others are made and removed by other processes: none that goes away meanwhile is an error."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from specmeter.control import find_link, make_link, processes
from specmeter.control.link import links

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
