"""torch's profiler, by its lowest calls: made ready, started, stopped, exported. torch only if the process has it.

The state that starting makes belongs to the calling thread, so one thread of ours does everything; CUPTI sees the calls
and kernels of all threads. Making ready turns the collection on (CUPTI's first time in a process takes seconds, without
Python's lock), starting only sets its begin; so a window that was made ready is always started and stopped.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Dict, List, Optional

CUDA, CPU = "cuda", "cpu"
MARKS = 16
PAIRS = 9


class CannotProfile(Exception):
    """Why there is no window, for the user."""


def look() -> Dict[str, Any]:
    """What this process has: torch's version or None, and whether it has begun to use a CUDA device."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        # is_available would make a context's precursors, after which a fork cannot use the device.
        begun = bool(cuda is not None and cuda.is_initialized())
    except Exception:
        begun = False
    return {"torch": None if torch is None else str(getattr(torch, "__version__", "?")), "cuda": begun}


def teardown_fault(cuda: Optional[str]) -> str:
    """Why CUPTI must not come back to this process, or an empty string; ``cuda`` is the version torch is built for.

    torch itself turns the teardown off where it knows of graphs (torch/profiler/profiler.py): before CUDA 12.6 CUPTI
    that was taken down brings a process with captured graphs down when it comes back. A server's graphs are not told
    to torch's profiler, and the variable is the server's.
    """
    try:
        before = cuda is not None and tuple(int(part) for part in cuda.split(".")[:2]) < (12, 6)
    except ValueError:
        return ""
    if not before or os.environ.get("TEARDOWN_CUPTI") != "1":
        return ""
    return f"TEARDOWN_CUPTI=1 and CUDA {cuda}: a second window could bring a server with CUDA graphs down; unset it"


class Tool:
    """One window of torch's profiler: kernels, copies and CUDA calls (``cuda``), or operators on the host (``cpu``).

    Raises CannotProfile where this torch cannot.
    """

    def __init__(self, activity: str) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            raise CannotProfile("torch is not imported in this process")
        self.activity = activity
        self.ready = self.on = False
        self.device = -1
        self._torch: Any = torch
        self._result: Any = None
        autograd = self._torch.autograd
        if activity == CUDA:
            if not look()["cuda"]:
                raise CannotProfile("this process has begun no CUDA device")
            if autograd.ProfilerActivity.CUDA not in autograd._supported_activities():
                raise CannotProfile(f"torch {torch.__version__} was built without CUPTI")
            fault = teardown_fault(getattr(torch.version, "cuda", None))
            if fault:
                raise CannotProfile(fault)
            self._profile = self._made({}, use_cpu=False, use_device="cuda")
        else:
            self._profile = self._made({"profile_all_threads": True}, use_cpu=True)

    def _made(self, config: Dict[str, Any], **options: Any) -> Any:
        kind = self._torch.autograd.profiler.profile
        experimental = self._torch._C._profiler._ExperimentalConfig
        try:
            # What is not needed for the file is not made when it stops.
            options["experimental_config"] = experimental(trace_only=True, **config)
        except TypeError:  # before torch 2.13
            try:
                options["experimental_config"] = experimental(**config)
            except TypeError:
                version = self._torch.__version__
                raise CannotProfile(f"torch {version} sees the operators of its caller's thread only") from None
        try:
            return kind(use_kineto=True, **options)
        except TypeError:  # before torch 2.4
            options["use_cuda"] = options.pop("use_device", None) == "cuda"
            return kind(use_kineto=True, **options)

    def busy(self) -> str:
        """Asked in any thread: why a window would disturb somebody else's, or an empty string."""
        autograd = self._torch.autograd
        if getattr(autograd.profiler, "_is_profiler_enabled", False) or autograd._profiler_enabled():
            return "another torch profiler is running in this process"
        if self.activity == CUDA and self._torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return ""

    def current_device(self) -> int:
        """Asked in the engine's thread: the device that it uses."""
        return int(self._torch.cuda.current_device()) if self.activity == CUDA else -1

    def prepare(self) -> None:
        """Turn the collection on, without Python's lock."""
        self.ready = True
        self._torch.autograd._prepare_profiler(self._profile.config(), self._profile.kineto_activities)

    def start(self, device: int) -> None:
        """Begin the window."""
        if device >= 0:
            self._torch.cuda.set_device(device)  # else the marks would make a context on the first device
        self.device = device
        self._torch.autograd._enable_profiler(self._profile.config(), self._profile.kineto_activities)
        self.on = True

    def stop(self) -> None:
        """End it and keep the result. Holds Python's lock while the events are gathered.

        Raises CannotProfile when somebody else has begun a profile meanwhile: theirs has taken the place of ours.
        """
        self.on = self.ready = False
        started = getattr(self._torch.autograd.profiler, "_is_profiler_enabled", False)
        if not started or self.activity == CPU:  # operators are ours to stop; the device's part is theirs now
            self._result = self._torch.autograd._disable_profiler()
        if started:
            raise CannotProfile("another torch profiler was started during the window")

    def leave(self) -> None:
        """Whatever happened: off."""
        if self.ready and not self.on:
            if getattr(self._torch.autograd.profiler, "_is_profiler_enabled", False):
                return  # somebody else's has taken its place
            self.start(self.device)
        if self.on:
            self.stop()
        self._result = None

    def forked(self) -> None:
        """In a forked child: off there too. Operators would be collected for ever; a device does not come along."""
        if self.on and self.activity == CPU:
            self.on = self.ready = False
            self._torch.autograd._disable_profiler()

    def export(self, path: str) -> None:
        """Write the result as a Chrome trace. Holds Python's lock."""
        self._result.save(path)
        self._result = None

    def marks(self) -> List[List[int]]:
        """Calls that the profiler records, with perf_counter_ns before and after each: what joins the two clocks."""
        torch, clock, found = self._torch, time.perf_counter_ns, []
        for _ in range(MARKS):
            before = clock()
            if self.activity == CUDA:
                torch.cuda.is_current_stream_capturing()
            else:
                torch.empty(0)
            found.append([before, clock()])
        return found

    @property
    def mark_name(self) -> str:
        """The name of such a call in the trace."""
        if self.activity == CPU:
            return "aten::empty"
        return "hipStreamIsCapturing" if getattr(self._torch.version, "hip", None) else "cudaStreamIsCapturing"

    def device_name(self) -> str:
        """The card's name; empty without one."""
        return str(self._torch.cuda.get_device_name(self.device)) if self.device >= 0 else ""

    @property
    def version(self) -> str:
        """torch's."""
        return str(self._torch.__version__)


def pairs() -> List[List[int]]:
    """perf_counter_ns, time_ns, perf_counter_ns, several times: where the host's two clocks stand to each other."""
    return [[time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()] for _ in range(PAIRS)]
