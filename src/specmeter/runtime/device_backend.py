"""The accelerators of torch that the device clocks know: CUDA, ROCm, NPU and XPU, behind one small interface.

ROCm is ``torch.cuda`` of a torch with ``torch.version.hip``. ``torch.cuda.Event``, ``torch.xpu.Event`` (PyTorch's
reference, ``torch.xpu.Event(enable_timing=True)``) and ``torch.npu.Event`` (Ascend's torch_npu reference, the same
signature) share ``record``, ``query`` and ``elapsed_time`` in milliseconds. Nothing here makes a device context: a
backend is found once the server has initialized it.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

NAMES = ("cuda", "npu", "xpu")
_NO_GRAPHS = "no stamps inside graphs: they need the CUDA driver"


class Backend:
    """One accelerator. ``cannot`` says in plain sentences what it has no way to do.

    ``event()`` is a new event with timing, ``mark(event)`` records it on the stream that is current in the calling
    thread, ``capturing()`` tells whether that stream is being captured, ``raw()`` is its handle (CUDA only).
    ``query(event)`` and ``elapsed(first, second)`` (ms) are the events' own.
    """

    def __init__(self, torch: Any, name: str, module: Any) -> None:
        self.module = module
        rocm = name == "cuda" and bool(getattr(getattr(torch, "version", None), "hip", None))
        self.name = "rocm" if rocm else name
        self.cannot: List[str] = [] if self.name == "cuda" else [_NO_GRAPHS]
        self.capturing: Callable[[], bool] = self._capturing(torch)
        self.mark: Callable[[Any], None] = _mark_plain
        self.query: Callable[[Any], bool] = _query_plain
        self.elapsed: Callable[[Any, Any], float] = _elapsed_plain
        self.raw: Optional[Callable[[], int]] = None
        if name == "cuda":
            self._go_lean(torch)

    def event(self) -> Any:
        """A new event that keeps its time."""
        return self.module.Event(enable_timing=True)

    def side_stream(self) -> Any:
        """A stream of our own."""
        return self.module.Stream()

    def outside_stream(self, handle: int) -> Any:
        """torch's view of a stream that the driver made."""
        return self.module.ExternalStream(handle)

    def _capturing(self, torch: Any) -> Callable[[], bool]:
        plain = getattr(getattr(torch, "_C", None), "_cuda_isCurrentStreamCapturing", None)
        if plain is not None and self.name in ("cuda", "rocm"):
            asked: Callable[[], bool] = plain
            return asked
        known: Optional[Callable[[], bool]] = getattr(self.module, "is_current_stream_capturing", None)
        if known is None:
            self.cannot.append("graph capture cannot be seen: device points are not to run inside one")
            return lambda: False
        return known

    def _go_lean(self, torch: Any) -> None:
        """Record on a Stream object that is kept, instead of one that ``current_stream()`` makes at each call."""
        private = getattr(torch, "_C", None)
        handle = getattr(private, "_cuda_getCurrentRawStream", None)
        device = getattr(private, "_cuda_getDevice", None)
        base = getattr(private, "_CudaEventBase", None)
        record = getattr(base, "record", None)
        if handle is None or device is None or record is None:
            return  # another torch than the ones that were looked at
        self.query = getattr(base, "query", _query_plain)  # without the methods in Python around them
        self.elapsed = getattr(base, "elapsed_time", _elapsed_plain)
        streams: Dict[int, Any] = {}
        current = self.module.current_stream

        def mark(event: Any) -> None:
            number = device()
            key = handle(number) or ~number  # each device's default stream has the handle 0
            stream = streams.get(key)
            if stream is None:
                stream = streams[key] = current()
            record(event, stream)

        self.mark = mark
        self.raw = lambda: int(handle(device()))


def _mark_plain(event: Any) -> None:
    event.record()


def _query_plain(event: Any) -> bool:
    return bool(event.query())


def _elapsed_plain(first: Any, second: Any) -> float:
    return float(first.elapsed_time(second))


def find_backend() -> Tuple[Optional[Backend], str]:
    """The accelerator that the process uses; else None and why, with an empty reason while it may still come."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None, "torch is not imported"
    for name in NAMES:
        module = getattr(torch, name, None)
        if module is None or not module.is_available():
            continue
        if not module.is_initialized():
            return None, ""
        return Backend(torch, name, module), ""
    return None, "torch has no CUDA device, and no NPU or XPU either"


def of_the_clock(error: BaseException) -> bool:
    """Whether an error arose in our code, in torch or in the standard library: not in what a signal handler ran."""
    folders = [os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep, "<frozen "]
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch:
        folders.append(os.path.dirname(torch) + os.sep)
    at = error.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(tuple(folders)):
            return False
        at = at.tb_next
    return True
