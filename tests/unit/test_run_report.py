"""From rings to a saved run, its analysis and its report, and back."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmeter
from specmeter.analysis.gate import judge
from specmeter.analysis.profile import Baseline, analyse, baseline_from_requests, baseline_from_trace
from specmeter.analysis.stats import mean_interval
from specmeter.analysis.sweep import Arm, analyse_sweep
from specmeter.analysis.sweep_starts import StartCycles, start_cycles
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.reporters.terminal import render_analysis
from specmeter.runtime import layout
from specmeter.trace import Request, Trace, load_rings
from specmeter.trace.masking import MASK, mask_command, mask_env
from specmeter.trace.rundir import RunWriter, load
from specmeter.trace.synthetic import make_plan, make_records, repeat_cycle, write_ring
from tests.support.saved_runs import save_run

PLAN = make_plan(
    [
        ("cycle", "cycle", "none"),
        ("verify.forward", "leaf", "none"),
        ("draft.forward", "leaf", "loop"),
        ("accept.sample", "leaf", "none"),
    ],
    ["cycle.drafted", "cycle.accepted", "cycle.steps"],
)
SPAN, VALUE = layout.KIND_HOST_SPAN, layout.KIND_VALUE
MS = 1_000_000


def cycle(start: int, length: int, drafted: int, accepted: int) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = [(start, start + length * 6 // 10, 0, 2, SPAN, 0, 0)]
    at = start + length * 6 // 10
    for _ in range(drafted - 1):
        rows.append((at, at + length // 10, 0, 3, SPAN, 0, 0))
        at += length // 10
    rows += [(at, at + length // 10, 0, 4, SPAN, 0, 0), (start, start + length * 95 // 100, 0, 1, SPAN, 0, 0)]
    return rows + [
        (v, start + length * 95 // 100, 0, 5 + i, VALUE, 0, 0) for i, v in enumerate((drafted, accepted, drafted))
    ]


def record(folder: Path, host: str = "box") -> tuple[Trace, list[Request]]:
    """4 prompts, each once plain (10 ms a step) and once with 2 drafts (16 ms a cycle; 1 accepted on average)."""
    rows: list[tuple[int, ...]] = []
    requests: list[Request] = []
    at = 1000 * MS
    for prompt in range(4):
        for setting, length, drafted in (("baseline", 10 * MS, 0), ("k2", 16 * MS, 2)):
            send, tokens, first = at, 0, at + MS
            at += MS
            for i in range(30):
                accepted = (i + prompt) % 3 if drafted else 0
                tokens += accepted + 1
                rows += cycle(at, length, drafted, accepted)
                at += length
            requests.append(
                Request(f"r{len(requests)}", f"p{prompt}", setting, prompt, send, first, at - 1, 5, tokens + 1)
            )
            at += 50 * MS
    ring = write_ring(folder / "7-1.ring", make_records(rows), pid=7, host=host)  # type: ignore[arg-type]
    return load_rings([ring], PLAN, requests), requests


def test_known_run_gives_known_numbers(tmp_path: Path) -> None:
    trace, requests = record(tmp_path)
    found = analyse(trace, requests, baseline_from_trace(trace))
    assert found["cycle"]["mean_ms"]["point"] == pytest.approx(16)
    assert found["baseline"]["step_ms"]["point"] == pytest.approx(10)
    assert found["break_even_tokens"]["point"] == pytest.approx(1.6)
    assert found["acceptance"]["length_tokens"]["point"] == pytest.approx(2.0, abs=0.02)
    assert [p["cumulative"] for p in found["acceptance"]["positions"]] == pytest.approx([2 / 3, 1 / 3], abs=0.02)
    assert [p["conditional"] for p in found["acceptance"]["positions"]] == pytest.approx([2 / 3, 1 / 2], abs=0.02)
    shares = {p["name"]: p["percent"] for p in found["phases"]}
    assert shares == pytest.approx({"verify": 60, "draft": 10, "accept": 10})
    c = found["coverage"]
    assert c["leaf_percent"] + c["glue_percent"] + c["unattributed_percent"] == pytest.approx(100)
    assert (c["leaf_percent"], c["glue_percent"], c["unattributed_percent"]) == pytest.approx((80, 15, 5))
    assert found["cycle"]["count"] == 4 * 28 and found["draft_steps"][0]["step"] == 2
    assert found["verdict"]["word"] == "faster"
    assert "wins" in found["verdict"]["sentence"] and "1.60 baseline steps" in found["verdict"]["sentence"]
    json.dumps(found, allow_nan=False)


def test_a_gain_that_the_cycles_do_not_bear_out_is_said_at_once(tmp_path: Path) -> None:
    trace, requests = record(tmp_path)
    steady = analyse(trace, requests, baseline_from_trace(trace))
    assert "quiet machine" not in steady["verdict"]["sentence"]
    step = mean_interval([13.0, 13.0, 13.0], "request")
    found = analyse(trace, requests, Baseline(step, "another day"))
    assert "The mean cycle alone would give +62 %" in found["verdict"]["sentence"]


def test_without_baseline_break_even_is_null_with_the_reason(tmp_path: Path) -> None:
    trace, requests = record(tmp_path)
    found = analyse(trace, requests[1::2], Baseline(None, "none", "--baseline none was given"), "k2")
    assert found["break_even_tokens"] is None and found["reason"] == "--baseline none was given"
    assert "--baseline none was given" in render_analysis(found)
    assert baseline_from_requests([]).step_ms is None


def test_no_decode_cycle_is_an_error(tmp_path: Path) -> None:
    trace, requests = record(tmp_path)
    with pytest.raises(SpecmeterError, match="No decode cycle"):
        analyse(trace, requests, setting="k9")


def test_report_names_what_the_reader_asks_for(tmp_path: Path) -> None:
    trace, requests = record(tmp_path)
    for width in (60, 80, 120):
        text = render_analysis(analyse(trace, requests), width)
        assert text.startswith("Speculation wins")
        for word in ("verify.forward", "draft position", "Break-even", "unattributed", "Coverage", "How sure"):
            assert word in text
        assert max(len(line) for line in text.splitlines()) <= width
        assert "\x1b" not in text


def test_control_characters_and_markup_are_inert(tmp_path: Path) -> None:
    trace, requests = record(tmp_path)
    document = analyse(trace, requests)
    document["engine"]["name"] = "evil\x1b]0;title\x07[red]x[/red]\u202e"
    text = render_analysis(document)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text and "[red]x[/red]" in text


def test_sweep_finds_the_best_and_pairs_by_block_and_prompt(tmp_path: Path) -> None:
    trace, requests = record(tmp_path)
    rng = np.random.default_rng(0)
    slow = [
        Request(
            f"s{i}", r.prompt_id, "k4", r.block, r.send_ns, r.first_ns, int(r.end_ns + rng.integers(9e7, 1e8)), 5, 31
        )
        for i, r in enumerate(requests[0::2])
    ]
    arms = [
        Arm("baseline", {"steps": 0}, requests[0::2], trace),
        Arm("k2", {"steps": 2}, requests[1::2], trace),
        Arm("k4", {"steps": 4}, slow),
    ]
    found = analyse_sweep(arms)
    assert (found["best"], [row["verdict"] for row in found["arms"]]) == ("k2", ["baseline", "faster", "slower"])
    assert found["not_told_apart"] == []
    twin = Arm("k3", {"steps": 3}, [Request(**{**r.__dict__, "setting": "k3"}) for r in requests[1::2]])
    tied = analyse_sweep([*arms, twin])
    assert tied["not_told_apart"] == ["k3"] and "not told apart from it: k3" in tied["verdict"]["sentence"]
    k2 = found["arms"][1]
    assert k2["cycle_ms"]["point"] == pytest.approx(16) and k2["break_even_tokens"] == pytest.approx(1.6)
    assert k2["ratio"]["n"] == 4
    text = render_analysis(found, 110)
    assert text.startswith("k2 is best") and "k4" in text
    json.dumps(found, allow_nan=False)
    two_starts = [Request(**{**r.__dict__, "start": i % 2}) for i, r in enumerate(requests)]
    across = analyse_sweep([Arm("baseline", {}, two_starts[0::2]), Arm("k2", {}, two_starts[1::2])])
    assert across["arms"][1]["verdict"] == "inconclusive"


@pytest.mark.parametrize("arrow", [True, False])
def test_a_saved_run_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arrow: bool
) -> None:
    if not arrow:
        real = builtins.__import__

        def without(name: str, *rest: Any, **more: Any) -> Any:
            if name.startswith("pyarrow"):
                raise ImportError(name)
            return real(name, *rest, **more)

        monkeypatch.setattr(builtins, "__import__", without)
    trace, requests = record(tmp_path)
    out = tmp_path / "run"
    writer = RunWriter.create(out, ["specmeter", "profile", "--api-key", "sk-1"], env={"HF_TOKEN": "x", "HOME": "/h"})
    assert load(out).run["status"] == "partial"
    writer.write_plan(PLAN)
    writer.save_rings(tmp_path)
    writer.write_trace(trace)
    writer.write_requests(requests)
    writer.write_analysis(analyse(trace, requests))
    writer.write_report("text\n")
    writer.child("k=2/../x").finish()
    writer.finish()
    saved = specmeter.load(out)
    assert saved.run["status"] == "complete" and saved.run["env"] == {"HF_TOKEN": MASK, "HOME": "/h"}
    assert saved.run["command"][-1] == MASK and saved.plan == PLAN and saved.report == "text\n"
    assert saved.cycles["dur_ns"].tolist() == trace.main.cycles.dur_ns.tolist()
    assert set(saved.cycles["setting"].tolist()) == {"baseline", "k2"}
    assert len(saved.spans["point"]) == 240 * 3 + 120 and saved.requests["prompt_id"][0] == "p0"
    assert (out / ("cycles.parquet" if arrow else "cycles.npz")).exists()
    assert list(saved.children) == ["k=2_.._x"] and (out / "rings" / "7-1.ring").exists()
    assert all(p.stat().st_mode & 0o077 == 0 for p in [out, *out.rglob("*")])
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.startswith("Speculation wins")
    assert main(["report", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["kind"] == "profile"
    with pytest.raises(SpecmeterError, match="already exists"):
        RunWriter.create(out, [])


def test_what_an_interrupted_run_finished_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RunWriter.create(tmp_path / "a demo", ["specmeter", "demo"])
    writer.child("sweep")
    (writer.path / "children" / "cut off").mkdir()
    assert main(["report", str(writer.path)]) == 2
    assert "record again" in capsys.readouterr().err
    done = save_run(writer.path / "children" / "profile")
    assert main(["report", str(writer.path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Complete below it: profile." in said and f"See `specmeter report '{done}'`." in said
    assert "record again" not in said


def test_unknown_schema_and_no_run_exit_2(tmp_path: Path) -> None:
    assert main(["report", str(tmp_path)]) == 2
    writer = RunWriter.create(tmp_path / "run", [])
    assert main(["report", str(writer.path)]) == 2
    (writer.path / "run.json").write_text('{"schema": "specmeter/run/99"}')
    assert main(["report", str(writer.path)]) == 2
    (writer.path / "run.json").write_text("{")
    assert main(["report", str(writer.path)]) == 2


def test_secrets_are_masked_and_settings_are_not() -> None:
    command = [
        "x", "--api-key", "k", "--token=abc", "--max-tokens", "5", "--tokenizer", "t", "OPENAI_API_KEY=z",
        "http://u:pw@h/", "Authorization: Bearer abc", "--model", "hf_abcdefghijk", "--password", "p",
        "--url=https://token@h/", "ssh://user@h",
    ]  # fmt: skip
    assert mask_command(command) == [
        "x", "--api-key", MASK, f"--token={MASK}", "--max-tokens", "5", "--tokenizer", "t", f"OPENAI_API_KEY={MASK}",
        f"http://u:{MASK}@h/", f"Authorization: Bearer {MASK}", "--model", f"hf_{MASK}", "--password", MASK,
        f"--url=https://{MASK}@h/", "ssh://user@h",
    ]  # fmt: skip
    env = {
        "AWS_SECRET_ACCESS_KEY": "a",
        "HF_TOKEN": "b",
        "PATH": "/bin",
        "URL": "https://a:b@c",
        "TOKENIZERS_PARALLELISM": "1",
    }
    assert mask_env(env) == {
        "AWS_SECRET_ACCESS_KEY": MASK, "HF_TOKEN": MASK, "PATH": "/bin", "URL": f"https://a:{MASK}@c",
        "TOKENIZERS_PARALLELISM": "1",
    }  # fmt: skip


def test_repeat_cycle_moves_time_only() -> None:
    pattern = make_records([(10, 20, 0, 1, SPAN, 0, 0), (3, 20, 0, 5, VALUE, 0, 0)])
    moved = repeat_cycle(pattern, 2, 100)
    assert moved["t0"].tolist() == [10, 3, 110, 3] and moved["t1"].tolist() == [20, 20, 120, 120]


def test_starts_of_their_own_are_the_unit_of_cycle_accept_length_and_break_even(tmp_path: Path) -> None:
    starts: dict[str, list[StartCycles]] = {"baseline": [], "k2": []}
    requests: dict[str, list[Request]] = {"baseline": [], "k2": []}
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        trace, sent = record(folder)
        for setting, found in starts.items():
            mine = [r for r in sent if r.setting == setting]
            one = start_cycles(trace, mine)
            assert one is not None
            # Equal starts differ: the second is 2 % slower.
            found.append(replace(one, cycle_ms=one.cycle_ms * (1.02 if number == 1 else 1)))
            place = 2 * number + (setting == "k2")
            requests[setting] += [replace(r, start=place) for r in mine]
    arms = [Arm(name, {"steps": 0}, requests[name], starts=found) for name, found in starts.items()]
    base, k2 = analyse_sweep(arms)["arms"]
    assert (k2["cycle_ms"]["n"], k2["cycle_ms"]["unit"]) == (3, "server start")
    assert k2["cycle_ms"]["point"] == pytest.approx(16 * (1 + 0.02 / 3)) and base["cycle_ms"]["n"] == 3
    assert k2["accept_length_tokens"]["point"] == pytest.approx(2, abs=0.02) and k2["stalled"]["cycles"] == 0
    assert k2["break_even_tokens"] == pytest.approx(1.6) and k2["break_even_interval"]["unit"] == "server start"
    assert base["break_even_tokens"] is None
    run = {}
    for name, slower in (("saved", 1.0), ("new", 1.5)):
        worse = [replace(one, cycle_ms=one.cycle_ms * slower) for one in starts["k2"]]
        writer = RunWriter.create(tmp_path / name, ["specmeter", "sweep"], prompts="built-in")
        writer.write_analysis(analyse_sweep([arms[0], replace(arms[1], starts=worse)]))
        writer.finish()
        run[name] = load(tmp_path / name)
    words = {f.quantity: f.word for f in judge(run["new"], run["saved"])}
    assert (words["cycle"], words["break_even"]) == ("worse", "worse")
    assert {f.quantity: f.word for f in judge(run["saved"], run["saved"])}["break_even"] == "not worse"
