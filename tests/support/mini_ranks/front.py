"""``python front.py [--port N] [--tp N] [--steps K] [--slow RANK]``: the miniature ranks behind HTTP. Prints its port.

Answers /health, /v1/models, /metrics and SGLang's streamed /generate; one request at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from minitp.scheduler import run_rank

PIECE = 12


class Handler(BaseHTTPRequestHandler):
    """One request; the ranks take one piece at a time."""

    ranks: list[Connection]
    barrier: Barrier | None  # a barrier that nobody holds is gone before the ranks have it
    lock = threading.Lock()

    def do_GET(self) -> None:
        """Health, the list of models, and no metrics."""
        known = {"/health": {}, "/v1/models": {"data": [{"id": "minitp"}]}, "/metrics": {}}
        self._begin(200 if self.path in known else 404, "application/json")
        self.wfile.write(json.dumps(known.get(self.path, {})).encode())

    def do_POST(self) -> None:
        """A stream of pieces, each with its new ids alone."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = int(asked["sampling_params"]["max_new_tokens"])
        self._begin(200, "text/event-stream")
        done = 0
        while done < wanted:
            with self.lock:
                self.ranks[0].send((min(PIECE, wanted - done), 1))
                answers = [rank.recv() for rank in self.ranks]
            gained = answers[0]
            done += gained
            self._event({"output_ids": [7] * gained, "meta_info": {"prompt_tokens": 1, "spec_verify_ct": done // 2}})
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
        self.wfile.flush()


def start(tp: int, steps: int, slow: int, barrier: Barrier | None) -> list[Connection]:
    """Spawn the ranks; the pipes to them, rank 0 first, which sends requests on to the others itself."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(tp)]
    for rank in range(tp):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp))
        others = [ours for ours, _theirs in pipes[1:]] if rank == 0 else []
        arguments = (rank, pipes[rank][1], others, barrier, steps, slow)
        context.Process(target=run_rank, args=arguments, daemon=True).start()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return [ours for ours, _theirs in pipes]


def main() -> None:
    """Spawn the ranks and serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--slow", type=int, default=1)
    args = parser.parse_args()
    Handler.barrier = multiprocessing.get_context("spawn").Barrier(args.tp) if args.tp > 1 else None
    Handler.ranks = start(args.tp, args.steps, args.slow, Handler.barrier)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
