"""Messages in both directions of one stream: a JSON object and a payload of bytes each. Standard library of 3.9."""

from __future__ import annotations

import json
import struct
import threading
from typing import IO, Any

# magic, bytes of the JSON object, bytes of the payload
_HEAD = struct.Struct(">4sII")
_MAGIC = b"\0spm"
_MOST_JSON, _MOST_PAYLOAD = 1 << 26, 1 << 28
Message = dict[str, Any]


class StreamDamaged(Exception):
    """What came is no frame; ``rest`` is its beginning."""

    def __init__(self, rest: bytes) -> None:
        super().__init__(f"no message, but {rest[:80]!r}")
        self.rest = rest


class Frames:
    """Reads and writes frames; ``sent`` and ``received`` count bytes. Writing is safe from several threads."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self.sent = 0
        self.received = 0
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()

    def write(self, message: Message, payload: bytes = b"") -> None:
        """Send one message. Raises OSError or ValueError when the stream is closed."""
        text = json.dumps(message, separators=(",", ":")).encode()
        data = _HEAD.pack(_MAGIC, len(text), len(payload)) + text + payload
        with self._lock:
            self._sink.write(data)
            self._sink.flush()
            self.sent += len(data)

    def read(self) -> tuple[Message, bytes] | None:
        """The next message and its payload, or None at the end. Raises StreamDamaged for anything else."""
        head = self._exactly(_HEAD.size)
        if not head:
            return None
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise StreamDamaged(head)
        _magic, text_size, payload_size = _HEAD.unpack(head)
        if text_size > _MOST_JSON or payload_size > _MOST_PAYLOAD:
            raise StreamDamaged(head)
        text = self._exactly(text_size)
        payload = self._exactly(payload_size)
        if len(text) < text_size or len(payload) < payload_size:
            return None
        self.received += len(head) + text_size + payload_size
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise StreamDamaged(text) from None
        if not isinstance(message, dict):
            raise StreamDamaged(text)
        return message, payload

    def _exactly(self, size: int) -> bytes:
        """So many bytes, or fewer at the end of the stream."""
        data = b""
        while len(data) < size:
            more = self._source.read(size - len(data))
            if not more:
                break
            data += more
        return data
