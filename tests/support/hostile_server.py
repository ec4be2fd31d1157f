"""``python hostile_server.py MODE [--port N]``: a server that gets healthy and then behaves as MODE says.

``good`` streams eight tokens, 20 ms apart; ``die`` ends at the first request; ``error`` answers 500; ``garbage``
streams what is no JSON; ``silent`` never answers. All tell SGLang's own choice of steps at /get_server_info.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = sys.argv[1]
TOLD = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """Healthy, and no metrics."""
        known = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}, "/get_server_info": TOLD}
        self._begin(200 if self.path in known else 404)
        self.wfile.write(json.dumps(known.get(self.path, {})).encode())

    def do_POST(self) -> None:
        """As the mode says."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if MODE == "die":
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", flush=True)
            os._exit(3)
        if MODE == "silent":
            time.sleep(600)
        self._begin(500 if MODE == "error" else 200)
        if MODE == "error":
            self.wfile.write(b'{"error": {"message": "no such adapter"}}')
            return
        for _ in range(8):
            self._event("{{{" if MODE == "garbage" else json.dumps({"choices": [{"delta": {"content": "ok "}}]}))
            time.sleep(0.02)
        self._event(json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 8}}))
        self._event("[DONE]")

    def _begin(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
    server.daemon_threads = True
    server.serve_forever()
