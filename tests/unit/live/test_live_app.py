"""``top`` under Textual's pilot: what is on the screen, keys, and what changes."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from textual.pilot import Pilot
from textual.widgets import Static

from specmeter.cli import main
from specmeter.commands import top
from specmeter.control import remove_link
from specmeter.errors import SpecmeterError
from specmeter.live import server as server_module
from specmeter.live.app import KEYS, Board, Top
from specmeter.live.view import Shown
from specmeter.live.watch import LinksHere
from tests.support.growing import GrowingRing
from tests.support.saved_runs import MS, PLAN, recording


def screen(app: Top) -> str:
    """The board as a person sees it, and the two lines below it."""
    board = app.query_one(Board)
    rows = [board.render_line(y).text.rstrip() for y in range(board.size.height)]
    return "\n".join([*rows, *(str(app.query_one(f"#{name}").content) for name in ("legend", "status"))])  # type: ignore[attr-defined]


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrowingRing:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)
    return GrowingRing(tmp_path / "specmeter", PLAN, "one")


def drive(app: Top, steps: object, size: tuple[int, int] = (100, 24)) -> None:
    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await steps(pilot)  # type: ignore[operator]

    asyncio.run(run())


async def shown(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Let the app go on until it is so, or for so long that the test's next words say what is missing."""
    for _ in range(600):
        await pilot.pause(0.05)
        if condition():
            return


def fresh_rows() -> list[tuple[int, ...]]:
    """A recording that ends now, so that it is recent."""
    length = 4 * (30 * 27 + 102) * MS
    return recording(prompts=4, cycles=30, start=time.perf_counter_ns() - length)[0]


def test_a_server_shows_up_with_its_bar_and_figures(ring: GrowingRing) -> None:
    app = Top(LinksHere(), 20, Shown())

    async def steps(pilot: Pilot[None]) -> None:
        assert "> one  synthetic 0  armed  1 process" in screen(app) and "no cycle yet" in screen(app)
        ring.add(fresh_rows())
        await shown(pilot, lambda: "break-even" in screen(app))
        seen = screen(app)
        assert "|DDDDDDD" in seen and "16.1" in seen and "break-even 1.59" in seen and "kept 6" in seen
        assert "V=verify 59.3 %" in seen and KEYS in seen

    drive(app, steps)


def test_only_lines_that_change_are_drawn_again(ring: GrowingRing) -> None:
    app = Top(LinksHere(), 1, Shown())

    async def steps(pilot: Pilot[None]) -> None:
        board = app.query_one(Board)
        drawn: list[int] = []
        refresh = board.refresh
        board.refresh = lambda *regions, **k: (drawn.append(len(regions)), refresh(*regions, **k))[1]  # type: ignore[assignment,func-returns-value]
        app._draw()
        app._draw()
        assert drawn == [], "the same lines cost nothing"
        ring.report(armed=False)
        server = app.servers["one"]
        server.look()
        app._draw()
        assert drawn[0] == 2, "the heading, and what to do"

    drive(app, steps)


def test_frozen_stands_still_and_still_reads(ring: GrowingRing) -> None:
    app = Top(LinksHere(), 20, Shown())

    async def steps(pilot: Pilot[None]) -> None:
        await pilot.press("space")
        before = screen(app)
        assert "FROZEN" in before
        ring.add(fresh_rows())
        await shown(pilot, lambda: app.servers["one"].ranks)
        await pilot.pause(0.3)
        assert screen(app) == before
        await pilot.press("space")
        assert "verify" in screen(app) and "FROZEN" not in screen(app)

    drive(app, steps)


def test_choosing_and_links_that_come_and_go(ring: GrowingRing, tmp_path: Path) -> None:
    other = GrowingRing(tmp_path / "specmeter", PLAN, "two")
    app = Top(LinksHere(), 20, Shown())

    async def steps(pilot: Pilot[None]) -> None:
        assert "> one" in screen(app) and "  two" in screen(app)
        await pilot.press("down", "down")
        assert "> two" in screen(app)
        remove_link(other.link)
        app.watch_._listed = -9
        app.tick()
        assert "> one" in screen(app) and "two" not in screen(app)

    drive(app, steps)


def test_arming_a_process_that_does_not_answer_is_said(ring: GrowingRing) -> None:
    app = Top(LinksHere(), 20, Shown())
    app.answer_s = 0.2

    async def steps(pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await shown(pilot, lambda: "silent" in screen(app))
        assert "one: 0 disarmed, 1 silent" in screen(app)
        assert json.loads((ring.link.path / "link.json").read_text())["state"]["armed"] is False

    drive(app, steps)


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 50)])
def test_every_terminal_size_is_filled_and_not_overrun(ring: GrowingRing, size: tuple[int, int]) -> None:
    app = Top(LinksHere(), 20, Shown())

    async def steps(pilot: Pilot[None]) -> None:
        ring.add(fresh_rows())
        await shown(pilot, lambda: "DV" in screen(app))
        board = app.query_one(Board)
        assert all(board.render_line(y).cell_length == size[0] for y in range(board.size.height))
        said = app.query_one("#legend", Static)
        lines = str(said.content).splitlines()
        assert len(lines) == said.size.height and all(len(line) <= size[0] for line in lines)
        assert "?=between points" in lines[-1] and board.size.height + len(lines) + 1 == size[1]
        assert "DV" in screen(app)

    drive(app, steps, size)


def test_no_server_and_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["top"]) == 2
    assert "--once" in capsys.readouterr().err
    assert main(["top", "--once", "--seconds", "1"]) == 0
    assert "No server" in capsys.readouterr().out
    for words in (["--rate", "0"], ["--seconds", "0"], ["--link", "none"], ["--baseline", str(tmp_path)]):
        assert main(["top", "--once", *words]) == 2


def test_once_as_json(ring: GrowingRing, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--json", "--seconds", "1", "--link", "one"]) == 0
    document = json.loads(capsys.readouterr().out)
    (server,) = document["result"]["servers"]
    assert document["schema"] == "specmeter/top/1" and server["link"] == "one" and server["ranks"] == []


def test_metrics_text_file_of_what_runs(ring: GrowingRing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "specmeter.prom"
    writer = threading.Timer(0.6, lambda: ring.add(fresh_rows()))
    writer.start()
    assert main(["metrics", "--once", "--every", "2", "--textfile", str(out), "--link", "one"]) == 0
    writer.join()
    families = {f.name: f for f in text_string_to_metric_families(out.read_text())}
    counted = {s.name: s.value for s in families["specmeter_cycle_duration_seconds"].samples}
    assert counted["specmeter_cycle_duration_seconds_count"] == pytest.approx(116, abs=2)
    assert families["specmeter_break_even_tokens"].samples[0].value == pytest.approx(1.59, abs=0.01)
    assert out.stat().st_mode & 0o777 == 0o600 and list(out.parent.glob("*.part")) == []
    # What was served before the look is in the ring, and --once shows it.
    capsys.readouterr()
    assert main(["metrics", "--once", "--every", "0.3", "--link", "one"]) == 0
    printed = text_string_to_metric_families(capsys.readouterr().out)
    held = {s.name: s.value for family in printed for s in family.samples}
    assert held["specmeter_cycle_duration_seconds_count"] == counted["specmeter_cycle_duration_seconds_count"]
    assert held["specmeter_armed"] == 1
    assert main(["metrics", "--once", "--every", "0.3", "--textfile", str(tmp_path / "no" / "f")]) == 5
    assert main(["metrics", "--listen", "127.0.0.1:1", "--once"]) == 2
    assert "interrupted" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(ring: GrowingRing, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["metrics", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 5
    assert "cannot be listened on" in capsys.readouterr().err


def test_without_textual_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "specmeter.live.app", None)
    with pytest.raises(SpecmeterError) as error:
        top._app(LinksHere(), 10, Shown())
    assert "'.[live]'" in error.value.next_step and error.value.exit == 5
