"""The GPU scripts' parts that need no GPU: models, parts of a bundle, what fits together, step by step resumption."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_pack
import gpu_steps
import gpu_unpack
import gpu_windows as windows
import sglang_device_gpu as small
import sglang_dummy_gpu as dummy
from gpu_client import Answer, Answers, id_prompts
from gpu_fleet import Place, Server, Start
from gpu_models import DRAFT_VOCAB, SHAPES, write_models
from gpu_pack import packer
from gpu_steps import Step, read, run_steps

from specmeter.analysis.costmodel_bytes import read_shape
from specmeter.trace import Request
from tests.support.children import until


def test_shapes_have_the_sizes_they_are_named_after() -> None:
    assert SHAPES["8b"].weights == pytest.approx(8.03e9, rel=0.001), "Llama-3-8B's"
    assert SHAPES["70b"].weights == pytest.approx(70.55e9, rel=0.001), "Llama-3-70B's"
    assert 190e9 < SHAPES["moe200b"].weights < 240e9
    moe = SHAPES["moe"]
    assert (moe.layers, moe.experts, moe.per_token) == (61, 384, 8)
    assert 2 * moe.gigabytes + 20 < dummy.CARD_GB, "plain and speculative beside each other"


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_head_fits_its_target_and_ranks_share_evenly(name: str, tmp_path: Path) -> None:
    target, head = (json.loads((path / "config.json").read_text()) for path in write_models(tmp_path, SHAPES[name]))
    for key in ("hidden_size", "vocab_size", "max_position_embeddings"):
        assert target[key] == head[key]
    assert head["draft_vocab_size"] <= min(DRAFT_VOCAB, target["vocab_size"]), "draft ids are target ids"
    assert (read_shape(tmp_path / name / "target").experts is None) == (not SHAPES[name].experts)
    for ranks in {"70b": (2, 4, 8), "moe200b": (4, 8)}.get(name, (1,)):
        assert all(target[key] % ranks == 0 for key in ("num_attention_heads", "num_key_value_heads"))
        assert SHAPES[name].inner % (8 * ranks) == 0


def test_prompts_of_ids_differ_and_stay_inside_the_vocabulary() -> None:
    prompts = id_prompts(4096)
    assert len(set(prompts)) == 8 and all(16 <= id < 4096 for prompt in prompts for id in prompt)


@pytest.mark.parametrize(("name", "tp"), [("8b", 1), ("moe", 1), ("70b", 2), ("moe200b", 8)])
def test_servers_side_by_side_fit_and_plain_is_first(name: str, tp: int, tmp_path: Path) -> None:
    wanted = dummy.Plan(SHAPES[name], tp, tmp_path).wanted()
    sets = dummy.chunks(wanted, dummy.CARD_GB - dummy.RESERVE_GB)
    assert [one for chunk in sets for one in chunk] == wanted and wanted[0].start.name == "plain"
    for chunk in sets:
        assert sum(one.gigabytes for one in chunk) < dummy.CARD_GB
    names = [step.name for one in wanted for step in one.steps]
    assert len(set(names)) == len(names)
    for one in wanted:
        for step in one.steps:
            assert step.server == one.start.name and all(names.index(n) < names.index(step.name) for n in step.after)
        assert all(one.start.env.get(key) == "0" for key in dummy.FIRST_VERSION) or tp == 1


def test_the_parts_of_a_bundle_come_one_at_a_time_and_give_the_files_back(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"file{number}.whl")
        files[-1].write_bytes(bytes([number]) * (100_000 + number))
    gpu_unpack.make(tmp_path / "here", 3, files)
    there, parts = tmp_path / "there", tmp_path / "work" / "parts"
    for number in (2, 0, 1):
        for old in there.glob("*"):
            subprocess.run(["rm", "-r", str(old)], check=True)
        there.mkdir(exist_ok=True)
        (tmp_path / "here" / f"b{number}").rename(there / f"b{number}")
        assert gpu_unpack.collect(there, parts) == (number == 1), "complete with the last one only"
    found = gpu_unpack.unpack_bundle(parts, tmp_path / "work")
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {f.name: f.read_bytes() for f in files}


class StillFleet:
    """In place of the servers: which ones were started, and one that never comes up."""

    started: ClassVar[list[list[str]]] = []

    def __init__(self, place: Place, starts: list[Start]) -> None:
        self.starts = starts

    def __enter__(self) -> StillFleet:
        self.started.append([start.name for start in self.starts])
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait(self, limit_s: float) -> None:
        pass

    def facts(self) -> dict[str, dict[str, object]]:
        return {start.name: {} for start in self.starts}

    def end(self) -> None:
        pass

    @contextmanager
    def only(self, name: str) -> Iterator[str]:
        if name == "dead":
            raise RuntimeError("dead is not up: out of memory")
        yield name


def test_a_failed_measurement_leaves_the_rest_and_is_all_that_a_later_call_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_steps, "Fleet", StillFleet)
    StillFleet.started.clear()
    fails = {"second"}

    def run(name: str) -> Any:
        def measure(server: Server, out: Path) -> dict[str, Any]:
            if name in fails:
                raise ValueError(f"{name} broke")
            return {"value": name}

        return measure

    steps = [
        Step("first", "a", 1, run("first")), Step("second", "b", 1, run("second")),
        Step("third", "b", 1, run("third"), ("second",)), Step("fourth", "dead", 1, run("fourth")),
        Step("fifth", "a", 1000, run("fifth")),
    ]  # fmt: skip
    starts = [Start(name, ()) for name in ("a", "b", "dead")]
    place = Place(tmp_path, None, ())
    with pytest.raises(RuntimeError, match="not measured: second, third, fourth, fifth"):
        run_steps(place, starts, steps, tmp_path, 100)
    assert (read(tmp_path, "first") or {})["value"] == "first" and read(tmp_path, "third") is None
    assert "second broke" in (tmp_path / "second.error.txt").read_text()
    fails.clear()
    with pytest.raises(RuntimeError, match="not measured: fourth, fifth"):
        run_steps(place, starts, steps, tmp_path, 100)
    assert (read(tmp_path, "third") or {})["value"] == "third"
    assert StillFleet.started == [["a", "b", "dead"], ["a", "b", "dead"]]
    run_steps(place, starts, steps[:3], tmp_path, 100)
    assert len(StillFleet.started) == 2, "nothing is started for what is done"


def test_answers_are_counted_per_cycle_and_failures_named() -> None:
    def answer(ids: int, cycles: int | None, error: str = "") -> Answer:
        request = Request("r", "p0", "spec", 0, 0, 1_000_000, 101_000_000, 4, ids, error)
        return Answer(request, tuple(range(ids)), cycles)

    found = Answers([answer(101, 50), answer(101, 50), answer(1, None, "ReadTimeout: ")]).summary()
    assert (found["requests"], found["errors"]) == (2, ["ReadTimeout: "])
    assert found["decode_tok_s_median"] == pytest.approx(1000) and found["server_tokens_a_cycle"] == pytest.approx(2)


def test_what_comes_back_is_the_results_and_both_ends_of_long_logs(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "results" / "a").mkdir(parents=True)
    (work / "results" / "a" / "x.json").write_text("{}")
    (work / "logs").mkdir()
    (work / "logs" / "spec3.log").write_text("begin\n" + "x" * 1_000_000 + "\nend\n")
    (work / "parts.jsonl").write_text("")
    packer(out)(work)
    whole = b"".join(path.read_bytes() for path in sorted(out.glob("results.tgz.part-*")))
    (tmp_path / "results.tgz").write_bytes(whole)
    subprocess.run(["tar", "xzf", "results.tgz"], cwd=tmp_path, check=True)
    assert (tmp_path / "results" / "a" / "x.json").read_text() == "{}"
    log = gzip.decompress((tmp_path / "logs" / "spec3.log.gz").read_bytes()).decode()
    assert log.startswith("begin") and log.endswith("end\n") and len(log) < 500_000


def test_an_archive_is_never_cut_raw_windows_stay_behind_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room for two of three windows: the oldest stays, everything else comes back whole."""
    monkeypatch.setattr(gpu_pack, "PART_BYTES", 500_000)
    run, out = tmp_path / "work" / "results" / "a" / "run-spec3", tmp_path / "out"
    (run / "deep").mkdir(parents=True)
    (tmp_path / "work" / "parts.jsonl").write_text("")
    for number in range(3):
        window = run / "deep" / f"{number}.json.gz"
        window.write_bytes(os.urandom(700_000))
        os.utime(window, ns=(number, number))
        (run / "deep" / f"{number}.meta.json").write_text("{}")
    (run / "run.json").write_text("{}")
    (run / "1.ring").write_bytes(bytes(33_000_000))
    packer(out)(tmp_path / "work")
    parts = [out / f"results.tgz.part-{number}" for number in range(len(list(out.glob("results.tgz.part-*"))))]
    assert 2 < len(parts) <= gpu_pack.MOST_PARTS
    (tmp_path / "results.tgz").write_bytes(b"".join(path.read_bytes() for path in parts))
    listed = subprocess.run(["tar", "tzf", "results.tgz"], cwd=tmp_path, check=True, capture_output=True, text=True)
    names = listed.stdout.splitlines()
    assert [name[-9:] for name in names[-2:]] == ["2.json.gz", "1.json.gz"] and len(names) == 9
    assert json.loads((out / "left_out.json").read_text()) == ["results/a/run-spec3/deep/0.json.gz"]
    assert "1 files did not fit" in capsys.readouterr().out


def test_a_server_that_stands_still_goes_on_when_it_is_wanted() -> None:
    """Stop and continue reach what the server started, too."""
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"
    process = subprocess.Popen([sys.executable, "-c", code])
    server = Server(Start("x", ()), type("P", (), {"pid": process.pid})(), "", None, 0.0)

    def states() -> list[str]:
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in server.pids]

    try:
        until(lambda: len(server.pids) == 2, "the process that it started")
        for number, state in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "RS")):
            server.signal(number)
            until(lambda state=state: all(each in state for each in states()), f"state {state}")  # type: ignore[misc]
    finally:
        server.signal(signal.SIGKILL)
        process.wait()


# What SmolLM2's plain server gave on an H200 at one and at eight requests, ms a step.
RECORDED_STEP_MS = {1: 1.4571735454385966, 8: 1.5592817092105262}


@pytest.mark.parametrize("at_once", [1, 8])
def test_cycles_of_eight_requests_are_held_against_plain_steps_of_eight(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def phases(server: object, prompts: object, load: Any, out: Path, name: str, baseline: Any) -> dict[str, Any]:
        seen.append((load.at_once, baseline.step_ms.point))
        return {}

    monkeypatch.setattr(windows, "phases", phases)
    monkeypatch.setattr(windows, "tokens", lambda *words: {"ids_of": {}, "distinct_ids": 0})
    for size, ms in RECORDED_STEP_MS.items():
        interval = {"low": ms - 0.1, "point": ms, "high": ms + 0.1, "level": 0.95, "method": "t", "n": 4, "unit": "r"}
        (tmp_path / f"plain.{size}.json").write_text(json.dumps({"step_ms": interval}))
    plan = dummy.Plan(SHAPES["8b"], 1, tmp_path / "models")
    [of_dummy] = [s for one in plan.wanted() for s in one.steps if s.name == f"steps3.{at_once}"]
    [of_small] = [step for step in small.steps() if step.name == f"spec3.{at_once}"]
    for step in (of_dummy, of_small):
        assert step.after == (f"plain.{at_once}",)
        step.run(Server(Start(step.server, ()), None, "", None, 0.0), tmp_path)  # type: ignore[arg-type]
    assert seen == [(at_once, RECORDED_STEP_MS[at_once])] * 2


def test_the_run_is_of_requests_that_ran_alone() -> None:
    def request(name: str, send: int, end: int) -> Request:
        return Request(name, "p", "spec", 0, send, send + 1, end, 4, 8)

    single = [request("a", 0, 10), request("b", 10, 20), request("d", 60, 70)]
    together = [request("x", 20, 40), request("y", 21, 30), request("z", 31, 50)]
    assert windows.alone([*together, *single]) == single
    assert windows.alone(together) == together, "a run of batch 8 alone is still a run"
