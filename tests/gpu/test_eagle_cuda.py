"""The embedded engine on a real GPU: kernels against float64, tokens with and without speculation, no hidden waits.

    PYTHONPATH=src:. SPECMETER_GPU_MODEL=DIR python -m pytest tests/gpu/test_eagle_cuda.py

DIR is the fetched model; without it the tests that decode are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import specmeter.eagle
from specmeter.eagle.cuda_ops import Ops, TorchOps
from specmeter.eagle.engine import Cycle, Engine, Sampling, SpecSettings
from tests.support.cuda_reference import CHECKS, Bench, Size, check_same_rows

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from specmeter.eagle.cuda_triton import TritonOps, Tuning
from specmeter.eagle.cuda_worker import SHORT_CONTEXT, CudaWorker

pytestmark = pytest.mark.gpu

HEAD = Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1"
HOPPER = torch.cuda.get_device_capability() >= (9, 0)
OPERATIONS: dict[str, Ops] = {"triton": TritonOps(), "torch": TorchOps()}
if HOPPER:
    OPERATIONS["triton pdl"] = TritonOps(Tuning(pdl=True))
# bfloat16 keeps 8 bits; two roundings and the sum's own give about 5e-3.
MOST = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TOKENS = 96


@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("ops", OPERATIONS)
@pytest.mark.parametrize("name", CHECKS)
def test_operations_against_float64(name: str, ops: str, dtype: torch.dtype) -> None:
    assert CHECKS[name](OPERATIONS[ops], Bench(Size(), "cuda", dtype)) < MOST[dtype]


@pytest.mark.parametrize("ops", [name for name in OPERATIONS if name != "torch"])
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(ops: str) -> None:
    assert check_same_rows(OPERATIONS[ops], Bench(Size(), "cuda", torch.bfloat16)) == 0.0


def model_dir() -> Path:
    named = os.environ.get("SPECMETER_GPU_MODEL", "")
    if not (Path(named) / "model.safetensors").is_file() or not named:
        pytest.skip("no model: name its directory in SPECMETER_GPU_MODEL")
    return Path(named)


@pytest.fixture(scope="module")
def bfloat16() -> Engine:
    return Engine.load(model_dir(), HEAD, device="cuda", max_context=1024)


@pytest.fixture(scope="module")
def float32() -> Engine:
    return Engine.load(model_dir(), HEAD, device="cuda", dtype="float32", max_context=1024)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    from benchmarks.questions import FORM, MORE_QUESTIONS

    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    return [tokenizer.encode(FORM.format(question), add_special_tokens=False).ids for question in MORE_QUESTIONS]


def run(engine: Engine, prompt: list[int], spec: SpecSettings | None, count: int = TOKENS) -> list[Cycle]:
    return list(engine.generate(prompt, Sampling(max_tokens=count, ignore_eos=True), spec))


def tokens(cycles: list[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.token_ids]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_token(dtype: str, request: pytest.FixtureRequest, prompts: list[list[int]]) -> None:
    engine: Engine = request.getfixturevalue(dtype)
    accepted = 0
    for prompt in prompts:
        plain = tokens(run(engine, prompt, None))
        for steps in range(1, 6):
            cycles = run(engine, prompt, SpecSettings(steps))
            assert tokens(cycles) == plain, (prompt[:8], steps)
            accepted += sum(cycle.accepted for cycle in cycles)
    assert accepted > len(prompts) * TOKENS


def test_graphs_give_the_tokens_of_the_path_without_them(float32: Engine, prompts: list[list[int]]) -> None:
    for prompt in prompts[:4]:
        # A threshold that every draft passes: the path that looks at each cycle's outcome.
        looking = run(float32, prompt, SpecSettings(3, 1, None, 1e-30))
        assert tokens(run(float32, prompt, SpecSettings(3))) == tokens(looking)


def test_a_long_context_splits_attention(float32: Engine, prompts: list[list[int]]) -> None:
    prompt = (prompts[0] + prompts[1]) * 15
    # The request goes over from one program a head to several on its way.
    assert SHORT_CONTEXT - TOKENS < len(prompt) < SHORT_CONTEXT
    plain = tokens(run(float32, prompt, None))
    for settings in (SpecSettings(3), SpecSettings(3, 1, None, 1e-30)):
        assert tokens(run(float32, prompt, settings)) == plain


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("steps", [0, 3])
def test_a_cycle_waits_for_the_device_once(bfloat16: Engine, prompts: list[list[int]], steps: int) -> None:
    assert isinstance(bfloat16.worker, CudaWorker)
    waits = 0
    take = bfloat16.worker.mail.take

    def counting() -> list[int]:
        nonlocal waits
        waits += 1
        return take()

    bfloat16.worker.mail.take = counting  # type: ignore[method-assign]
    try:
        cycles = bfloat16.generate(prompts[0], Sampling(max_tokens=64, ignore_eos=True), SpecSettings(steps))
        next(cycles)
        with no_waits():
            count = sum(1 for _ in cycles)
        assert waits == count > 10
    finally:
        bfloat16.worker.mail.take = take  # type: ignore[method-assign]


def test_the_check_for_waits_notices_one() -> None:
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


def test_sampling_and_trees_run_on_the_device(bfloat16: Engine, prompts: list[list[int]]) -> None:
    for settings, sampling in (
        (SpecSettings(3, 4, 12), Sampling(max_tokens=24, ignore_eos=True)),
        (SpecSettings(3), Sampling(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)),
        (None, Sampling(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True)),
    ):
        cycles = list(bfloat16.generate(prompts[0], sampling, settings))
        assert len(tokens(cycles)) == 24
