"""The device engine without a device: its passes as plain functions give the CPU engine's tokens, cycle by cycle."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specmeter.eagle.cuda_engine import choose_device, device_layout
from specmeter.eagle.cuda_ops import TorchOps
from specmeter.eagle.cuda_worker import CudaWorker
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.errors import SpecmeterError
from tests.support.cuda_reference import CHECKS, SMALL, Bench
from tests.support.device_engine import device_engine, run
from tests.support.tiny_eagle import VOCAB, write_head, write_target

SETTINGS = [None, *(SpecSettings(steps) for steps in (1, 3, 15)), SpecSettings(4, 1, 3)]


def both_engines(root: Path, family: str = "llama") -> tuple[Engine, Engine]:
    folders = write_target(root / "target", family), write_head(root / "head")
    return device_engine(*folders), Engine.load(*folders, dtype="float32", threads=1, max_context=400)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    return both_engines(tmp_path_factory.mktemp("tiny"))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_cycles_are_the_cpu_engines(engines: tuple[Engine, Engine], settings: SpecSettings | None) -> None:
    accepted = 0
    for prompt in prompts(4):
        on_device, on_cpu = (run(engine, prompt, settings) for engine in engines)
        assert on_device == on_cpu
        accepted += sum(cycle.accepted for cycle in on_device)
    assert settings is None or accepted > 2


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(tmp_path: Path, family: str) -> None:
    on_device, on_cpu = both_engines(tmp_path, family)
    for prompt in prompts(2):
        for settings in (None, SpecSettings(3)):
            assert run(on_device, prompt, settings) == run(on_cpu, prompt, settings)


def test_requests_of_all_kinds_one_after_another(engines: tuple[Engine, Engine]) -> None:
    # Each leaves work beyond its end on the stream, which must not touch the next.
    kinds = [
        (SpecSettings(3), {}),
        (SpecSettings(3, 4, 12), {}),
        (SpecSettings(2), {"temperature": 0.8, "seed": 3}),
        (None, {"max_tokens": 1}),
        (SpecSettings(6, speculative_draft_p_min=0.1), {}),
        (SpecSettings(16), {}),
        (None, {}),
        (None, {"temperature": 1.0, "seed": 4, "top_p": 0.9}),
        (SpecSettings(3), {"max_tokens": 2}),
    ]
    draw = random.Random(1)
    for prompt in prompts(1, seed=2):
        draw.shuffle(kinds)
        for settings, sampling in kinds:
            on_device, on_cpu = (run(engine, prompt, settings, **sampling) for engine in engines)
            assert on_device == on_cpu, (settings, sampling)


def test_a_stop_token_and_a_closed_request_leave_nothing_behind(engines: tuple[Engine, Engine]) -> None:
    on_device, on_cpu = engines
    for prompt in prompts(2, seed=5):
        wanted = run(on_cpu, prompt, SpecSettings(3))
        stop = wanted[2].token_ids[-1]
        stopped = [run(engine, prompt, SpecSettings(3), stop_ids=(stop,)) for engine in engines]
        assert stopped[0] == stopped[1] and stopped[0][-1].finish == "stop"
        cut = on_device.generate(prompt, Sampling(max_tokens=40), SpecSettings(3))
        assert [next(cut) for _ in range(3)] == wanted[:3]
        cut.close()
        assert run(on_device, prompt, SpecSettings(3)) == wanted


def test_a_context_is_filled_to_its_end(engines: tuple[Engine, Engine]) -> None:
    draw = random.Random(5)
    prompt = [draw.randrange(VOCAB) for _ in range(370)]
    for settings in (None, SpecSettings(3), SpecSettings(15)):
        on_device, on_cpu = (run(engine, prompt, settings, max_tokens=300) for engine in engines)
        assert on_device == on_cpu and on_device[-1].finish == "length"
        assert sum(len(cycle.token_ids) for cycle in on_device) == 30


def test_one_cycle_is_under_way_while_another_is_read(engines: tuple[Engine, Engine]) -> None:
    worker = engines[0].worker
    assert isinstance(worker, CudaWorker)
    cycles = engines[0].generate([3, 1], Sampling(max_tokens=40), SpecSettings(1))
    next(cycles)
    next(cycles)
    assert len(worker.mail) == 1
    cycles.close()


@pytest.mark.parametrize("name", CHECKS)
def test_operations_in_float64(name: str) -> None:
    assert CHECKS[name](TorchOps(), Bench(SMALL, "cpu", torch.float32)) < 1e-5


def test_a_missing_device_is_said() -> None:
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(SpecmeterError, match="Unknown device"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        assert choose_device("auto").type == "cpu"
        with pytest.raises(SpecmeterError, match="no CUDA device"):
            choose_device("cuda")


def test_layouts_that_only_the_cpu_has() -> None:
    with pytest.raises(SpecmeterError, match="CPU only"):
        device_layout("auto", torch.device("cuda"), draft_int8=True)
    with pytest.raises(SpecmeterError, match="float16"):
        device_layout("float16", torch.device("cuda"), draft_int8=False)
