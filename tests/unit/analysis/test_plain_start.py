"""explain with plain decoding of another run: the second point of verify's line, if the server build is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.costmodel import Knots
from specmeter.cli import main
from specmeter.errors import Exit
from tests.support.cost_runs import Law, write_run

LAW = Law(per_width=0.8)


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["explain", "--json", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return result


def row(result: dict[str, Any], steps: int) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in result["curve"] if row["steps"] == steps)
    return found


def test_the_baseline_of_another_run_is_verifys_second_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "other", LAW, [0, 2], seed=1, kind="sweep")
    line = ("specmeter", "profile", "--baseline", str(other))
    path = write_run(tmp_path / "run", LAW, [5], command=line)
    own = write_run(tmp_path / "own", LAW, [0, 5], kind="sweep")
    bare = write_run(tmp_path / "bare", LAW, [5])
    flat = explained(capsys, str(bare))
    assert [line for line in flat["assumptions"] if "verify is taken as flat" in line]
    assert abs(row(flat, 1)["cycle_ms"]["point"] / LAW.cycle_ms(1) - 1) > 0.2
    # Both ways of naming it: to explain, and to the profile that explain reads.
    for words in ((str(bare), "--baseline", str(other)), (str(path),)):
        found = explained(capsys, *words)
        assert row(found, 1)["cycle_ms"]["point"] == pytest.approx(LAW.cycle_ms(1), rel=0.02)
        assert row(found, 1)["status"] == "interpolated" and row(found, 1)["break_even_tokens"] is not None
        assert [line for line in found["assumptions"] if f"comes from {other}, another start" in line]
        assert not [line for line in found["assumptions"] if "flat" in line]
        assert {sample["steps"] for sample in found["samples"]} == {0, 5}, "nothing but plain decoding is taken"
    # Another start may be off by 6 %, which the run's own plain decoding is not.
    widths = [
        row(result, 1)["cycle_ms"]["high"] / row(result, 1)["cycle_ms"]["point"]
        for result in (explained(capsys, str(own), "--now", "5"), explained(capsys, str(path)))
    ]
    assert widths[1] > widths[0] + 0.03


def test_another_server_build_is_refused_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"engine": {"name": "specmeter", "version": "0.0.9"}}
    other = write_run(tmp_path / "other", LAW, [0, 2], changes=engine)
    path = write_run(tmp_path / "run", LAW, [5], command=("specmeter", "profile", "--baseline", str(other)))
    assert main(["explain", str(path), "--baseline", str(other)]) == Exit.USAGE
    assert "engine version: 0.1.0" in capsys.readouterr().err
    found = explained(capsys, str(path))
    assert [line for line in found["assumptions"] if "ran on another server: engine version: 0.1.0 in" in line]
    assert [line for line in found["assumptions"] if "verify is taken as flat" in line]
    pooled = explained(capsys, str(path), "--baseline", str(other), "--pool")
    assert not [line for line in pooled["assumptions"] if "flat" in line]


def test_a_folder_without_plain_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "other", LAW, [2])
    path = write_run(tmp_path / "run", LAW, [5], command=("specmeter", "profile", "--baseline", str(tmp_path / "gone")))
    assert main(["explain", str(path), "--baseline", str(other)]) == Exit.USAGE
    assert "holds no cycles of plain decoding" in capsys.readouterr().err
    found = explained(capsys, str(path))
    assert [line for line in found["assumptions"] if "are not used for verify's width" in line and "gone" in line]
    own = write_run(tmp_path / "own", LAW, [0, 5])
    found = explained(capsys, str(own), "--baseline", str(other))
    assert [line for line in found["assumptions"] if "is not used: plain decoding was measured" in line]


def test_the_first_knots_share_of_a_line() -> None:
    two, three = Knots((1, 6), (10.0, 12.0)), Knots((1, 6, 11), (10.0, 12.0, 13.0))
    assert [two.of_first(x) for x in (1, 3.5, 6, 11)] == [1, 0.5, 0, 1]
    assert [three.of_first(x) for x in (1, 3.5, 6, 8, 16)] == [1, 0.5, 0, 0, 0]
    assert Knots((4,), (1.0,)).of_first(9) == 0
