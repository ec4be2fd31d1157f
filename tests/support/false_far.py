"""The other side of a session that does not keep to the rules: run as ``python false_far.py MODE``; standard library.

It begins as the true one does and answers ``facts`` and whatever ``MODE`` answers in its own way; see ``SENT``.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from typing import Any

HEAD = struct.Struct(">4sII")
FACTS = {"host": "h", "system": "s", "machine": "m", "cpus": 1, "python": "3.9"}
DESCRIBED = {"link": "l", "path": "/there", "plan": {"points": []}, "document": {}}
# By mode: raw JSON texts that are sent where the answer to the second request belongs; {id} is its number.
SENT: dict[str, list[str]] = {
    "id null": ['{"id":null}'],
    "id text": ['{"id":"x"}'],
    "event list": ['{"event":["a"]}'],
    "no name": ["{}"],
    "deep": ["[" * 200_000],
    "no ok": ['{"id":{id}}'],
    "ok text": ['{"id":{id},"ok":"x"}'],
    "error text": ['{"id":{id},"error":"boo"}'],
    "error 0": ['{"id":{id},"error":{"what":"w","why":"y","next":"n","exit":0}}'],
    "error 6": ['{"id":{id},"error":{"what":"w","why":"y","next":"n","exit":6}}'],
    "error 99": ['{"id":{id},"error":{"what":"w","why":"y","next":"n","exit":99}}'],
    "error 3": ['{"id":{id},"error":{"what":"w","why":"y","next":"n","exit":3}}'],
    "link id": ['{"id":{id},"ok":' + json.dumps({**DESCRIBED, "link": "../../x"}) + "}"],
    "plan": ['{"id":{id},"ok":' + json.dumps({**DESCRIBED, "plan": {"points": [{"name": "x"}]}}) + "}"],
    "plan list": ['{"id":{id},"ok":' + json.dumps({**DESCRIBED, "plan": [1]}) + "}"],
    "port": ['{"id":{id},"ok":{"port":"1@evil.example:80/"}}'],
    "silent": [],
}


def begin() -> None:
    """Read what is sent and write the mark, as ``far_start`` does."""
    stream = sys.stdin.buffer
    program = stream.read(int(stream.readline()))
    first, second = (int(size) for size in re.findall(rb"r\.read\((\d+)\)", program)[-2:])
    header = json.loads(stream.read(first))
    stream.read(second)
    mark = f"\0specmeter {header['token']} start\n".encode()
    for out in (sys.stderr.buffer, sys.stdout.buffer):
        out.write(mark)
        out.flush()


def send(text: str) -> None:
    """One frame."""
    data = text.encode()
    sys.stdout.buffer.write(HEAD.pack(b"\0spm", len(data), 0) + data)
    sys.stdout.buffer.flush()


def main() -> None:
    """Answer until the stream ends."""
    begin()
    count = 0
    while head := sys.stdin.buffer.read(HEAD.size):
        _, size, payload = HEAD.unpack(head)
        message: dict[str, Any] = json.loads(sys.stdin.buffer.read(size))
        sys.stdin.buffer.read(payload)
        count += 1
        if message["op"] == "facts":
            send(json.dumps({"id": message["id"], "ok": FACTS}))
        elif count == 2:
            for text in SENT[sys.argv[1]]:
                send(text.replace("{id}", str(message["id"])))


if __name__ == "__main__":
    main()
