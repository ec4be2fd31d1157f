"""Verify against a plain step of the same server: what grows, by how much, and the reason that is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.costmodel_bytes import Shape
from specmeter.analysis.moe import Experts, distinct_experts
from specmeter.analysis.verify_sides import Server
from specmeter.analysis.verify_width import verify_width
from specmeter.trace import Request, Trace
from specmeter.trace.deep_synthetic import Call, Kernel
from specmeter.trace.deep_window import DeepWindow
from tests.support.deep_runs import on, recorded

US = 1000
PLAIN = [(1, 0, 0, 0)]


def forward(scale: float, experts: int = 0, norms: int = 4) -> list[Call]:
    """Two layers and lm_head; attention grows with ``scale``, GEMMs do not."""
    layer = [
        Kernel("nvjet_qkv", 20 * US), Kernel("_fwd_kernel_stage1", round(10 * US * scale)), Kernel("nvjet_o", 15 * US),
        *[Kernel("rms_norm", US)] * norms, *([Kernel("fused_moe_kernel", experts * US)] if experts else []),
        Kernel("nvjet_mlp", 30 * US),
    ]  # fmt: skip
    return [Call(on("verify.forward"), (*layer, *layer, Kernel("nvjet_head", 90 * US)), host_ns=5 * US, graph=True)]


def sides(folder: Path, spec: list[Call], plain: list[Call], batch: int = 1, steps: int = 3) -> dict[str, Any]:
    one = recorded(folder / "spec", [spec] * 6, numbers=[(batch, steps, steps * batch, batch)] * 6)
    two = recorded(folder / "plain", [plain] * 5, numbers=[(batch, 0, 0, 0)] * 5)
    return {"trace": one[0], "windows": [one[1]], "plain": (two[0], [two[1]])}


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["class"]: row for row in found["classes"]}


def test_each_class_has_its_difference_and_factor(tmp_path: Path) -> None:
    # What the draft runs is not verify's.
    draft = Call(on("draft.graph"), (Kernel("nvjet_draft", 70 * US),), graph=True)
    found = verify_width(**sides(tmp_path, [draft, *forward(2.5, norms=6)], forward(1.0)))
    by = rows(found)
    assert by["attention"]["verify_ms"] == pytest.approx(0.050) and by["attention"]["plain_ms"] == pytest.approx(0.020)
    assert by["attention"]["factor"] == pytest.approx(2.5)
    assert by["dense_gemm"]["more_ms"] == pytest.approx(0) and "as it should be" in by["dense_gemm"]["reason"]
    assert by["lm_head"]["verify_ms"] == pytest.approx(0.090) and by["lm_head"]["verify_kernels"] == 1
    norms = by["norm_elementwise"]
    assert (norms["verify_kernels"], norms["plain_kernels"]) == (12, 8)
    assert "12 kernels against 8" in norms["reason"] and "their number counts" in norms["reason"]
    assert found["verify"]["tokens"] == 4 and found["plain"]["tokens"] == 1
    assert found["more_ms"] == pytest.approx(0.034) and found["factor"] == pytest.approx(0.282 / 0.248)
    assert sum(row["more_ms"] for row in found["classes"]) + found["idle"]["more_ms"] == pytest.approx(found["more_ms"])
    assert "attention (+0.030 ms)" in found["sentence"]
    assert found["factor_interval"]["low"] <= found["factor"] <= found["factor_interval"]["high"] + 1e-9


def test_one_cycle_has_a_factor_without_an_interval(tmp_path: Path) -> None:
    one = recorded(tmp_path / "spec", [forward(2.0)])
    two = recorded(tmp_path / "plain", [forward(1.0)], numbers=PLAIN)
    found = verify_width(one[0], [one[1]], (two[0], [two[1]]))
    assert found["factor"] > 1 and found["factor_interval"]["high"] is None
    assert f"{found['factor']:.2f} x a plain step's" in found["sentence"]


def test_kernels_that_only_one_side_runs_are_named(tmp_path: Path) -> None:
    """SGLang's Triton backend: verify attends with the kernel of prefill, a plain step with the one that splits."""
    long = "void (anonymous namespace)::extend_attention<8u, float>(int*)"
    found = verify_width(**sides(tmp_path, [Call(on("verify.forward"), (Kernel(long, 50 * US),))], forward(1.0)))
    assert "another kernel: extend_attention against _fwd_kernel_stage1" in rows(found)["attention"]["reason"]
    alike = verify_width(**sides(tmp_path / "b", forward(2.5), forward(1.0)))
    assert "another kernel" not in rows(alike)["attention"]["reason"]


@pytest.mark.parametrize(("low", "told"), [(1.2, True), (1.01, False), (None, False)])
def test_a_window_that_the_profiler_slowed_is_said_to_be_one(tmp_path: Path, low: float | None, told: bool) -> None:
    given = sides(tmp_path, forward(2.5), forward(1.0))
    given["windows"] = [replace(given["windows"][0], cost={"ratio": {"low": low, "point": 1.3}})]
    sentence = verify_width(**given)["sentence"]
    assert ("cycles 1.30 x as long" in sentence and "busy, verify takes 1.12 x" in sentence) == told


def test_a_gemm_that_grows_is_named_as_what_it_is(tmp_path: Path) -> None:
    spec = [replace(call, kernels=tuple(replace(k, dur_ns=2 * k.dur_ns) for k in call.kernels)) for call in forward(1)]
    reason = rows(verify_width(**sides(tmp_path, spec, forward(1))))["dense_gemm"]["reason"]
    assert "factor of 2.00 is another kernel, padding or arithmetic" in reason


def test_bytes_over_bandwidth_give_the_least_that_weights_take(tmp_path: Path) -> None:
    shape = Shape(dense=200e6, expert=0.0, kv=1000.0, width_bytes=2.0, experts=None)
    server = Server(shape, gb_s=4000.0, context=500.0)
    found = verify_width(**sides(tmp_path, forward(1), forward(1)), server=server)
    assert found["bytes"]["verify"]["weights"] == pytest.approx(400e6)
    assert found["bytes"]["verify"]["ms"] == pytest.approx((400e6 + 1e6) / 4e9)
    assert "0.40 GB with lm_head take 0.100 ms at least" in rows(found)["dense_gemm"]["reason"]
    assert "1.0 MB" in rows(found)["attention"]["reason"]


def test_experts_are_the_distinct_ones_expected_and_those_measured(tmp_path: Path) -> None:
    experts = Experts(384, 8)
    shape = Shape(dense=1e6, expert=1e6, kv=10.0, width_bytes=2.0, experts=experts)
    given = Server(shape, measured_experts=(28.0, 8.0))
    found = verify_width(**sides(tmp_path, forward(1, experts=90), forward(1, experts=30)), server=given)
    told = found["experts"]
    assert told["expected"]["verify"] == pytest.approx(distinct_experts(experts, 4))
    assert told["expected"]["plain"] == pytest.approx(8) and told["measured"]["factor"] == pytest.approx(3.5)
    reason = rows(found)["experts"]["reason"]
    assert "31 distinct experts a layer against 8 are expected, x 3.88" in reason and "measured 28 against 8" in reason
    assert rows(found)["experts"]["factor"] == pytest.approx(3.0)


def test_plain_steps_of_the_same_window_do_where_the_engine_takes_it_per_request(tmp_path: Path) -> None:
    cycles = [forward(3)] * 5 + [forward(1)] * 4
    trace, window = recorded(tmp_path, cycles, numbers=[(1, 3, 3, 1)] * 5 + [(1, 3, 0, 0)] * 4)
    found = verify_width(trace, [window])
    assert found["verify"]["cycles"] == 5 and found["plain"]["cycles"] == 4
    assert rows(found)["attention"]["factor"] == pytest.approx(3)


def test_what_is_missing_is_said_and_nothing_is_made_up(tmp_path: Path) -> None:
    trace, window = recorded(tmp_path, [forward(1)] * 4)
    assert _reason(trace, [window]) == "no window of plain decoding was recorded"
    assert _reason(trace, []).startswith("no window was recorded")
    assert _reason(trace, [replace(window, pid=99)]).startswith("no window was recorded")


def test_each_setting_has_its_own_comparison_with_the_plain_steps_of_its_batch(tmp_path: Path) -> None:
    numbers = [(1, 3, 3, 1)] * 5 + [(8, 3, 24, 8)] * 5
    trace, window = recorded(tmp_path / "spec", [forward(3)] * 5 + [forward(4)] * 5, numbers=numbers)
    middle = int(trace.main.cycles.t0_ns[6])
    one, eight = replace(window, end_ns=middle, setting="one"), replace(window, begin_ns=middle, setting="eight")
    other, steps = recorded(
        tmp_path / "plain", [forward(1)] * 5 + [forward(2)] * 5, numbers=[(1, 0, 0, 0)] * 5 + [(8, 0, 0, 0)] * 5
    )
    found = verify_width(trace, [one, eight], (other, [steps]))
    assert found["setting"] == "one" and [part["setting"] for part in found["others"]] == ["eight"]
    assert rows(found)["attention"]["factor"] == pytest.approx(3)
    assert found["others"][0]["verify"]["batch"] == 8 and rows(found["others"][0])["attention"]["factor"] == 2


def test_a_cpus_operators_are_compared_as_what_they_are(tmp_path: Path) -> None:
    given = sides(tmp_path, forward(2), forward(1))
    cpu = [replace(window, on_cpu=True, device="") for window in given["windows"]]
    found = verify_width(given["trace"], cpu, given["plain"])
    assert found["on_cpu"] and "in operators of the host" in found["sentence"] and "device" not in found["sentence"]


def _reason(trace: Trace, windows: list[DeepWindow]) -> str:
    found = verify_width(trace, windows)
    assert found["verify"] is None and found["classes"] == []
    return str(found["reason"])


def test_the_cards_name_gives_the_bandwidth_of_all_ranks(tmp_path: Path) -> None:
    given = sides(tmp_path, forward(1), forward(1))
    window = replace(given["windows"][0], device="NVIDIA H200")
    server = Server(Shape(dense=200e6, expert=0.0, kv=0.0, width_bytes=2.0, experts=None))
    found = verify_width(given["trace"], [window, replace(window, rank=1)], given["plain"], server)
    assert found["bytes"]["bandwidth_gb_s"] == 9600
    unknown = verify_width(given["trace"], [window, replace(window, rank=1, device="?")], given["plain"], server)
    assert unknown["bytes"]["bandwidth_gb_s"] is None and "GB with lm_head" in rows(unknown)["dense_gemm"]["reason"]


def test_context_is_that_of_the_requests_of_the_window_and_each_length_has_its_row(tmp_path: Path) -> None:
    """Attention grows with the context on both sides, verify's twice as fast; the context doubles in the middle."""
    given = {}
    for side, scale, tokens in (("spec", 2.0, (1, 3, 3, 1)), ("plain", 1.0, (1, 0, 0, 0))):
        cycles = [forward(scale)] * 6 + [forward(2 * scale)] * 6
        trace, window = recorded(tmp_path / side, cycles, numbers=[tokens] * 12)
        t0 = trace.main.cycles.t0_ns
        early = Request("a", "", "", 0, 0, int(t0[0]), int(t0[6]), 300, 100)
        late = Request("b", "", "", 0, 0, int(t0[7]), int(t0[-1]) + 1, 700, 200)
        lost = Request("c", "", "", 0, 0, int(t0[0]), int(t0[-1]), 0, 50)  # a server that told no prompt's length
        given[side] = (trace, [replace(window, requests=(early, late, lost))])
    found = verify_width(*given["spec"], plain=given["plain"])
    short, long = found["contexts"]
    assert (short["from_tokens"], short["to_tokens"], long["from_tokens"]) == (256, 511, 512)
    assert short["verify_cycles"] == short["plain_cycles"] == long["verify_cycles"] == 6
    assert short["verify_attention_ms"] == pytest.approx(0.040) and long["verify_attention_ms"] == pytest.approx(0.080)
    assert long["plain_attention_ms"] == pytest.approx(0.040) and short["factor"] > 1
    assert "256 to 511 tokens 1.0" in found["sentence"] and "attention 0.080 against 0.040 ms" in found["sentence"]
    assert 300 < found["context_tokens"]["verify"] < 900
    alone = verify_width(*given["spec"], plain=(given["plain"][0], [replace(given["plain"][1][0], requests=())]))
    assert alone["contexts"] == [] and alone["context_tokens"]["plain"] is None and "length" not in alone["sentence"]


def test_the_context_of_the_window_is_the_one_that_attentions_bytes_are_of(tmp_path: Path) -> None:
    given = sides(tmp_path, forward(1), forward(1))
    t0 = given["trace"].main.cycles.t0_ns
    running = Request("a", "", "", 0, 0, int(t0[0]) - 1, int(t0[-1]) + 1, 4000, 0)
    given["windows"] = [replace(given["windows"][0], requests=(running,))]
    shape = Shape(dense=200e6, expert=0.0, kv=1000.0, width_bytes=2.0, experts=None)
    found = verify_width(**given, server=Server(shape, gb_s=4000.0, context=500.0))
    assert found["bytes"]["context_tokens"] == 4000
