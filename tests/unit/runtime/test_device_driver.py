"""The driver's calls by ctypes, against a libcuda of C that takes its arguments as the real one does."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specmeter.runtime import device_ptx
from specmeter.runtime.device_driver import Driver, DriverError
from specmeter.runtime.device_stamp_cost import PAIRS
from specmeter.runtime.device_stamps import END, FIRST, StampRing

SOURCE = Path(__file__).resolve().parents[2] / "support" / "stub_cuda.c"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for the stub")
    made = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", str(made), str(SOURCE)], check=True)
    return Driver(ctypes.CDLL(str(made)))


def test_stamps_go_through_every_call_as_the_driver_takes_it(driver: Driver) -> None:
    assert driver.capability() == 90
    ring = StampRing(driver)
    assert ring.compiler == "driver" and ring.ready() and ring.ours()
    for what in (FIRST, 3, 3 | END, END):
        ring.stamp(0, what, 5, 2)
    ring.stamp(0x7F12_3456_7890, 9, 0, 0, 0xFFFF_FFFF)
    ring.start_copy()
    assert ring.rows() == []  # the first query says not ready
    rows = ring.rows()
    assert [(row.what, row.key, row.ordinal, row.number) for row in rows] == [
        (FIRST, 5, 2, 1), (3, 5, 2, 1), (3 | END, 5, 2, 1), (END, 5, 2, 1), (9, 0, 0, 0xFFFF_FFFF)
    ]  # fmt: skip
    assert [b.time_ns - a.time_ns for a, b in itertools.pairwise(rows)] == [1000] * 4
    assert rows[0].time_ns > 1_790_000_000_000_000_000
    assert ring.tick_ns == 32
    pair = ring.pair(time.perf_counter_ns)
    assert pair is not None and pair.device_ns > rows[-1].time_ns and pair.error_ns < 1_000_000_000


def test_a_stamps_cost_is_measured_by_graphs_of_our_own_that_are_given_back(driver: Driver) -> None:
    ring = StampRing(driver)
    ring.start_copy()
    assert ring.rows() == []
    before = [row.number for row in ring.rows()]
    cost = ring.cost()
    assert driver.lib.live_now() == 2 + 2 * PAIRS + 1
    assert not cost.read()  # the first query says not ready
    assert cost.read() and driver.lib.live_now() == 0
    # A graph of the stub takes 1 us a kernel, a float of milliseconds has 24 bits.
    assert cost.describe() == {"stamp_ns": pytest.approx(1000), "upper_ns": pytest.approx(1000), "reason": ""}
    ring.start_copy()
    assert ring.rows() == [] and ring.rows() == [], "no stamp of the measurement lies in the ring"
    assert before == []


def test_our_calls_are_relaxed_and_the_mode_is_put_back(driver: Driver) -> None:
    mode = driver.lib.mode_now
    assert mode() == 0
    with driver.relaxed():
        assert mode() == 2
    assert mode() == 0
    with pytest.raises(ValueError, match="inside"), driver.relaxed():
        raise ValueError("inside")
    assert mode() == 0


def test_a_failure_has_the_calls_name_and_the_drivers(driver: Driver) -> None:
    with pytest.raises(DriverError, match=r"cuModuleLoadData: CUDA_ERROR_STUB \(218\)"):
        driver.module(b"\x7fELF")


def test_without_a_driver_it_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(OSError, match="libcuda"):
        Driver()


def test_the_assembler_in_tritons_wheel_is_asked_where_the_driver_has_no_compiler(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "backends" / "nvidia" / "bin" / "ptxas"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\ngrep -q specmeter_stamp "$2" && [ "$1" = -arch=sm_90 ] && printf cubin > "$4"\n')
    program.chmod(0o755)
    triton = type(sys)("triton")
    triton.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "triton", triton)
    images: list[bytes] = []

    def module(image: bytes) -> str:
        images.append(image)
        if image.startswith(b".version"):
            raise DriverError("cuModuleLoadData: CUDA_ERROR_JIT_COMPILER_NOT_FOUND (221)")
        return "module"

    monkeypatch.setattr(driver, "module", module)
    assert device_ptx.load(driver) == ("module", "ptxas of triton")
    assert images[1] == b"cubin"


def test_the_ptx_assembles_for_the_gpus_of_today(tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("there is no ptxas")
    source = tmp_path / "stamps.ptx"
    source.write_bytes(device_ptx.text(90).rstrip(b"\0"))
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100"):
        subprocess.run([ptxas, f"-arch={arch}", str(source), "-o", str(tmp_path / arch)], check=True)


@pytest.mark.parametrize("capability", [60, 75, 90])
def test_the_parameters_are_those_of_the_text(capability: int) -> None:
    text = device_ptx.text(capability).decode()
    assert text.endswith("\0") and f".target sm_{min(capability, 75)}\n" in text
    for name, sizes in device_ptx.PARAMETERS.items():
        declared = text.split(f".entry {name}(")[1].split(")")[0]
        assert tuple(int(bits) // 8 for bits in re.findall(r"\.param \.u(\d+)", declared)) == sizes
