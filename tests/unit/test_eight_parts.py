"""The run at 4 and 8 GPUs without a GPU: which parts it has, how it chooses steps, what its report says of results."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import eight_gpu
import eight_report
import eight_tables
from eight_bodies import FALLBACK, sglang_bodies, tuned_steps, vllm_bodies
from gpu_client import OPENAI, ask
from gpu_fleet import Place, Server, Start
from gpu_models import SHAPES
from gpu_pack import packer, restore
from gpu_parts import Part, run_parts
from sglang_dummy_gpu import distinct_experts

LABEL = ("r", "p0", "spec", 0, 0)


@contextmanager
def recorded(body: bytes) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every POST with these bytes of a stream and closes; its URL, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Streams as SGLang 0.5.16 and vLLM 0.32.0 write them, shortened.
SGLANG = (
    b'data: {"text": "", "output_ids": [11, 12], "meta_info": {"prompt_tokens": 4, "spec_verify_ct": 1}}\n\n'
    b'data: {"text": "", "output_ids": [13], "meta_info": {"prompt_tokens": 4, "spec_verify_ct": 2}}\n\n'
)
VLLM = (
    b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"","finish_reason":null,'
    b'"prompt_token_ids":[20,30],"token_ids":[11]}],"usage":null}\n\n'
    b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"","finish_reason":"length",'
    b'"token_ids":[12,13]}],"usage":null}\n\n'
    b'data: {"id":"c","object":"text_completion","choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(("stream", "path", "cycles"), [(SGLANG, "", 2), (VLLM, OPENAI, None)])
def test_a_stream_of_either_engine_gives_its_ids(stream: bytes, path: str, cycles: int | None) -> None:
    with recorded(stream + DONE) as (url, asked), httpx.Client() as client:
        answer = ask(client, url + path, (20, 30, 40, 50), 3, LABEL)
    assert answer.ids == (11, 12, 13) and answer.cycles == cycles and answer.request.error == ""
    assert answer.request.prompt_tokens == 4 and answer.request.output_tokens == 3
    [(asked_path, body)] = asked
    assert asked_path == (path or "/generate")
    assert (body.get("prompt") or body["input_ids"]) == [20, 30, 40, 50]


@pytest.mark.parametrize(("stream", "path"), [(SGLANG, ""), (VLLM, OPENAI)])
def test_a_stream_without_its_end_is_an_error(stream: bytes, path: str) -> None:
    with recorded(stream) as (url, _asked), httpx.Client() as client:
        answer = ask(client, url + path, (20, 30, 40, 50), 3, LABEL)
    assert "without [DONE]" in answer.request.error and "3 ids" in answer.request.error


def bodies(tmp_path: Path) -> list[Any]:
    return sglang_bodies(tmp_path / "site", tmp_path, ["70b", "moe200b"], [8, 4])


def test_all_that_the_story_needs_is_a_part_and_fits_into_a_call(tmp_path: Path) -> None:
    parts = eight_gpu.parts_of(bodies(tmp_path), 3, [Part("unpack", lambda results: None, 200.0)])
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) and names[0] == "unpack" and all(p.needs == ("unpack",) for p in parts[1:])
    for body in ("70b-tp8", "70b-tp4", "moe200b-tp8", "moe200b-tp4"):
        for arm in ("plain", "default", "tuned", "nccl", "nccl-ll"):
            assert all(f"{body}.{arm}.{n}" in names for n in (1, 2, 3)), "three starts: intervals over starts"
        assert f"{body}.steps2.1" in names and f"{body}.steps2.2" not in names
        assert names.index(f"{body}.steps5.1") < names.index(f"{body}.tuned.1"), "chosen before it is used"
        assert names.index(f"{body}.plain.1") < names.index(f"{body}.default.1"), "the baseline of the others"
        assert (f"{body}.experts.1" in names) == body.startswith("moe")
    assert {"70b-draft-tp1.draft.3", "moe200b-draft-tp1.draft.3"} <= set(names)
    assert max(part.limit_s for part in parts) <= 540 - eight_gpu.CLOSING_S


def test_every_start_of_several_ranks_has_safe_communication_and_real_text(tmp_path: Path) -> None:
    for body in bodies(tmp_path):
        env = body.place.env()
        assert (env["NCCL_NVLS_ENABLE"], env["TORCH_SYMM_MEM_DISABLE_MULTICAST"], env["NVSHMEM_DISABLE_NVLS"]) == (
            "0", "1", "1",
        )  # fmt: skip
        for arm in body.arms:
            start = body.start(arm, 5)
            assert "--disable-cuda-graph" not in start.command and ("dummy" in start.command)
            if not body.name.endswith("-tp1"):
                assert start.env["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] == "0"
                assert start.command[start.command.index("--tp-size") + 1] == body.name[-1]
            if arm.spec:
                assert start.env["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
                steps = {"tuned": "5", "nccl": "5", "nccl-ll": "5", "draft": "3", "default": "3"}
                wanted = steps.get(arm.name, arm.name.removeprefix("steps"))
                assert start.command[start.command.index("--speculative-num-steps") + 1] == wanted
            assert start.linked == (arm.name != "experts")


def test_probes_and_windows_are_where_intervals_need_them(tmp_path: Path) -> None:
    [body, *_others] = bodies(tmp_path)
    arms = {arm.name: arm for arm in body.arms}
    names = {(arm, n): [s.name for s in eight_gpu.steps_of(body, arms[arm], n)] for arm in arms for n in (1, 2)}
    assert "deep1" in names["nccl", 1] and "deep1" not in names["nccl", 2]
    assert "deep1" in names["default", 2], "the price of drafting has an interval over starts"
    assert names["steps2", 1] == ["phases1", "run"]


def phases1(folder: Path, rate: float, **more: object) -> None:
    """What a start's phases left, as far as the report reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    rates = {f"p{i}": [rate * (1 + 0.01 * i), rate * (1 + 0.02 * i)] for i in range(3)}
    (folder / "phases1.json").write_text(json.dumps({"client": {"decode_tok_s_median": rate}, "rates": rates, **more}))


def test_the_tuned_steps_are_the_fastest_measured_and_stay_so(tmp_path: Path) -> None:
    [body, *_others] = bodies(tmp_path)
    results = tmp_path / "results"
    for arm, rate in (("default", 90.0), ("steps1", 80.0), ("steps2", 94.0), ("steps5", 71.0)):
        phases1(results / f"{body.name}.{arm}.1", rate)
    assert tuned_steps(body, results) == 2
    phases1(results / f"{body.name}.steps5.1", 200.0)
    assert tuned_steps(body, results) == 2, "all starts of an arm are alike"


def test_without_a_choice_the_tuned_steps_are_the_storys(tmp_path: Path) -> None:
    [body, *_others] = bodies(tmp_path)
    (tmp_path / "results").mkdir()
    phases1(tmp_path / "results" / f"{body.name}.default.1", 90.0)
    assert tuned_steps(body, tmp_path / "results") == FALLBACK
    assert "nothing to choose from" in (tmp_path / "results" / f"steps-{body.name}.json").read_text()


def test_the_distinct_experts_of_neighbouring_tokens_are_counted_by_layer() -> None:
    shape = SHAPES["moe200b"]
    # Token t of the answer reaches experts 8 t to 8 t + 7 in each layer, so n neighbours reach 8 n of them.
    routed = (8 * np.arange(2 + 16)[:, None, None] + np.arange(8) + np.zeros((1, shape.layers, 1))).astype(
        np.int32
    ) % 384
    answer = {"output_ids": [1], "meta_info": {"routed_experts": base64.b64encode(routed.tobytes()).decode()}}
    with recorded(json.dumps(answer).encode()) as (url, asked):
        server = Server(Start("experts", ()), None, url, None, 0.0)  # type: ignore[arg-type]
        found = distinct_experts(server, [(5, 6)], {"p0": [7] * 17}, shape)
    assert found["measured"] == {n: pytest.approx(8 * n) for n in range(1, 9)}
    assert asked[0][1]["return_routed_experts"] is True and len(asked[0][1]["input_ids"]) == 19


def test_what_a_cut_start_left_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [body, *_others] = bodies(tmp_path)
    left: list[list[str]] = []
    monkeypatch.setattr(eight_gpu, "run_steps", lambda *words: left.append([p.name for p in words[3].glob("*.json")]))
    results = tmp_path / "results" / f"{body.name}.plain.1"
    phases1(results, 90.0)
    (results / "starts.json").write_text("{}")
    eight_gpu._start(body, body.arms[0], 1, results)
    assert left == [["starts.json"]], "a start is the unit of intervals, so its phases and its run are of one start"


def device(draft_ms: float) -> dict[str, Any]:
    classes = [{"phase": "draft", "ms": draft_ms - 0.1}, {"phase": "extend", "ms": 0.1}, {"phase": "verify", "ms": 9.0}]
    return {"windows": [{"classes": classes}]}


def drafted(ms: Sequence[float], arm: str) -> dict[str, Any]:
    """A body's document whose starts of ``arm`` drafted for so long."""
    rows = [
        {"phase": "draft", "ms": {"point": 0.4}, "waiting_ms": {"point": 0.1}, "exposed_ms": 0.3, "transfer_ms": 0.3}
    ]
    runs = {f"{arm}.{n}": {"device": device(one), "collectives": {"phases": rows}} for n, one in enumerate(ms, 1)}
    return {"runs": runs}


def test_the_price_of_drafting_has_an_interval_over_starts_and_the_what_if_beside_it() -> None:
    document = {"70b-tp8": drafted((2.0, 2.1, 1.9), "default"), "70b-draft-tp1": drafted((1.0, 1.05, 0.95), "draft")}
    price = eight_report.draft_prices(document)["70b-tp8"]
    assert price["clock"] == "device" and price["measured_ms"] == pytest.approx(1.0)
    assert price["ratio"]["unit"] == "server start" and price["ratio"]["low"] < 2.0 < price["ratio"]["high"]
    assert (price["foretold_ms"], price["collectives_ms"], price["waiting_ms"]) == (0.3, 0.4, 0.1)
    assert 'what-if "draft at TP 1" foretells 0.300 ms less, measured 1.000' in price["sentence"]
    assert "costs 1.000 ms" in price["sentence"]


def test_on_a_cpu_host_times_stand_for_the_devices() -> None:
    rank = {"phases_ms": {"draft": 3.0, "extend": 1.0, "verify": 9.0}}
    ours = {"runs": {"default.1": {"ranks": [rank, {"phases_ms": {"draft": 5.0, "extend": 1.0}}]}}}
    alone = {"runs": {"draft.1": {"phases": [{"phase": "draft", "ms": 2.0}, {"phase": "verify", "ms": 1.0}]}}}
    price = eight_report.draft_prices({"x-tp4": ours, "x-draft-tp1": alone})["x-tp4"]
    assert (price["ms"], price["alone_ms"], price["clock"]) == (5.0, 2.0, "host")
    assert "no interval: one start a side" in price["sentence"]


def test_arms_are_compared_with_plain_default_and_tuned_over_starts(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for arm, rate in (("plain", 88.8), ("default", 71.0), ("tuned", 94.0), ("nccl", 99.0)):
        for number in (1, 2, 3):
            phases1(results / f"70b-tp8.{arm}.{number}", rate * (1 + 0.002 * number))
    rows = {row["arm"]: row for row in eight_report.arms_of(eight_report.found_in(tmp_path))}
    assert rows["tuned"]["over_plain"]["unit"] == "server start" and rows["tuned"]["over_plain"]["n"] == 3
    assert rows["nccl"]["over_tuned"]["point"] == pytest.approx(99 / 94, rel=1e-6)
    assert rows["tuned"]["over_default"]["low"] > 1 and rows["plain"]["over_plain"] is None


def test_a_start_is_read_again_only_when_something_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(eight_report, "run_of", lambda one, out: read.append(one.arm) or {"arm": one.arm})
    folder = tmp_path / "results" / "70b-tp8.plain.1"
    phases1(folder, 88.8)
    for _call in range(2):
        assert eight_report.report(tmp_path)["70b-tp8"]["runs"] == {"plain.1": {"arm": "plain"}}
    assert read == ["plain"]
    later = (tmp_path / "report" / "70b-tp8.plain.1.json").stat().st_mtime_ns + 10**9
    os.utime(folder / "phases1.json", ns=(later, later))
    eight_report.report(tmp_path)
    assert read == ["plain", "plain"]


def test_the_report_tells_phases_by_rank_skew_and_collectives_by_size(tmp_path: Path) -> None:
    kind = {"operation": "all-reduce", "backend": "NCCL", "count": 4.0, "us": 20.0, "waiting_us": 5.0}
    arrival = {
        "name": "wait.all_reduce", "calls": 5.0, "transfer_ms": 0.2, "waiting_ms": 0.4, "skew_p50_ms": 0.1,
        "skew_p95_ms": 0.3, "last_percent": [10.0, 90.0],
    }  # fmt: skip
    rank = {"host": "a", "cycle_ms": 11.5, "own_ms": 8.25, "phases_ms": {"draft": 1.5, "verify": 9.75}}
    kinds = [{**kind, "phase": "verify", "bytes": 65536.0}, {**kind, "phase": "draft", "bytes": None}]
    run = {
        "ranks": [{**rank, "rank": 0}, {**rank, "rank": 1}],
        "straggler": {"rank": 1},
        "rank_skew": {"arrivals": [arrival]},
        "collectives": {"sentences": ["Communication is 40 % of verify."], "kinds": kinds},
    }  # fmt: skip
    document = {
        "arms": [], "runs": {"default.1": run}, "steps": {"tuned": 2, "why": "the fastest", "tok_s": {"2": 94.0}},
        "experts": {"1": 8.0, "4": 31.2}, "text_ids": {"distinct": 300, "of": 512},
    }  # fmt: skip
    said = "\n".join(eight_tables.lines(document))
    for words in ("rank 1", "9.750", "8.250", "straggler: rank 1", "0.100 ms apart", "number 1 (90 %)",
                  "verify   all-reduce by NCCL, 65536 bytes: 4.0 a cycle, 20.0 us, 5.0 of it waiting", "size not told",
                  "4: 31.2", "300 distinct ids of 512", "tuned: 2 steps"):  # fmt: skip
        assert words in said, said
    single = {
        "arms": [],
        "runs": {"draft.1": {"phases": [{"name": "draft", "ms": 2.0}, {"name": "extend", "ms": 0.5}]}},
    }
    assert "ms a cycle, host: draft 2.000, extend 0.500" in list(eight_tables.lines(single)), "a rank alone"


def test_another_machine_goes_on_with_what_came_back(tmp_path: Path) -> None:
    done: list[str] = []

    def part(name: str, fails: bool = False) -> Part:
        def run(results: Path) -> None:
            (results / "made.json").write_text("{}")
            if fails:
                raise RuntimeError("not here")

        return Part(name, run, 5.0)

    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    assert run_parts([part("unpack"), part("a"), part("b", True)], first, 60.0, packer(out)) == 75
    assert restore(out, second, again=["unpack"]) and not restore(out, second)
    assert run_parts([part("unpack"), part("a"), part("b")], second, 60.0, packer(tmp_path / "out2")) == 0
    begun = [json.loads(line)["begun"] for line in (second / "parts.jsonl").read_text().splitlines() if "begun" in line]
    assert begun == ["a", "b", "unpack", "b"], "done parts are not done again, but what each machine needs is"
    assert (second / "results" / "a" / "made.json").is_file() and not done


def test_a_cut_or_missing_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="results"):
        restore(tmp_path, tmp_path / "work")
    assert run_parts([Part("a", lambda results: None, 5.0)], tmp_path / "w", 60.0, packer(tmp_path)) == 0
    whole = tmp_path / "results.tgz.part-0"
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises((EOFError, tarfile.TarError, OSError)):
        restore(tmp_path, tmp_path / "work")


def test_the_rehearsal_on_vllm_has_ranks_that_divide_and_a_thread_each(tmp_path: Path) -> None:
    found = vllm_bodies(Path("python"), tmp_path, [2, 3, 4])
    assert [body.name for body in found] == [f"twelfths-tp{n}" for n in (2, 3, 4)] + ["twelfths-draft-tp1"]
    config = json.loads((tmp_path / "models" / "twelfths" / "target" / "config.json").read_text())
    for body, ranks in zip(found, (2, 3, 4, 1), strict=True):
        assert isinstance(body.place, Place) and body.place.engine == "vllm"
        start = body.start(body.arms[-1], 2)
        assert start.env["VLLM_CPU_OMP_THREADS_BIND"].count("|") == ranks - 1
        assert start.command[start.command.index("--tensor-parallel-size") + 1] == str(ranks)
        # vLLM shards the embedding too, which tensor parallel 3 refused for 4096 words.
        sizes = ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size")
        assert all(config[key] % ranks == 0 for key in sizes)


def launched(work: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """``eight_run.py`` with nothing but the standard library before WORK/site."""
    script = Path(__file__).parents[2] / "benchmarks" / "eight_run.py"
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OUT")}
    command = [sys.executable, str(script), str(work), "--out", str(work / "out"), *more]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_a_bare_machine_unpacks_before_it_measures(tmp_path: Path) -> None:
    said = launched(tmp_path / "work", "--from", str(tmp_path))
    assert said.returncode == 75 and "parts: 0 of ?" in said.stdout, said
    (tmp_path / "work" / "model").mkdir()
    site = tmp_path / "work" / "site"
    site.mkdir()
    # What it becomes finds its packages in WORK/site: this one stands before the interpreter's own.
    (site / "httpx.py").write_text("raise RuntimeError('httpx of WORK/site')")
    said = launched(tmp_path / "work", "--from", str(tmp_path))
    assert said.returncode == 1 and "httpx of WORK/site" in said.stderr, said
    (site / "httpx.py").unlink()
    said = launched(tmp_path / "work", "--from", str(tmp_path), "--budget", "100")
    assert said.returncode == 1 and "is too short" in said.stderr and "may take 460 s" in said.stderr, said
