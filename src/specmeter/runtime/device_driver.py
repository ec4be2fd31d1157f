"""The few calls of the CUDA driver that stamps need, by ctypes: nothing is linked, nothing is built.

Every call works in the context that is current in the calling thread (torch's), makes none, and raises ``DriverError``
with the driver's own name of what went wrong. ``relaxed`` marks the calling thread as one whose calls may not spoil a
capture that another thread has under way (a query or a copy would, in the global capture mode). Names, signatures and
numbers are those of NVIDIA's CUDA driver API manual.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Dict, Sequence

from . import device_ptx

NOT_READY = 600
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_PORTABLE_MAPPED = 3
_MAJOR, _MINOR = 75, 76
_RELAXED = 2
_U32, _I32, _U64, _SIZE, _P = ctypes.c_uint, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: Dict[str, Sequence[Any]] = {
    "cuCtxGetCurrent": (_P,),
    "cuCtxGetDevice": (_P,),
    "cuCtxGetStreamPriorityRange": (_P, _P),
    "cuDeviceGetAttribute": (_P, _I32, _I32),
    "cuGetErrorName": (_I32, _P),
    "cuModuleLoadData": (_P, _P),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuMemAlloc_v2": (_P, _SIZE),
    "cuMemHostAlloc": (_P, _SIZE, _U32),
    "cuMemHostGetDevicePointer_v2": (_P, _P, _U32),
    "cuMemsetD8Async": (_U64, ctypes.c_ubyte, _SIZE, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _U64, _SIZE, _P),
    "cuStreamCreateWithPriority": (_P, _U32, _I32),
    "cuStreamQuery": (_P,),
    "cuEventCreate": (_P, _U32),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuThreadExchangeStreamCaptureMode": (_P,),
}
# Of graphs of our own and events with times, for measuring; graphs need CUDA 11.4.
_MEASURING: Dict[str, Sequence[Any]] = {
    "cuStreamBeginCapture_v2": (_P, _I32),
    "cuStreamEndCapture": (_P, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, _U64),
    "cuGraphLaunch": (_P, _P),
    "cuGraphDestroy": (_P,),
    "cuGraphExecDestroy": (_P,),
    "cuEventElapsedTime": (_P, _P, _P),
    "cuEventDestroy_v2": (_P,),
}


class DriverError(RuntimeError):
    """A call of the driver that failed, with its name and the driver's name of the failure."""


class HostMemory:
    """Pinned memory: ``address`` for the host, ``device`` for kernels, ``view`` its bytes."""

    def __init__(self, address: int, device: int, size: int) -> None:
        self.address, self.device = address, device
        self.view = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


class Kernel:
    """One kernel of one thread; its parameters lie ready, so that a launch only writes numbers into them.

    Not for two threads at once: ctypes lets go of the interpreter while the driver reads the parameters. Without
    argument types a call of eleven arguments costs a third, so each is what C takes as it is: ints that fit an int,
    and pointers made before.
    """

    def __init__(self, driver: Driver, function: Any, sizes: Sequence[int]) -> None:
        layout = struct.Struct("<" + "".join("Q" if size == 8 else "I" for size in sizes))
        self._buffer = (ctypes.c_ubyte * layout.size)()
        start = ctypes.addressof(self._buffer)
        places = [start + sum(sizes[:index]) for index in range(len(sizes))]
        self._pointers = (_P * len(sizes))(*places)
        self._pack = layout.pack_into
        self._function = function
        self._streams: Dict[int, Any] = {}
        self._launch = driver.lib["cuLaunchKernel"]  # another object than the attribute, which has argument types
        self._check = driver.check

    def __call__(self, stream: int, *numbers: int) -> None:
        """Launch on the stream with that handle. Raises DriverError."""
        self._pack(self._buffer, 0, *numbers)
        handle = self._streams.get(stream)
        if handle is None:
            handle = self._streams[stream] = _P(stream)
        code = self._launch(self._function, 1, 1, 1, 1, 1, 1, 0, handle, self._pointers, None)
        if code:
            self._check(code, "cuLaunchKernel")


class Driver:
    """libcuda in the context of the calling thread. Raises OSError without it, DriverError without a context."""

    def __init__(self, lib: Any = None) -> None:
        self.lib: Any = lib if lib is not None else ctypes.CDLL("libcuda.so.1")
        self._declare(_SIGNATURES)
        if not self.context():
            raise DriverError("this thread has no CUDA context")

    def _declare(self, signatures: Dict[str, Sequence[Any]]) -> None:
        for name, arguments in signatures.items():
            call = getattr(self.lib, name)
            call.argtypes, call.restype = list(arguments), _I32

    def check(self, code: int, name: str) -> None:
        """Raise DriverError unless the call ``name`` gave 0."""
        if code:
            said = ctypes.c_char_p()
            self.lib.cuGetErrorName(code, ctypes.byref(said))
            raise DriverError(f"{name}: {(said.value or b'error').decode()} ({code})")

    def _do(self, name: str, *arguments: Any) -> None:
        self.check(getattr(self.lib, name)(*arguments), name)

    def context(self) -> int:
        """The handle of the calling thread's context, 0 without one."""
        found = _P()
        self._do("cuCtxGetCurrent", ctypes.byref(found))
        return found.value or 0

    def capability(self) -> int:
        """Ten times the compute capability of the context's device, as 90 for 9.0."""
        device, major, minor = _I32(), _I32(), _I32()
        self._do("cuCtxGetDevice", ctypes.byref(device))
        self._do("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
        self._do("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
        return major.value * 10 + minor.value

    def module(self, image: bytes) -> Any:
        """Load PTX (ended by a zero byte) or a cubin. Raises DriverError."""
        module = _P()
        self._do("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        return module

    def kernel(self, module: Any, name: str) -> Kernel:
        """A kernel of device_ptx.PARAMETERS."""
        function = _P()
        self._do("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return Kernel(self, function, device_ptx.PARAMETERS[name])

    def stream(self) -> int:
        """A new stream that waits for no other one, of the highest priority."""
        lowest, highest, stream = _I32(), _I32(), _P()
        self._do("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
        self._do("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, highest)
        return stream.value or 0

    def idle(self, stream: int) -> bool:
        """Whether everything that was launched on the stream is over."""
        return self._is_done(self.lib.cuStreamQuery(stream), "cuStreamQuery")

    def memory(self, size: int) -> int:
        """Device memory of ``size`` bytes, never given back: graphs that were captured hold its address."""
        address = _U64()
        self._do("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def clear(self, address: int, size: int, stream: int) -> None:
        """Zeros, by the stream."""
        self._do("cuMemsetD8Async", address, 0, size, stream)

    def host_memory(self, size: int) -> HostMemory:
        """Pinned host memory that kernels can write."""
        host, device = _P(), _U64()
        self._do("cuMemHostAlloc", ctypes.byref(host), size, _PORTABLE_MAPPED)
        self._do("cuMemHostGetDevicePointer_v2", ctypes.byref(device), host, 0)
        return HostMemory(host.value or 0, device.value, size)

    def copy(self, to: int, at: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes at the device address ``at`` to pinned host memory, by the stream."""
        self._do("cuMemcpyDtoHAsync_v2", to, at, size, stream)

    def event(self) -> Any:
        """An event without timing."""
        event = _P()
        self._do("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        return event

    def record(self, event: Any, stream: int) -> None:
        """Record the event on the stream."""
        self._do("cuEventRecord", event, stream)

    def done(self, event: Any) -> bool:
        """Whether the device has passed the event."""
        return self._is_done(self.lib.cuEventQuery(event), "cuEventQuery")

    def _is_done(self, code: int, name: str) -> bool:
        if code == NOT_READY:
            return False
        self.check(code, name)
        return True

    # -- graphs of our own ----------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Capture what is launched on the stream, and let every other thread and stream do as it likes meanwhile.

        Raises AttributeError with a driver that is too old for graphs.
        """
        self._declare(_MEASURING)
        self._do("cuStreamBeginCapture_v2", stream, _RELAXED)

    def end_capture(self, stream: int) -> Any:
        """What was captured since."""
        graph = _P()
        self._do("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph

    def made_graph(self, graph: Any) -> Any:
        """The captured graph, ready to be launched; the captured form is given back."""
        made = _P()
        self._do("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
        self._do("cuGraphDestroy", graph)
        return made

    def launch_graph(self, graph: Any, stream: int) -> None:
        """Launch a graph on the stream."""
        self._do("cuGraphLaunch", graph, stream)

    def free_graph(self, graph: Any) -> None:
        """Give a graph back that has run."""
        self._do("cuGraphExecDestroy", graph)

    def timed_event(self) -> Any:
        """An event that keeps its time."""
        event = _P()
        self._do("cuEventCreate", ctypes.byref(event), 0)
        return event

    def elapsed_ns(self, first: Any, second: Any) -> float:
        """From one event to another, ns, both passed."""
        found = ctypes.c_float()
        self._do("cuEventElapsedTime", ctypes.byref(found), first, second)
        return found.value * 1e6

    def free_event(self, event: Any) -> None:
        """Give an event back."""
        self._do("cuEventDestroy_v2", event)

    def relaxed(self) -> Relaxed:
        """A context in which this thread's calls spoil nobody's capture."""
        return Relaxed(self)


class Relaxed:
    """cuThreadExchangeStreamCaptureMode there and back."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._mode = _I32(_RELAXED)

    def __enter__(self) -> None:
        self._driver._do("cuThreadExchangeStreamCaptureMode", ctypes.byref(self._mode))

    def __exit__(self, *_error: object) -> None:
        self._driver._do("cuThreadExchangeStreamCaptureMode", ctypes.byref(self._mode))
