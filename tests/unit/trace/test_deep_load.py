"""Exported windows read back: on the host's clock, joined to points and cycles; damaged ones refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.errors import SpecmeterError
from specmeter.trace.deep import load_deep, save_deep
from specmeter.trace.deep_synthetic import Call, Kernel
from tests.support.deep_files import (
    CYCLE,
    DRAFT,
    IDENT,
    NATIVE,
    RECORDED,
    SAMPLE,
    USUAL,
    VERIFY,
    Files,
    played,
    same,
)


def times_off(window: Any, truth: Any) -> int:
    """How far the kernels' begins are off, ns."""
    return int(np.abs(window.kernels["t0_ns"] - truth.kernels["t0_ns"]).max())


def one(files: Files) -> Any:
    [window] = load_deep(files.write())
    return window


def test_window_comes_out_as_it_was_played(tmp_path: Path) -> None:
    files = played(tmp_path, count=6)
    window, truth = one(files), files.truth
    assert window.setting == "k=3" and window.device == "Synthetic device" and window.notes == ()
    # The last cycle's kernels may have been running when the profiler was stopped.
    assert window.cycles == (1, 5)
    for column in ("kind", "stream", "dur_ns", "launch_dur_ns", "graph_launch", "bytes", "cycle", "point"):
        assert same(window, truth, column), column
    names = np.array(window.names)[window.kernels["name"]]
    assert names.tolist() == np.array(truth.names)[truth.kernels["name"]].tolist()
    assert times_off(window, truth) <= window.clock_error_ns <= 300
    assert (window.kernels["launch_ns"] - truth.kernels["launch_ns"]).max() <= window.clock_error_ns
    replays = window.kernels["graph"]
    assert len(np.unique(replays[replays >= 0])) == 6
    assert set(window.kernels["point"][replays >= 0].tolist()) == {DRAFT}
    assert [window.sync_names[at] for at in window.syncs["name"]] == ["cudaStreamSynchronize"] * 6
    assert set(window.syncs["point"].tolist()) == {SAMPLE} and window.syncs["cycle"].tolist() == [1, 2, 3, 4, 5, 6]


def test_what_a_cycle_launches_between_its_points_is_the_cycles_own(tmp_path: Path) -> None:
    glue = Call(CYCLE, (Kernel("glue", 2_000),), host_ns=5_000)
    files = played(tmp_path, calls=(*USUAL[:2], glue, USUAL[2]))
    window = one(files)
    assert same(window, files.truth, "point") and same(window, files.truth, "cycle")
    names = np.array(window.names)[window.kernels["name"]]
    assert set(window.kernels["point"][names == "glue"].tolist()) == {CYCLE}


@pytest.mark.parametrize("drift_ppm", [-80.0, 0.0, 40.0])
def test_a_drifting_clock_stays_within_its_bound(tmp_path: Path, drift_ppm: float) -> None:
    files = played(tmp_path, count=400, drift_ppm=drift_ppm)
    window = one(files)
    assert times_off(window, files.truth) <= window.clock_error_ns + 1 < 3_000


@pytest.mark.parametrize("thread", [NATIVE, RECORDED, IDENT & 0xFFFFFFFF, -RECORDED])
def test_threads_are_known_by_the_systems_id_and_by_the_pthreads(tmp_path: Path, thread: int) -> None:
    window = one(played(tmp_path, thread=thread))
    assert window.notes == () and (window.kernels["point"] > 0).all()


def test_a_thread_that_nobody_names_is_the_one_whose_spans_it_fits(tmp_path: Path) -> None:
    window = one(played(tmp_path, thread=999))
    assert (window.kernels["point"] > 0).all() and "taken for its busiest one" in window.notes[0]


def test_a_device_clock_that_is_ahead_is_put_back_and_said(tmp_path: Path) -> None:
    files = played(tmp_path, device_ahead_ns=9_000)
    window = one(files)
    assert (window.kernels["t0_ns"] >= window.kernels["launch_ns"]).all()
    assert times_off(window, files.truth) <= window.clock_error_ns
    assert "clock was" in window.notes[0] and "ahead" in window.notes[0]


def test_only_cycles_with_everything_that_they_launched_count(tmp_path: Path) -> None:
    files = played(tmp_path, count=10)
    kernels = files.truth.kernels
    lost = kernels["t0_ns"][(kernels["cycle"] == 3) & (kernels["point"] == VERIFY)][0]
    victim = next(
        e for e in files.events if e["cat"] == "kernel" and e["name"] == "gemm"
        and abs(e["ts"] * 1000 + files.base_ns - _unix(files) - int(lost)) < 2_000
    )  # fmt: skip
    files.events.remove(victim)
    window = one(files)
    assert window.cycles == (4, 9) and "lack kernels" in window.notes[0]


def _unix(files: Files) -> int:
    before, unix, after = files.meta["start_pairs"][0]
    return int(unix - (before + after) // 2)


def test_no_more_cycles_than_were_asked_for(tmp_path: Path) -> None:
    assert one(played(tmp_path, count=9, wanted=4)).cycles == (1, 4)


def test_kernels_from_before_the_window_have_no_launch(tmp_path: Path) -> None:
    files = played(tmp_path)
    gone = next(e for e in files.events if e["name"] == "cudaGraphLaunch")
    files.events.remove(gone)
    window = one(files)
    orphans = window.kernels["launch_ns"] == -1
    assert orphans.sum() == 11 and set(window.kernels["cycle"][orphans].tolist()) == {-1}
    assert set(window.kernels["point"][orphans].tolist()) == {-1} and not window.kernels["graph_launch"][orphans].any()


def test_without_marks_the_bound_is_wide_and_said(tmp_path: Path) -> None:
    files = played(tmp_path)
    files.events = [e for e in files.events if e["name"] != "cudaStreamIsCapturing"]
    window = one(files)
    assert times_off(window, files.truth) <= window.clock_error_ns
    assert window.clock_error_ns >= 100_000 and "calendar" in window.notes[0]


def test_a_driver_call_inside_a_runtime_call_is_not_taken_for_the_launch(tmp_path: Path) -> None:
    files = played(tmp_path)
    for event in [e for e in files.events if e["name"] == "cudaLaunchKernel"]:
        inner = {**event, "cat": "cuda_driver", "name": "cuLaunchKernel", "ts": event["ts"] + 1, "dur": 1.0}
        files.events.append(inner)
    window = one(files)
    assert same(window, files.truth, "launch_dur_ns") and window.cycles == (1, 5)


def test_collectives_tell_their_bytes(tmp_path: Path) -> None:
    files = played(tmp_path)
    first = next(e for e in files.events if e["name"] == "softmax")
    first["args"] |= {"In msg nelems": 4096, "dtype": "BFloat16", "Collective name": "allreduce"}
    window = one(files)
    assert window.kernels["bytes"].max() == 8192


def test_cost_compares_with_cycles_around_the_window(tmp_path: Path) -> None:
    files = played(tmp_path, count=20)
    spans = [row for row in files.rows if row[3] == 1]
    length = spans[1][0] - spans[0][0]
    first = spans[0][0] - 10_000_000 - 12 * length // 2
    early = [(first + i * length // 2, first + i * length // 2 + 10, 0, 1, 0, 0, 0) for i in range(12)]
    files.rows = early + files.rows
    cost = one(files).cost
    assert cost["ratio"]["low"] <= cost["ratio"]["point"] <= cost["ratio"]["high"]
    assert cost["ratio"]["point"] == pytest.approx(2.0, rel=0.01) and cost["before_ns"]["n"] >= 5
    assert cost["prepare_s"] == pytest.approx(0.0085) and cost["after_ns"] is None
    assert cost["left_ratio"] is None


def test_cost_tells_what_the_profiler_leaves_behind(tmp_path: Path) -> None:
    files = played(tmp_path, count=20)
    spans = [row for row in files.rows if row[3] == 1]
    length, point = spans[1][0] - spans[0][0], spans[0][3]
    first, last = spans[0][0] - 10_000_000 - 6 * length, spans[-1][0] + 200_000_000
    early = [(first + i * length // 2, first + i * length // 2 + 10, 0, point, 0, 0, 0) for i in range(12)]
    number = max(row[2] for row in spans)
    late = [(last + i * length, last + i * length + 10, number + 1 + i, point, 0, 0, 0) for i in range(12)]
    files.rows = [*early, *files.rows, *late]
    cost = one(files).cost
    left = cost["left_ratio"]
    assert left["point"] == pytest.approx(2.0, rel=0.01) and left["low"] > 1.5
    assert cost["ratio"]["point"] == pytest.approx(2.0, rel=0.01), "the cycles after the window are not without it"


def _first(files: Files, **changed: Any) -> None:
    files.events[0] |= changed


BROKEN: dict[str, tuple[Callable[[Files], object], Callable[[str], str], str]] = {
    "cut off": (lambda f: None, lambda text: text[: len(text) // 2], "cannot be read"),
    "empty": (lambda f: None, lambda text: "", "cannot be read"),
    "no object": (lambda f: None, lambda text: "[]", "damaged"),
    "no events": (lambda f: None, lambda text: "{}", "damaged"),
    "NaN": (lambda f: _first(f, ts=float("nan")), lambda text: text, "cannot be read"),
    "a time that is text": (lambda f: _first(f, ts="soon"), lambda text: text, "damaged"),
    "no time": (lambda f: f.events[0].pop("ts"), lambda text: text, "damaged"),
    "negative": (lambda f: _first(f, dur=-1.0), lambda text: text, "damaged"),
    "beyond 64 bits": (lambda f: _first(f, ts=1e300), lambda text: text, "damaged"),
    "a correlation that is a list": (lambda f: _first(f, args={"correlation": [1]}), lambda text: text, "damaged"),
    "a name that is a number": (lambda f: _first(f, name=5), lambda text: text, "damaged"),
    "an event that is text": (lambda f: f.events.append("x"), lambda text: text, "damaged"),  # type: ignore[arg-type]
    "another window's file": (
        lambda f: setattr(f, "base_ns", f.base_ns - 10**10),
        lambda text: text,
        "another window's",
    ),
    "meta of another format": (lambda f: f.meta.update(format=2), lambda text: text, "damaged"),
    "meta without its begin": (lambda f: f.meta.pop("begin_ns"), lambda text: text, "damaged"),
    "meta with odd marks": (lambda f: f.meta.update(start_marks=[[1]]), lambda text: text, "damaged"),
    "a base beyond 64 bits": (lambda f: setattr(f, "base_ns", 1 << 63), lambda text: text, "damaged"),
    "meta with no number for its thread": (lambda f: f.meta.update(thread="x"), lambda text: text, "damaged"),
    "meta with a huge begin": (lambda f: f.meta.update(begin_ns=1 << 63), lambda text: text, "damaged"),
    "meta without cycles": (lambda f: f.meta.update(cycles=0), lambda text: text, "damaged"),
    "meta with huge marks": (lambda f: f.meta.update(start_marks=[[1, 1 << 80]]), lambda text: text, "cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_windows_are_refused_and_never_half_read(tmp_path: Path, name: str) -> None:
    change, text, said = BROKEN[name]
    files = played(tmp_path, count=2)
    change(files)
    files.write(text)
    with pytest.raises(SpecmeterError, match=said):
        load_deep(tmp_path)


@pytest.mark.parametrize("how", ["flipped", "cut off", "gone"])
def test_damaged_packed_windows_are_refused(tmp_path: Path, how: str) -> None:
    link, run = played(tmp_path / "link", count=2).write(), tmp_path / "run"
    run.mkdir()
    assert save_deep(link, run) == 1
    (run / "plan.json").write_bytes((link / "plan.json").read_bytes())
    [packed] = (run / "deep").glob("*.gz")
    raw = bytearray(packed.read_bytes())
    raw[raw.index(0, 10) + 1] = 0b111  # behind the name: a kind of block that there is not
    packed.write_bytes(raw if how == "flipped" else raw[: len(raw) // 2])
    if how == "gone":
        packed.unlink()
    with pytest.raises(SpecmeterError, match="cannot be read"):
        load_deep(run)


def test_folder_without_windows_gives_none(tmp_path: Path) -> None:
    assert load_deep(tmp_path) == []


def test_nothing_on_the_device_is_said(tmp_path: Path) -> None:
    files = played(tmp_path)
    files.events = [e for e in files.events if e["cat"] == "cuda_runtime"]
    window = one(files)
    assert window.cycle_count == 0 and "nothing on the device" in " ".join(window.notes)
