"""``python front.py [--port N] [--adaptive STEPS...] [--torch]``: the miniature server behind HTTP. Prints its port.

Answers /health, /v1/models, /metrics, streamed /v1/chat/completions and /generate; a piece is six cycles, whose sum is
always 12 with three steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

from minisgl.scheduler import run_scheduler_process
from minisgl.workers import ServerArgs

CYCLES, SUM = 6, 12


class Handler(BaseHTTPRequestHandler):
    """One request; the scheduler takes one piece at a time."""

    scheduler: Connection
    lock = threading.Lock()

    def do_GET(self) -> None:
        """Health, the list of models, and no metrics."""
        known = {"/health": {}, "/v1/models": {"data": [{"id": "mini"}]}, "/metrics": {}}
        self._begin(200 if self.path in known else 404, "application/json")
        self.wfile.write(json.dumps(known.get(self.path, {})).encode())

    def do_POST(self) -> None:
        """A streamed answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            return self._generate(int(asked["sampling_params"]["max_new_tokens"]))
        wanted = int(asked["max_tokens"])
        self._begin(200, "text/event-stream")
        for _ in range(0, wanted, CYCLES):
            found = self._piece()
            self._event({"choices": [{"index": 0, "delta": {"content": "ok " if found == SUM else f"{found}! "}}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": wanted}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _generate(self, wanted: int) -> None:
        """SGLang's own stream, each event with its new ids alone; an id is the sum of its piece."""
        self._begin(200, "text/event-stream")
        for done in range(0, wanted, CYCLES):
            ids = [self._piece()] * min(CYCLES, wanted - done)
            self._event({"output_ids": ids, "meta_info": {"prompt_tokens": 1, "spec_verify_ct": done + CYCLES}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _piece(self) -> int:
        with self.lock:
            self.scheduler.send((CYCLES, 1))
            return int(self.scheduler.recv())

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--adaptive", type=int, nargs="+", default=(), help="step counts to switch between")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    scheduler = (theirs, False, ServerArgs(1, tuple(args.adaptive), args.torch))
    multiprocessing.get_context("spawn").Process(target=run_scheduler_process, args=scheduler, daemon=True).start()
    Handler.scheduler = ours
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
