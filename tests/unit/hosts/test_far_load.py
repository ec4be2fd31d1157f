"""The load generator that runs beside a far server: what it sends, and how it takes a stream apart."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specmeter.bench.client import Call, Outcome, request_body
from specmeter.bench.prompts import Prompt
from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.driven import Driven
from specmeter.hosts.far_load import Drive
from specmeter.hosts.far_server import free_or_stated

KEY = "k-1234567"
CALL = Call("r", Prompt("p", "chat", (("user", "text"),)), 4, headers={"Authorization": f"Bearer {KEY}"})
TOKEN = {"choices": [{"delta": {"content": "a"}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}


def answering(pieces: Callable[[bytes], Sequence[bytes]]) -> tuple[str, threading.Thread]:
    """A server for one connection that answers a request with these bytes, each on its own; gives its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening, listening.accept()[0] as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = b""
            while b"\r\n\r\n" not in request:
                request += peer.recv(65536)
            for piece in pieces(request):
                peer.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}", thread


def driven(url: str) -> Outcome:
    """The outcome of one call that the far load generator sent to ``url``."""
    done: list[Outcome] = []
    reading = Driven([CALL], "chat", done.append)
    request: dict[str, Any] = {
        "url": url, "path": "/v1/chat/completions", "timeout_s": 20.0, "concurrency": 1, "stop_on_error": True,
        "headers": dict(CALL.headers),
    }  # fmt: skip
    body = json.dumps(request_body(CALL, "m", "chat")).encode()
    Drive(request, [body], reading.take).run()
    [outcome] = done
    return outcome


def test_an_end_of_line_that_is_split_between_two_pieces_ends_an_event_all_the_same() -> None:
    events = [json.dumps(TOKEN), json.dumps(TOKEN), json.dumps(USAGE), "[DONE]"]
    text = "".join(f"data: {event}\r\n\r\n" for event in events).encode()
    cut = text.index(b"\r\n\r\n") + 3  # behind the second carriage return

    def pieces(request: bytes) -> list[bytes]:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (text[:cut], text[cut:], b"")]
        return [head, *chunks]

    url, thread = answering(pieces)
    outcome = driven(url)
    thread.join(20)
    assert outcome.error == "" and outcome.text == "aa" and outcome.output_tokens == 2


def test_a_key_goes_along_and_is_not_repeated() -> None:
    asked: list[bytes] = []

    def refuse(request: bytes) -> list[bytes]:
        asked.append(request)
        body = f"unknown key {KEY}".encode()
        return [b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]

    url, thread = answering(refuse)
    outcome = driven(url)
    thread.join(20)
    assert f"Authorization: Bearer {KEY}".encode() in asked[0]
    assert "401" in outcome.error and KEY not in outcome.error


def test_a_port_is_looked_for_where_the_server_will_listen() -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecmeterError, match=f"Port {port} is taken there") as caught:
            free_or_stated(port, "127.0.0.2")
        assert caught.value.exit == Exit.SERVER_FAILED
        assert free_or_stated(port, "127.0.0.3") == port
    assert free_or_stated(port, "192.0.2.1") == port
    with pytest.raises(SpecmeterError, match="70000 is no port"):
        free_or_stated(70_000, "127.0.0.1")
    assert 0 < free_or_stated(None, "127.0.0.2") < 65_536
