"""The stamp kernels, as PTX text that the driver compiles: no compiler toolchain is needed on the server.

``specmeter_stamp`` takes one row of a device ring (layout: device_stamps.py) and stores the device's clock in it.
A begin reads the clock last and an end reads it first, so that what the kernel does itself lies outside the span: the
wait for the row's number stands before a begin's clock by a branch on that number, which no compiler may turn round.
Each half of a row goes out as one aligned store of 16 bytes with the row's mark in it, so a reader can tell a row that
is half there. ``specmeter_now`` stores the clock where the host waits for it, ``specmeter_ticks`` the clock's smallest
step. %globaltimer and the instructions are those of the PTX ISA (NVIDIA's manual, special registers).
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, List, Tuple

STAMP, NOW, TICKS = "specmeter_stamp", "specmeter_now", "specmeter_ticks"
# Parameters of each kernel: sizes in bytes.
PARAMETERS = {STAMP: (8, 8, 8, 4, 4, 4, 4), NOW: (8,), TICKS: (8,)}
END = 1 << 16
FIRST = 1 << 17
PTXAS_S = 30.0

_TEXT = """.version {version}
.target sm_{target}
.address_size 64

.visible .entry specmeter_stamp(
 .param .u64 counter, .param .u64 rows, .param .u64 replays, .param .u32 mask,
 .param .u32 number, .param .u32 what, .param .u32 who)
{{
 .reg .pred %p<5>;
 .reg .b32 %r<16>;
 .reg .b64 %rd<16>;
 mov.u64 %rd4, %globaltimer;
 ld.param.u64 %rd1, [counter];
 ld.param.u64 %rd2, [rows];
 ld.param.u64 %rd3, [replays];
 ld.param.u32 %r1, [mask];
 ld.param.u32 %r2, [number];
 ld.param.u32 %r3, [what];
 ld.param.u32 %r4, [who];
 cvta.to.global.u64 %rd1, %rd1;
 cvta.to.global.u64 %rd2, %rd2;
 setp.eq.u64 %p1, %rd3, 0;
 @%p1 bra TAKE;
 cvta.to.global.u64 %rd3, %rd3;
 and.b32 %r5, %r3, {first};
 setp.ne.u32 %p2, %r5, 0;
 @%p2 bra BEGINS;
 ld.volatile.global.u32 %r2, [%rd3];
 bra TAKE;
BEGINS:
 atom.global.add.u32 %r6, [%rd3], 1;
 add.u32 %r2, %r6, 1;
TAKE:
 atom.global.add.u64 %rd5, [%rd1], 1;
 cvt.u32.u64 %r7, %rd5;
 and.b32 %r8, %r7, %r1;
 mul.wide.u32 %rd6, %r8, 32;
 add.s64 %rd7, %rd2, %rd6;
 add.u32 %r9, %r7, 1;
 and.b32 %r10, %r3, {end};
 setp.ne.u32 %p3, %r10, 0;
 @%p3 bra STORE;
 setp.eq.u64 %p4, %rd5, -1;
 @%p4 bra DONE;
 mov.u64 %rd4, %globaltimer;
STORE:
 mov.b64 {{%r12, %r13}}, %rd4;
 mov.u32 %r14, 0;
 st.global.v4.u32 [%rd7+16], {{%r2, %r4, %r9, %r14}};
 st.global.v4.u32 [%rd7], {{%r12, %r13, %r9, %r3}};
DONE:
 ret;
}}

.visible .entry specmeter_now(.param .u64 out)
{{
 .reg .b64 %rd<3>;
 ld.param.u64 %rd1, [out];
 mov.u64 %rd2, %globaltimer;
 st.volatile.u64 [%rd1], %rd2;
 membar.sys;
 ret;
}}

.visible .entry specmeter_ticks(.param .u64 out)
{{
 .reg .pred %p<4>;
 .reg .b32 %r<4>;
 .reg .b64 %rd<8>;
 ld.param.u64 %rd1, [out];
 mov.u64 %rd2, %globaltimer;
 mov.u64 %rd3, 0x7fffffffffffffff;
 mov.u32 %r1, 0;
 mov.u32 %r2, 0;
LOOK:
 mov.u64 %rd4, %globaltimer;
 add.u32 %r1, %r1, 1;
 setp.eq.u64 %p1, %rd4, %rd2;
 @%p1 bra NEXT;
 sub.s64 %rd5, %rd4, %rd2;
 min.u64 %rd3, %rd3, %rd5;
 mov.u64 %rd2, %rd4;
 add.u32 %r2, %r2, 1;
NEXT:
 setp.lt.u32 %p2, %r2, 64;
 setp.lt.u32 %p3, %r1, 20000;
 and.pred %p2, %p2, %p3;
 @%p2 bra LOOK;
 st.volatile.u64 [%rd1], %rd3;
 ret;
}}
"""


def text(capability: int) -> bytes:
    """The kernels' PTX for a device of compute ``capability`` (90 is 9.0), ended by a zero byte as the driver asks.

    Written for the oldest target that today's compilers take, 7.5, or 6.0 for devices below it; the driver compiles
    it for the device that is there.
    """
    target, version = (75, "6.3") if capability >= 75 else (60, "5.0")
    return _TEXT.format(version=version, target=target, end=END, first=FIRST).encode() + b"\0"


def load(driver: Any) -> Tuple[Any, str]:
    """The module of the kernels on the current device, and who compiled it: the driver, else Triton's ptxas.

    Raises RuntimeError with both reasons when neither can.
    """
    capability = driver.capability()
    ptx = text(capability)
    reasons: List[str] = []
    ways: Tuple[Tuple[str, Callable[[], bytes]], ...] = (
        ("driver", lambda: ptx),
        ("ptxas of triton", lambda: _assembled(ptx, capability)),
    )
    for name, image in ways:
        try:
            return driver.module(image()), name
        except Exception as error:
            reasons.append(f"{name}: {error}")
    raise RuntimeError("the stamp kernels could not be compiled: " + "; ".join(reasons))


def _assembled(ptx: bytes, capability: int) -> bytes:
    """A cubin by the assembler that Triton's wheel carries, if the process has imported triton. Raises on failure."""
    triton = sys.modules.get("triton")
    if triton is None:
        raise RuntimeError("triton is not imported")
    program = os.path.join(os.path.dirname(str(triton.__file__)), "backends", "nvidia", "bin", "ptxas")
    if not os.path.isfile(program):
        raise RuntimeError(f"there is no {program}")
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="specmeter-") as folder:
        source, cubin = os.path.join(folder, "stamps.ptx"), os.path.join(folder, "stamps.cubin")
        with open(source, "wb") as file:
            file.write(ptx.rstrip(b"\0"))
        done = subprocess.run(
            [program, f"-arch=sm_{capability}", source, "-o", cubin], capture_output=True, timeout=PTXAS_S
        )
        if done.returncode:
            raise RuntimeError(done.stderr.decode("utf-8", "replace").strip()[:200])
        with open(cubin, "rb") as file:
            return file.read()
