"""A server that is started on another host, which is this machine here: asked where it listens, with its own key."""

from __future__ import annotations

import sys
from pathlib import Path

from specmeter.engines import ServerSpec, engine_named
from specmeter.hosts.address import Host
from specmeter.hosts.place import There
from specmeter.hosts.relay import Relay

# Listens at its --host alone, and answers nobody without its --api-key.
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
said = dict(zip(sys.argv, sys.argv[1:]))
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer " + said["--api-key"]
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()
HTTPServer((said["--host"], int(said["--port"])), Answer).serve_forever()
"""


def test_a_far_server_is_asked_at_its_own_host_with_its_own_key(tmp_path: Path) -> None:
    words = (sys.executable, "-c", SERVER, "sglang.launch_server", "--host", "127.0.0.2", "--api-key", "k-1234")
    spec = ServerSpec("sglang", command=words)
    there = There(Relay(Host("here", ("env",), shell=False), sys.executable))
    try:
        log = tmp_path / "server.log"
        with there.start(engine_named("sglang"), spec, log, None, lambda text: None, 30.0) as server:
            assert server.url.startswith("http://127.0.0.2:") and server.healthy()
            assert server.headers == {"Authorization": "Bearer k-1234"}
    finally:
        there.close()
