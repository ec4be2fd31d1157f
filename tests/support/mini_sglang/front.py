"""``python front.py``: the miniature server behind HTTP, as a load generator wants it. Prints its port.

Answers /health, /v1/models and streamed /v1/chat/completions; a piece is six cycles, whose sum is always 12.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

from minisgl.scheduler import run_scheduler_process

CYCLES, SUM = 6, 12


class Handler(BaseHTTPRequestHandler):
    """One request; the scheduler takes one piece at a time."""

    scheduler: Connection
    lock = threading.Lock()

    def do_GET(self) -> None:
        """Health and the list of models."""
        known = {"/health": {}, "/v1/models": {"data": [{"id": "mini"}]}}
        self._begin(200 if self.path in known else 404, "application/json")
        self.wfile.write(json.dumps(known.get(self.path, {})).encode())

    def do_POST(self) -> None:
        """A streamed answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = int(asked["max_tokens"])
        self._begin(200, "text/event-stream")
        for done in range(0, wanted, CYCLES):
            with self.lock:
                self.scheduler.send((CYCLES, 1))
                found = self.scheduler.recv()
            self._event({"choices": [{"index": 0, "delta": {"content": "ok " if found == SUM else f"{found}! "}}]})
            del done
        self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": wanted}})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def _event(self, document: object) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())


def main() -> None:
    """Spawn the scheduler and serve until killed."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=run_scheduler_process, args=(theirs,), daemon=True).start()
    Handler.scheduler = ours
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
