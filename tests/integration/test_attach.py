"""Attaching to real running processes: by gdb, by their own line; refusals; and that nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmeter import cli
from specmeter.attach import routes
from specmeter.control import Link, arm, detach, disarm, find_link, processes
from tests.integration.test_patch import RECIPE, WORKER
from tests.support.children import ask, running, until
from tests.support.recipes import install
from tests.support.toy import Mark, make_toy

# Executes the expressions it is sent, from its main thread, which is what a server's loop does.
SERVER = """
import gc, os, sys, threading
from fork.worker import Worker
worker, original = Worker(), Worker.cycle.__code__

def state():
    files = sorted(os.readlink('/proc/self/fd/' + name) for name in os.listdir('/proc/self/fd')
                   if os.path.exists('/proc/self/fd/' + name))
    maps = sum('specmeter' in line or 'links' in line for line in open('/proc/self/maps'))
    return [Worker.cycle.__code__ is original, len(os.listdir('/proc/self/task')), files, maps,
            sorted(n for n in vars(sys.modules['__main__']) if n[:2] != '__'), len(sys.meta_path)]

def rss():
    gc.collect()
    return int(open('/proc/self/statm').read().split()[1]) * 4096

print("ready", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""
# The main thread waits in short sleeps, as an engine's loop does in its queue.
TICKING = SERVER.replace(
    "for line in sys.stdin:\n",
    """
import select
while True:
    while not select.select([0], [], [], 0.02)[0]:
        pass
    line = sys.stdin.readline()
    if not line:
        break
""",
)
needs_gdb = pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
PYTHONS = [
    sys.executable,
    *(
        str(path)
        for version in ("3.9", "3.10", "3.12", "3.13")
        for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    ),
]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    install(tmp_path / "lib", "fork", {"worker": WORKER})
    (tmp_path / "my.toml").write_text(RECIPE)
    yield tmp_path


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def env_of(engine: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(engine / "lib")}


def ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()


@needs_gdb
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parent.parent.name)
def test_gdb_attach_arm_disarm_detach(engine: Path, python: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(TICKING, env_of(engine), python) as child:
        ready(child)
        before = ask(child, "state()")
        for turn in range(2):
            code, answer = call(capsys, "attach", child.pid, "--recipe", engine / "my.toml")
            assert code == 0, answer
            assert (answer["result"]["route"], answer["result"]["points"]) == ("gdb", 2)
            link = find_link(answer["result"]["link"])
            if turn:
                code, again = call(capsys, "attach", child.pid, "--recipe", engine / "my.toml")
                assert again["result"]["route"] == "its own control line" and again["result"]["link"] == link.id
            assert not arm(link).silent
            assert ask(child, "[worker.cycle(3), Worker.cycle.__code__ is original]") == "[6, False]"
            assert not disarm(link).silent
            assert call(capsys, "detach", "--link", link.id)[0] == 0
            assert not link.path.exists()
            # The control thread ends just after its last answer.
            until(lambda: ask(child, "state()") == before, "code, threads, files, maps, names and finders as they were")


@needs_gdb
def test_a_process_that_does_not_come_to_a_safe_point(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(SERVER, env_of(engine)) as child:  # blocked in one read
        ready(child)
        code, answer = call(capsys, "attach", child.pid, "--recipe", engine / "my.toml", "--timeout", "0.5")
        assert code == 4 and "did not run what was queued" in answer["error"]["what"]
        assert ask(child, "worker.cycle(3)") == "6", "what was queued finds no link and does nothing"
        assert ask(child, "'_specmeter_runtime' in sys.modules") == "False"


@needs_gdb
def test_signals_for_the_server_meanwhile(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """gdb stops at a signal unless told otherwise: in the middle of a call, from which the process never came back."""
    numbers = (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    handled = f"import signal\nfor number in {tuple(map(int, numbers))}: signal.signal(number, lambda *_: None)\n"
    with running(handled + TICKING, env_of(engine)) as child:
        ready(child)
        over = threading.Event()

        def storm() -> None:
            while not over.wait(0.0003):
                for number in numbers:
                    os.kill(child.pid, number)

        sender = threading.Thread(target=storm)
        sender.start()
        try:
            code, answer = call(capsys, "attach", child.pid, "--recipe", engine / "my.toml")
        finally:
            over.set()
            sender.join()
        assert code == 0, answer
        assert ask(child, "worker.cycle(3)") == "6", child.poll()


ROUNDS = int(os.environ.get("SPECMETER_ATTACH_ROUNDS", "100"))  # 1000 in the measurements: a minute
WARM_UP, EACH = 25, 25  # the allocator's arenas settle first; rounds between two looks at the process


def test_a_thousand_rounds_leave_the_process_as_it_was(tmp_path: Path) -> None:
    toy = make_toy(
        tmp_path,
        "toymod",
        "def leaf(x):\n    return x\n\ndef cycle(x):\n    return leaf(x)\n",
        [Mark("cycle", role="cycle"), Mark("leaf")],
    )
    server = SERVER.replace("from fork.worker import Worker", "import toymod as Worker").replace(
        "Worker(), ", "Worker, "
    )
    with running(server, {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}) as child:
        ready(child)
        before, sizes = ask(child, "state()"), []
        for turn in range(ROUNDS + WARM_UP):
            # What gdb and sys.remote_exec have the process run; gdb itself is tested above.
            link = toy.link(tmp_path / "links", link_id=f"round{turn}", capacity=1024)
            starter, answer = routes.prepare(link, child.pid)
            ask(child, f"exec(open({str(starter)!r}).read(), {{}})")
            assert routes.wait_for_answer(answer, 60) == ""
            assert not arm(link).silent and ask(child, "worker.cycle(3)") == "3"
            assert not disarm(link).silent and not detach(link).silent
            shutil.rmtree(link.path)
            if turn % EACH == EACH - 1:
                until(lambda: ask(child, "state()") == before, "a process as it was")
                sizes.append(int(ask(child, "rss()")))
        growth = sizes[-1] - sizes[0]
        print(f"memory grew by {growth} bytes in {ROUNDS} rounds: {sizes}")
        assert growth < 1 << 19


def test_processes_of_other_links_are_told_apart(tmp_path: Path) -> None:
    toy = make_toy(
        tmp_path,
        "toymod",
        "def cycle(x):\n    return x\n\ndef step(x):\n    return cycle(x)\n",
        [Mark("cycle", role="cycle")],
    )
    one, two = (toy.link(tmp_path / "links", link_id=name) for name in ("one", "two"))
    server = "import sys, toymod\nprint('ready', flush=True)\nfor line in sys.stdin: print(eval(line), flush=True)\n"
    with running(server, {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}) as child:
        ready(child)

        def attach(link: Link) -> str | None:
            starter, answer = routes.prepare(link, child.pid)
            ask(child, f"exec(open({str(starter)!r}).read(), {{}})")
            return routes.wait_for_answer(answer, 60)

        assert attach(one) == "" and attach(one) == ""
        assert "runtime of another link" in (attach(two) or "")
        assert routes.carried(child.pid, tmp_path / "links") == one
        assert [len(processes(link)) for link in (one, two)] == [1, 0]
        detach(one)
        until(lambda: attach(two) == "", "the end of the first one's control thread")
        assert routes.carried(child.pid, tmp_path / "links") == two
