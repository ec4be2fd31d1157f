"""The text reports: verdict first, as wide as asked, plain unless on a terminal, names inert."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.profile import _divide, analyse
from specmeter.analysis.stats import Interval
from specmeter.api.display import run_html
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.recipes.loader import built_in_engines
from specmeter.reporters.bench_view import bench_sentence
from specmeter.reporters.check_words import wiring_word
from specmeter.reporters.language import LETTERS
from specmeter.reporters.levers import levers
from specmeter.reporters.numbers import accept_range, bounds, no_interval, plus_minus, span, units
from specmeter.reporters.terminal import print_analysis, print_headed, render_analysis
from specmeter.trace.rundir import Run, load
from tests.support.report_documents import check_result, compared, damaged, profile, record, save, sweep, tuned

EVIL = "evil\x1b[31m\x1b]0;title\x07[red]x[/red]\u202e\u2028\nSecond line"
CHECK: dict[str, Any] = {"kind": "check", **check_result()}


def bench_level(at_once: int, rate: float) -> dict[str, Any]:
    row = {"mean": 8.0, "p50": 8.0, "p90": 9.5, "p99": None}
    return {
        "concurrency": at_once, "rate_per_s": None, "requests": 24, "failed": 0, "total_tok_s": rate, "ttft_ms": row,
        "token_ms": row, "gap_ms": row, "user_tok_s": row, "accept_length_tokens": 2.1, "generator_core_share": 0.03,
    }  # fmt: skip


LEVELS = [bench_level(1, 60.0), bench_level(4, 120.0)]
BENCH: dict[str, Any] = {
    "kind": "bench", "prompts": "built-in", "max_tokens": 64, "levels": LEVELS,
    "verdict": {"word": "measured", "sentence": bench_sentence(LEVELS)},
}  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160, 200])
def test_every_kind_starts_with_the_verdict_and_fits(tmp_path: Path, width: int) -> None:
    for document, first in (
        (profile(tmp_path), "Speculation wins"),
        (sweep(tmp_path), "k2 is best"),
        (CHECK, "Wiring is wrong: The head is fed"),
        (compared(), "tuned is "),
        (load(tuned(tmp_path / "tune", compared())).analysis, "k=2 is best"),
        (BENCH, "120.0 tok/s at 4 requests at once, the"),
    ):
        text = render_analysis(document, width)
        assert text.startswith(first)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "\x1b" not in text and "…" not in text


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"setting": "k=3", "steps": 3}, "Setting: k=3"),
        ({"setting": "server", "steps": 2}, "Setting: k=2, the server's own"),
        ({"setting": None, "steps": None}, ""),
    ],
)
def test_the_first_lines_of_a_profile_name_the_setting(tmp_path: Path, known: dict[str, Any], line: str) -> None:
    lines = render_analysis({**profile(tmp_path), **known}, 200).splitlines()
    assert lines[0].startswith("Speculation wins") and lines[1] == line


def test_cycles_outside_of_every_request_are_explained(tmp_path: Path) -> None:
    document = profile(tmp_path)
    document["cycle"]["dropped"] = {"outside of every request": 22, "first after arming": 1}
    text = render_analysis(document, 200)
    assert "22 outside of every request (none of those sent here: the server was idle, or another client's), 1" in text


def test_the_wiring_has_words_of_its_own() -> None:
    found = check_result()
    assert found["errors"] and wiring_word(found) == "wrong"
    fed = found["feeds"][0]["states"]
    feed = {**found["feeds"][0], "used_by_default": True}
    sound: dict[str, Any] = {**found, "errors": 0, "findings": [], "feeds": [feed]}
    assert wiring_word({**sound, "trained": {"states": fed}}) == "right"
    assert wiring_word({**sound, "trained": {"states": [0, 1, 2]}}) == "doubtful"
    assert wiring_word({**sound, "trained": {"states": None}}) == "unknown"


def test_bars_share_one_scale(tmp_path: Path) -> None:
    document = profile(tmp_path)
    assert document["verdict"]["sentence"].endswith("verify is 60 % of the cycle, waiting 5 %.")
    lines = {line[:10].strip(): line for line in render_analysis(document, 125).splitlines() if "|" in line}
    # 16 ms of cycle, 10 ms of plain step, 20 ms for the two tokens of a cycle: 100 cells are 20 ms.
    cells = {name: re.findall(r"\|(.*)\|", line)[0] for name, line in lines.items()}
    assert len(cells["pays below"]) == pytest.approx(100, abs=1)
    assert len(cells["plain step"]) == pytest.approx(50, abs=1) and len(cells["cycle"]) == pytest.approx(80, abs=1)
    assert cells["cycle"].count(LETTERS["verify"]) == pytest.approx(48, abs=1)


def test_levers_are_amdahl_bounds_and_fewer_steps(tmp_path: Path) -> None:
    document = profile(tmp_path)
    found = {lever.what: lever for lever in levers(document)}
    assert found["no waiting"].gain == pytest.approx(0.05 / 0.95) and found["no waiting"].bound
    # One step of two: 1 + 2/3 tokens in 14.4 ms against 2 tokens in 16 ms is a loss, so it is no lever.
    assert not any("instead of" in what for what in found)
    for place, share in enumerate((0.6, 0.0)):
        document["acceptance"]["positions"][place]["cumulative"] = share
    shorter = next(lever for lever in levers(document) if "1 draft step instead of 2" in lever.what)
    assert shorter.gain == pytest.approx(16 / 14.4 - 1) and not shorter.bound
    assert "about +11 %" in render_analysis(document)


def test_what_the_host_does_while_the_device_is_busy_is_no_gain(tmp_path: Path) -> None:
    """10 ms a cycle on the device, 0.2 ms idle: hiding the host wins no more; a slowed window tells nothing."""
    document = profile(tmp_path)
    before = {lever.what: lever.gain for lever in levers(document)}
    phases = [{"name": "verify.forward", "busy_ms": 9.4}, {"name": "draft.graph", "busy_ms": 0.4}]
    window = {"on_cpu": False, "idle_ms": {"point": 0.2}, "period_ms": {"point": 10.0}, "phases": phases}
    slowed = {**window, "idle_ms": {"point": 6.0}, "cost": {"ratio": {"low": 1.3}}}
    document["device"] = {"windows": [{**window, "cost": {"ratio": {"low": 0.99}}}, slowed]}
    found = {lever.what: lever for lever in levers(document)}
    assert before["no waiting"] > 0.05 and found["no waiting"].gain == pytest.approx(0.02 / 0.98)
    assert "the device is for 2 % of a cycle" in found["no waiting"].why
    assert found["drafting for nothing"].gain == pytest.approx(0.06 / 0.94)
    assert before["drafting for nothing"] > 0.1
    document["device"]["windows"] = [slowed]
    assert {lever.what: lever.gain for lever in levers(document)} == before


def test_impossible_interval_ends_are_cut(tmp_path: Path) -> None:
    document = profile(tmp_path)
    document["cycle"]["mean_ms"].update(low=-3.0, high=35.0)
    document["acceptance"]["length_tokens"].update(low=0.2)
    document["baseline"]["step_ms"].update(low=-1.5)
    text = render_analysis(document)
    assert "[0.000, 35.000]" in text and "tokens a cycle [1.000, " in text and "[-" not in text
    assert (
        bounds({"low": None, "high": 2.0}) is None and plus_minus({"low": -1.0, "high": 2.0}, 1) == " [0.0, 2.0] (cut)"
    )
    assert units(1, "request") == "1 request" and units(3, "pair of one block") == "3 pairs of one block"


@pytest.mark.parametrize(
    ("low", "high", "said", "cell"),
    [
        (0.2, 6.123, " (no interval that tells anything: 2 requests)", "tells nothing"),
        (1.2, 6.123, " [1.200, 3.000] (cut)", "1.200-3.000 (cut)"),
        (0.2, 2.5, " [1.000, 2.500] (cut)", "1.000-2.500 (cut)"),
        (1.0, 3.0, " [1.000, 3.000]", "1.000-3.000"),
    ],
)
def test_accept_length_stays_within_what_the_steps_allow(
    tmp_path: Path, low: float, high: float, said: str, cell: str
) -> None:
    document = profile(tmp_path)
    assert len(document["acceptance"]["positions"]) == 2 and accept_range(-1)[1] == math.inf
    length = document["acceptance"]["length_tokens"]
    length.update(low=low, high=high, n=2, point=1.714)
    assert f"Accept length: 1.714 tokens a cycle{said}, bonus included" in " ".join(render_analysis(document).split())
    assert f"1.714{said}" in run_html(Run(tmp_path, {}, {}, document, ""))
    assert span(length, 3, *accept_range(2)) == cell


def test_outside_text_is_inert_everywhere(tmp_path: Path) -> None:
    document = profile(tmp_path)
    for row in (*document["phases"][:0], *document["points"], *document["draft_steps"]):
        if "parts_ms" in row:
            row["parts_ms"] = {EVIL: 1.0}
        else:
            row["name"] = EVIL
    document["engine"] = {"name": EVIL, "version": EVIL}
    document["refused"] = [{"name": EVIL, "reason": EVIL}]
    document["baseline"]["source"] = document["verdict"]["basis"] = document["verdict"]["sentence"] = EVIL
    document["beside"] = [{"name": EVIL, "ms": 1.0}]
    swept = sweep(tmp_path)
    for row in swept["arms"]:
        row["setting"] = row["reason"] = EVIL
    check = {**CHECK, "target": EVIL, "draft": EVIL, "findings": [{**CHECK["findings"][0], "what": EVIL, "id": EVIL}]}
    proof = compared()
    proof["arms"][1]["name"] = proof["pairs"][0]["arm"] = proof["pairs"][0]["reason"] = EVIL
    tune = load(tuned(tmp_path / "tune", proof)).analysis
    tune["levels"][0]["search"]["tried"][0]["label"] = tune["command_line"] = EVIL
    for shown in (document, swept, check, proof, tune):
        text = render_analysis(shown, 120)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e\u2028]", text)
        assert "[red]x[/red]" in text.replace("\n", "") and "\nSecond line" not in text


def test_a_command_is_never_broken(tmp_path: Path) -> None:
    document = dict(load(tuned(tmp_path / "tune", compared())).analysis)
    document["command_line"] = "serve " + " ".join(f"--flag-{i} {i}" for i in range(30))
    assert document["command_line"] in render_analysis(document, 60).splitlines()


def test_a_kind_without_a_view_is_an_error() -> None:
    with pytest.raises(SpecmeterError, match=r"kind x\?"):
        render_analysis({"kind": "x\x1b"})


def test_width_and_encoding_of_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = profile(tmp_path)
    document["engine"]["name"] = "modèle"
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_analysis(document, out)
    out.flush()
    text = raw.getvalue().decode("ascii")
    assert "mod?le" in text and "\x1b" not in text
    assert 44 <= max(len(line) for line in text.splitlines()) <= 50


def run_on_terminal(folder: Path, **variables: str) -> str:
    """What `specmeter report` writes when its output is a terminal."""
    leader, follower = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "90", **variables}
    command = [sys.executable, "-m", "specmeter", "report", str(folder)]
    with subprocess.Popen(command, stdout=follower, stdin=subprocess.DEVNULL, env=env) as child:
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            parts.append(part)
    os.close(leader)
    assert child.returncode == 0
    return b"".join(parts).decode()


def test_colour_on_a_terminal_only_and_not_under_no_color(tmp_path: Path) -> None:
    trace, requests = record(tmp_path / "rings")
    save(tmp_path / "run", trace, requests, analyse(trace, requests))
    assert "\x1b[" in run_on_terminal(tmp_path / "run")
    assert "\x1b" not in run_on_terminal(tmp_path / "run", NO_COLOR="1")
    assert "\x1b" not in run_on_terminal(tmp_path / "run", TERM="dumb")
    piped = subprocess.run(
        [sys.executable, "-m", "specmeter", "report", str(tmp_path / "run")], capture_output=True, text=True, check=True
    ).stdout
    assert "\x1b" not in piped and piped.startswith("Speculation wins")


def test_a_damaged_document_is_a_clear_error_or_a_report(tmp_path: Path) -> None:
    tune = load(tuned(tmp_path / "tune", compared())).analysis
    clear = 0
    for document in (profile(tmp_path), sweep(tmp_path), compared(), tune, CHECK):
        for place, (where, broken) in enumerate(damaged(dict(document))):
            if place % 5 and where[-1] != "(gone)":
                continue
            try:
                assert render_analysis(broken), where
            except SpecmeterError as error:
                clear += 1
                assert "damaged" in error.what or "There is no report" in error.what
    assert clear > 100


def test_an_interval_that_says_nothing_is_not_printed(tmp_path: Path) -> None:
    wide = {"low": 0.0, "point": 1.3, "high": 5.7e38, "n": 2, "unit": "prompt", "level": 0.95, "method": "t"}
    assert bounds(wide) is None and plus_minus(wide) == " (no interval that tells anything: 2 prompts)"
    assert span(wide) == "tells nothing" and span(None) == "-"
    assert no_interval({**wide, "unit": "pair of one block"}) == "no interval that tells anything: 2 pairs of one block"
    # The width decides and the number of units does not, but for a difference, which may be near 0.
    for n in (2, 4, 5, 12):
        assert bounds({**wide, "n": n}) is None and bounds({**wide, "n": n, "low": 1.0, "high": 2.0}) == (1.0, 2.0)
        assert bounds({**wide, "n": n, "low": 0.062, "high": 26.59}) is None
        assert bounds({**wide, "n": n, "point": 0.01, "low": -3.0, "high": 3.0}, -math.inf) == (-3.0, 3.0)
    document = profile(tmp_path)
    document["measured_speedup"] = document["baseline"]["step_ms"] = wide
    text = " ".join(render_analysis(document).split())
    assert "Measured speed-up: 1.300 x (no interval that tells anything: 2 prompts)" in text and "e+38" not in text
    assert len(max(text.split(), key=len)) < 100


def test_two_requests_that_differ_widely_give_no_ratio_and_no_overflow() -> None:
    cycle = Interval(-900.0, 10.0, 920.0, 0.95, "t", 2, "request")
    step = Interval(-4.0, 5.0, 14.0, 0.95, "t", 2, "request")
    for a, b in ((cycle, step), (step, cycle), (replace(cycle, low=-1e6, high=1e6), step)):
        found = _divide(a, b)
        assert found.point == a.point / b.point and found.high == math.inf and found.as_json()["low"] is None
    assert _divide(step, step).high < 20


def test_time_left_out_as_stalls_stands_below_the_headline_where_it_is_much(tmp_path: Path) -> None:
    for percent, place in ((34.2, 1), (19.0, -1)):
        stalled = {"cycles": 12, "percent_of_time": percent, "limit_ms": 80.0}
        document, swept = profile(tmp_path / f"p{place}"), sweep(tmp_path / f"s{place}")
        document["cycle"]["stalled"] = swept["arms"][1]["stalled"] = stalled
        for found in (document, swept):
            lines = render_analysis(found, 400).splitlines()
            at = [number for number, line in enumerate(lines) if "left out of the times as stalls" in line]
            assert len(at) == 1 and (at[0] == 1 if place == 1 else at[0] > 5), lines[0]


def test_a_footer_explains_the_columns_that_are_shown(tmp_path: Path) -> None:
    document = sweep(tmp_path)
    for width in (60, 80, 100):
        text = " ".join(render_analysis(document, width).split())
        for name in ("break-even", "accept and cycle the mean", "cycle ms"):
            assert (name in text) == (width >= 84), (name, width)
        assert "geometric mean over the same prompts" in text


def test_recipes_and_plans_are_broken_at_the_terminals_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for words in (["recipe", "list"], ["plan", "--engine", "specmeter"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        # A path is one word, and stays whole.
        assert all(len(line) <= 60 or "/" in line for line in lines) and any(line.startswith("  ") for line in lines)
    monkeypatch.delenv("COLUMNS")
    assert main(["recipe", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(built_in_engines()), "in a pipe, a line each"


def test_lines_of_a_command_are_broken_between_words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    path = "/a/very/long/path/that/is/longer/than/forty/columns/model.safetensors"
    body = f"warning: {EVIL} and then some more words to fill the line\n  at:   {path}\n\nlast"
    print_headed("A verdict that is rather longer than forty columns are.", "error", body, out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "A verdict that is rather longer than" and "\x1b" not in out.getvalue()
    assert [line for line in lines if len(line) > 40] == [next(line for line in lines if path in line)]
    start = next(i for i, line in enumerate(lines) if line.startswith("warning:"))
    assert lines[start + 1].startswith("  ") and lines[-2:] == ["", "last"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
@pytest.mark.parametrize("words", [["report"], ["report", "--json"], ["no-command", "--json"]])
def test_a_full_disk_below_the_output_is_no_fault_of_ours(tmp_path: Path, words: list[str]) -> None:
    trace, requests = record(tmp_path / "link")
    save(tmp_path / "run", trace, requests, profile(tmp_path))
    command = [sys.executable, "-m", "specmeter", words[0], str(tmp_path / "run"), *words[1:]]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == done.returncode
    assert done.returncode == (5 if words[0] == "report" else 2)
    assert "Traceback" not in done.stderr and "fault of ours" not in done.stderr and "Exception" not in done.stderr
    assert words[0] != "report" or "No space left on device" in done.stderr
