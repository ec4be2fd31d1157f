"""Sampling under a budget on a spawned scheduler of SGLang's structure, and NVTX ranges in a live process."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.control import Link, Sampling, arm, disarm, find_link, mix, processes
from specmeter.live.share import watch_share
from specmeter.runtime import layout
from specmeter.runtime.mix import drawn
from specmeter.trace import load_link
from tests.support.children import ask, environment, only_process, running, until
from tests.support.toy import Mark, make_toy, records

MINI = Path(__file__).resolve().parents[1] / "support" / "mini_sglang"
Server = subprocess.Popen[str]
BASE = [sys.executable, "-m", "specmeter"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The miniature server with SGLang's forward counter, its recipe, and a folder of its own for links."""
    shutil.copytree(MINI / "minisgl", tmp_path / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(MINI / "front.py", tmp_path / "front.py")
    scheduler = tmp_path / "minisgl" / "scheduler.py"
    counted = '"""One cycle."""\n        self.forward_ct = getattr(self, "forward_ct", 0) + 1\n'
    scheduler.write_text(scheduler.read_text().replace('"""One cycle."""\n', counted))
    assert "forward_ct" in scheduler.read_text()
    recipe = (
        (MINI / "minisgl.toml").read_text().replace('"arg0|len"\n', '"arg0|len"\niteration = "self.forward_ct"\n', 1)
    )
    (tmp_path / "mini.toml").write_text(recipe)
    (tmp_path / "minisgl-1.2.dist-info").mkdir()
    (tmp_path / "minisgl-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: minisgl\nVersion: 1.2\n")
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@contextmanager
def served(*command: str, before: Sequence[str] = (), ends: bool = False) -> Iterator[tuple[Server, str]]:
    """A command that prints a line when it is up; gives it and that line. ``ends``: it does with its standard input."""
    words = [*before, sys.executable, "-u", *command]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline().strip()
        assert line, server.stderr and server.stderr.read()
        yield server, line
    finally:
        if not ends:
            server.send_signal(signal.SIGINT)
        server.communicate(timeout=40)


def under(place: Path, link: str) -> list[str]:
    """What goes before a command, so that the runtime is in it."""
    return [*BASE, "run", "--recipe", str(place / "mini.toml"), "--link", link, "--"]


def send(server: Server, cycles: int) -> None:
    assert server.stdin is not None
    server.stdin.write(f"{cycles} 2\n")
    server.stdin.flush()


def answer(server: Server) -> str:
    assert server.stdout is not None
    return server.stdout.readline()


def iterations(link: Link) -> dict[int, int]:
    """The engine's own number that each of the ring's cycles read."""
    (scheduler,) = [process for process in processes(link) if process.ring is not None]
    found = records(scheduler.ring)
    wanted = found[
        (found["kind"] == layout.KIND_VALUE) & (found["point"] == link.plan()["value_ids"]["cycle.iteration"])
    ]
    return dict(zip(wanted["cycle"].tolist(), wanted["t0"].tolist(), strict=True))


def test_cycles_are_drawn_by_the_engines_counter_and_a_budget_sets_their_share(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specmeter.live.share.QUIET_S", 10.0)  # the traffic comes surely, on a busy machine later
    scheduler = ("-m", "minisgl.launch_server")
    with served(*scheduler, ends=True) as (plain, _):
        expected = [send(plain, cycles) or answer(plain) for cycles in (40, 40, 2_500, 40)]
    with served(*scheduler, before=under(place, "mini"), ends=True) as (server, _):
        send(server, 40)
        assert answer(server) == expected[0]
        link = find_link("mini")
        until(
            lambda: any("minisgl.workers" in process.report["modules"] for process in processes(link)), "the scheduler"
        )
        assert not arm(link, sampling=Sampling(5, 300)).silent
        send(server, 40)
        assert answer(server) == expected[1], "the tokens are those of a server without probes"
        numbers = iterations(link)
        assert [numbers[cycle] for cycle in sorted(numbers)] == list(range(41, 81)), "the ring counts from 1"
        cycles = load_link(link.path).main.cycles
        sampled = [int(drawn(number, 5, 300)) for number in range(41, 81)]  # for the cycle after each
        assert cycles.probed[1:].tolist() == sampled[:-1] and cycles.drawn.all()
        trace = load_link(link.path)
        calls = trace.main.calls[:, trace.index.names.index("verify.forward")]
        assert np.array_equal(calls > 0, cycles.probed == 1)

        send(server, 2_500)
        share = watch_share(link, Sampling(5, 300), 50.0, 30.0)
        assert share.cost is not None and share.cost.n >= 60 and share.point_percent, share
        assert not mix(link, 5, share.permille, why=share.why).silent
        assert answer(server) == expected[2]
        (scheduler,) = [process for process in processes(link) if process.ring is not None]
        assert scheduler.report["sampling"]["counter"] == "iteration" and scheduler.report["faults"] == []
        said = subprocess.run([*BASE, "status"], capture_output=True, text=True, check=True).stdout
        assert "of the cycles are sampled" in said and "drawn by the engine's forward counter" in said
        assert re.search(r"(\d+) of \1 points armed, \1 hit", said), said
        assert not disarm(link).silent
        send(server, 40)
        assert answer(server) == expected[3]


def test_profile_under_a_budget_compares_sampled_and_clean_cycles(place: Path) -> None:
    words = ["profile", "--engine", "sglang", "--budget", "90", "--requests", "4", "--max-tokens", "300"]
    words += ["--link", "front", "--baseline", "none", "--out", "profiled", "--json"]
    with served(str(place / "front.py"), before=under(place, "front")) as (_server, port):
        words += ["--url", f"http://127.0.0.1:{port}"]
        done = subprocess.run([*BASE, *words], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["result"]
    sampling = found["sampling"]
    assert sampling["counter"] == "iteration" and sampling["budget_percent"] == 90.0 and sampling["endless"] == []
    assert sampling["sampled"] > 0 and sampling["clean"] > 0, sampling
    assert sampling["sampled"] + sampling["clean"] > 200
    assert 0.7 < found["cycle"]["count"] / (sampling["sampled"] + sampling["clean"]) <= 1, "all but stalls"
    share, drawn_from = sampling["permille"] / 1000, sampling["sampled"] + sampling["clean"]
    assert abs(sampling["share_percent"] / 100 - share) < max(0.02, 5 * (share * (1 - share) / drawn_from) ** 0.5)
    assert {row["name"] for row in found["phases"]} >= {"draft", "verify", "accept", "extend"}
    shown = subprocess.run(
        [*BASE, "report", str(place / "profiled")], capture_output=True, text=True, check=True
    ).stdout
    shown = " ".join(shown.split())  # lines are broken at the terminal's width
    assert "Sampling: " in shown and "the same cycles on every rank" in shown


NVTX = """
import sys, types
log = []
torch, nvtx = types.ModuleType("torch"), types.ModuleType("torch.cuda.nvtx")
torch.version = types.SimpleNamespace(cuda="13.0")
nvtx.range_push = lambda name: log.append("+" + name) or 0
nvtx.range_pop = lambda: log.append("-") or 0
sys.modules["torch"], sys.modules["torch.cuda.nvtx"] = torch, nvtx
import toymod
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
SOURCE = """
def cycle(n):
    try:
        return leaf(n)
    except ValueError:
        return -1

def leaf(n):
    return 10 // n if n else int("none")
"""


def test_nvtx_ranges_can_be_put_into_a_live_process_and_out_again(tmp_path: Path) -> None:
    marks = [Mark("cycle", role="cycle", kind="body"), Mark("leaf", "verify.forward")]
    link = make_toy(tmp_path, "toymod", SOURCE, marks).link(tmp_path / "links")
    with running(NVTX, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert not arm(link).silent
        assert ask(child, "(toymod.cycle(5), log)") == "(2, [])"
        assert not arm(link, nvtx=True).silent
        both = ["+cycle", "+verify.forward", "-", "-"]
        assert ask(child, "(toymod.cycle(5), log)") == repr((2, both))
        assert ask(child, "(toymod.cycle(0), log)") == repr((-1, both * 2)), "the call that raised is balanced too"
        assert not disarm(link).silent
        assert only_process(link).report["nvtx"] == {"reason": "", "pushed": 4}
        assert ask(child, "(toymod.cycle(5), len(log))") == "(2, 8)"
        assert not arm(link, nvtx=False).silent
        assert ask(child, "(toymod.cycle(5), len(log))") == "(2, 8)"
    spans: Any = records(only_process(link).ring)
    assert len(spans[spans["kind"] == layout.KIND_HOST_SPAN]) == 2 + 2 + 1 + 2
