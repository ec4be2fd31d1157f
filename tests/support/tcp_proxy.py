"""A TCP proxy on loopback that delays, limits the rate, counts, and breaks connections: a far link without netem."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

_CHUNK = 16384


@dataclass
class Traffic:
    """What has passed: bytes towards the target and back, and bursts of the client that were followed by an answer.

    ``exchanges`` is an upper bound of the round trips: what flows both ways at once (window updates while a
    request is still being sent) is counted too, although nobody waits for it.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: int = 0
    _last_sent: bool = field(default=False, repr=False)

    def count(self, sent: bool, size: int) -> None:
        """Add one piece."""
        if sent:
            self.sent_bytes += size
        else:
            self.received_bytes += size
            self.exchanges += self._last_sent
        self._last_sent = sent


class TcpProxy:
    """Forwards ``port`` of loopback to ``target``, each way ``delay_s`` later and at most ``rate`` bytes a second.

    Use it in a ``with`` block. The rate holds for each direction and all connections of it together.
    """

    def __init__(self, target: int, delay_s: float = 0.0, rate: float | None = None) -> None:
        self.target = target
        self.delay_s = delay_s
        self.rate = rate
        self.traffic = Traffic()
        self._free_at = [0.0, 0.0]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> TcpProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self) -> int:
        """Break every connection with a reset, on both sides; gives how many sockets that were."""
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RDWR)  # wakes the threads, which close it
        return len(sockets)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        with self._lock:
            self._sockets |= {near, far}
        pumps = [threading.Thread(target=self._pump, args=(*pair,), daemon=True) for pair in
                 ((near, far, True), (far, near, False))]  # fmt: skip
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        with self._lock:
            self._sockets -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket, sent: bool) -> None:
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue()
        deliver = threading.Thread(target=_deliver, args=(pieces, sink), daemon=True)
        deliver.start()
        data = b"."
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            with self._lock:
                if data:
                    self.traffic.count(sent, len(data))
                took = len(data) / self.rate if self.rate else 0.0
                self._free_at[sent] = max(self._free_at[sent], time.monotonic()) + took
                pieces.put((self._free_at[sent] + self.delay_s, data))
        deliver.join()


def _deliver(pieces: queue.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
    """Write each piece when its time has come; an empty one closes that direction."""
    while True:
        at, data = pieces.get()
        time.sleep(max(0.0, at - time.monotonic()))
        with contextlib.suppress(OSError):
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
            continue
        if not data:
            return
