"""Runs whose documents or tables are not as they were written: one clear error in every command that reads them."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmeter
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.trace.ring import read_header
from specmeter.trace.shape import check_document, check_table
from specmeter.trace.tables import read_table, write_table
from tests.support.saved_runs import save_run

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def commands(run: Path, whole: Path) -> list[list[str]]:
    out = run.parent / "out"
    words: list[list[object]] = [
        ["explain", run], ["gate", run, "--against", whole], ["gate", whole, "--against", run], ["diff", whole, run],
        ["report", run, "--html", out],
        *(["export", run, "--format", form, "--out", out] for form in ("chrome", "openmetrics")),
    ]  # fmt: skip
    return [[str(word) for word in line] for line in words]


def set_at(*path: Any, value: Any) -> Change:
    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


DOCUMENTS: list[tuple[str, Change, str]] = [
    ("plan.json", set_at("points", value="zz"), "points is not a list but str"),
    ("plan.json", set_at("points", 0, value=7), r"points\[0\] is not an object but int"),
    ("plan.json", set_at("points", 1, "name", value=[1]), r"points\[1\].name is not text but list"),
    ("plan.json", lambda plan: plan["points"][0].pop("name"), r"points\[0\] lacks name"),
    ("run.json", set_at("settings", value=3), "settings is not a list but int"),
    ("run.json", set_at("command", value=None), "command is not a list but NoneType"),
    ("analysis.json", set_at("engine", value="zz"), "engine is not an object but str"),
    ("analysis.json", set_at("phases", 0, "ms", value="1.5"), r"phases\[0\].ms is not a number but str"),
    ("analysis.json", set_at("cycle", "mean_ms", "point", value="9"), "cycle.mean_ms.point is not a number"),
    ("analysis.json", set_at("cycle", "mean_ms", "low", value=True), "cycle.mean_ms.low is not a number but bool"),
    ("analysis.json", lambda d: d["baseline"]["step_ms"].pop("unit"), "baseline.step_ms lacks unit"),
    ("analysis.json", set_at("records", "overwritten", value=None), "records.overwritten is not a number"),
]


@pytest.mark.parametrize(("name", "change", "said"), DOCUMENTS, ids=[said for _, _, said in DOCUMENTS])
def test_a_document_of_the_wrong_shape_names_the_place(run: Path, name: str, change: Change, said: str) -> None:
    document = json.loads((run / name).read_text())
    check_document(run / name, copy.deepcopy(document))
    change(document)
    (run / name).write_text(json.dumps(document))
    with pytest.raises(SpecmeterError, match=rf"{name} is damaged\n +why: +{said}"):
        specmeter.load(run)


@pytest.mark.parametrize("text", ["NaN", '{"points": [NaN]}', "[]", "7", "{", "\udcff", "[" * 100_000])
def test_a_plan_that_is_no_plan_is_a_clear_error_everywhere(
    run: Path, whole: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "plan.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for words in commands(run, whole):
        assert main(words) == 2, words
        assert "plan.json is damaged" in capsys.readouterr().err


PLACES = ["run.json", "plan.json", "analysis.json", "report.txt", "cycles.parquet", "spans.npz"]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(("make", "said"), [(os.mkfifo, "a pipe or a device"), (os.mkdir, "a folder")])
def test_what_is_no_file_is_a_clear_error_and_nothing_waits(
    run: Path, name: str, make: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink(missing_ok=True)
    make(run / name)
    for words in (["report", str(run)], ["report", str(run), "--html", str(run.parent / "out.html")]):
        code = main(words)
        shown = capsys.readouterr().err
        assert code in ((0, 2) if name in PLACES[4:] else (2,)), shown  # not every command reads the tables
        assert code == 0 or (said in shown and name.split(".")[0] in shown)
    if name in PLACES[4:]:
        with pytest.raises(SpecmeterError, match=said):
            read_table(run, name.split(".")[0])


def test_a_ring_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1-2.ring")
    with pytest.raises(SpecmeterError, match="a pipe or a device"):
        read_header(tmp_path / "1-2.ring")


def test_a_report_that_is_no_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.txt").write_bytes(b"\xff\xfe")
    assert main(["report", str(run)]) == 2
    assert "report.txt is damaged" in capsys.readouterr().err


def renamed(table: dict[str, Any], one: str, other: str) -> dict[str, Any]:
    return {**table, one: table[other], other: table[one]}


TABLES: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    ("cycles", lambda t: {k: v for k, v in t.items() if k != "t0_ns"}, "lacks the column t0_ns"),
    ("cycles", lambda t: renamed(t, "kind", "dur_ns"), "kind holds no text; dur_ns holds no whole numbers"),
    ("cycles", lambda t: renamed(t, "kind", "setting"), "no kind of cycle"),
    ("cycles", lambda t: renamed(t, "cycle", "t0_ns"), "beyond the number of rows"),
    ("cycles", lambda t: {**t, "dur_ns": -t["dur_ns"]}, "dur_ns is negative"),
    ("cycles", lambda t: {**t, "dur_ns": t["dur_ns"].astype(float)}, "dur_ns holds no whole numbers"),
    ("spans", lambda t: {**t, "inside": t["dur_ns"]}, "inside holds no flags"),
    (
        "requests",
        lambda t: {k: v for k, v in t.items() if k not in ("error", "start")},
        "lacks the columns error, start",
    ),
    ("requests", lambda t: renamed(t, "setting", "block"), "setting holds no text; block holds no whole numbers"),
]


@pytest.mark.parametrize(("name", "change", "said"), TABLES, ids=[f"{name}: {said}" for name, _, said in TABLES])
def test_a_table_of_the_wrong_shape_is_a_clear_error(
    run: Path, whole: Path, name: str, change: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(run, name, change(read_table(run, name)))
    with pytest.raises(SpecmeterError, match=said):
        getattr(specmeter.load(run), name)
    codes = [main(words) for words in commands(run, whole)]
    # Not every command reads every table; none may trip over it.
    assert set(codes) <= {0, 2} and 2 in codes
    assert said in capsys.readouterr().err


def test_a_table_of_another_is_not_taken_for_it(run: Path) -> None:
    shutil.copy(run / "requests.parquet", run / "cycles.parquet")
    with pytest.raises(SpecmeterError, match=r"The table cycles of .* is damaged"):
        specmeter.load(run).cycles  # noqa: B018


def test_columns_of_unequal_length(run: Path) -> None:
    table = read_table(run, "spans")
    with pytest.raises(SpecmeterError, match="differ in length"):
        check_table(run, "spans", {**table, "dur_ns": table["dur_ns"][1:]})
    check_table(run, "spans", {})
    check_table(run, "other", {"x": np.zeros(1)})


UNREADABLE = [
    ("1e999", "the number 1e999 is beyond what a float holds"),
    ("-1e999", "the number -1e999 is beyond what a float holds"),
    ("9" * 400, "the integer 999999999999... of 400 characters is beyond 64 bits"),
    ("9" * 9000, "the integer 999999999999... of 9000 characters is beyond 64 bits"),
    ("[" * 300 + "]" * 300, "nested more than 100 deep"),
]


@pytest.mark.parametrize(("raw", "said"), UNREADABLE, ids=["1e999", "-1e999", "400", "9000", "deep"])
@pytest.mark.parametrize("place", [("records", "overwritten"), ("cycle", "p95_ms"), ("more",)])
def test_numbers_that_nothing_can_hold_are_a_clear_error_everywhere(
    run: Path, whole: Path, raw: str, said: str, place: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((run / "analysis.json").read_text())
    set_at(*place, value="@")(document)
    (run / "analysis.json").write_text(json.dumps(document).replace('"@"', raw))
    out = str(run.parent / "out")
    more = [["report", str(run)], ["report", str(run), "--json"], ["diff", str(run), str(whole), "--json"]]
    more += [["export", str(run), "--format", "json", "--out", out], ["metrics", str(run), "--once"]]
    for words in [*commands(run, whole), *more]:
        assert main(words) == 2, words
        shown = " ".join(capsys.readouterr().err.split())
        assert "analysis.json is damaged" in shown and said in shown, words
        assert not Path(out).exists()


def test_the_largest_numbers_that_are_read(run: Path) -> None:
    numbers = [-(1 << 63), (1 << 64) - 1, 1.7976931348623157e308, 5e-324]
    document = json.loads((run / "run.json").read_text()) | {"numbers": numbers}
    (run / "run.json").write_text(json.dumps(document))
    assert specmeter.load(run).run["numbers"] == numbers


CHECK = '{"schema": "specmeter/check/1", "result": %s}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested more than 100 deep"),
        (CHECK % ("[" * 300 + "]" * 300), "nested more than 100 deep"),
        (CHECK % '{"target_layers": 1e999}', "1e999 is beyond what a float holds"),
        (None, "a pipe or a device"),
        ("{", "cannot be read"),
        (CHECK % "3", "holds no result"),
    ],
    ids=["brackets", "deep", "1e999", "pipe", "cut off", "number"],
)
def test_a_wiring_file_that_is_none(run: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / "check.json"
    os.mkfifo(path) if text is None else path.write_text(text)
    assert main(["report", str(run), "--html", str(run.parent / "out.html"), "--wiring", str(path)]) == 2
    shown = capsys.readouterr().err
    assert said in shown and str(path) in shown and "specmeter check --json" in shown
    assert not (run.parent / "out.html").exists()
