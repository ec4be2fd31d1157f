"""The OpenAI-compatible answers, whole and in pieces."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from specmeter.eagle.server_jobs import Job, Piece

DONE = b"data: [DONE]\n\n"
ERROR_TYPES = {404: "not_found_error", 503: "overloaded_error", 500: "server_error"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The error object of the OpenAI API."""
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def usage(job: Job) -> dict[str, Any]:
    """The usage object; ``specmeter`` in it says what speculation did (positions as many as the request's steps)."""
    prompt, completion, counts = len(job.request.prompt_ids), len(job.token_ids), job.counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "specmeter": {
            "cycles": counts.cycles,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "accepted_per_position": counts.per_position,
        },
    }


class Answer:
    """Makes the answer of one job: one document, or the events of a stream."""

    def __init__(self, job: Job, model: str) -> None:
        self._job = job
        self._chat = job.request.chat
        kind = ("chat.completion" if self._chat else "text_completion") + (
            ".chunk" if self._chat and job.request.stream else ""
        )
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        # The same for every event of the stream, so that an event costs little.
        self._prefix = json.dumps(self._head)[:-1].encode()

    def whole(self, piece_text: str, finish: str) -> dict[str, Any]:
        """The document of a request that is not streamed."""
        said = {"message": {"role": "assistant", "content": piece_text}} if self._chat else {"text": piece_text}
        choice: dict[str, Any] = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        if self._job.request.return_token_ids:
            choice["token_ids"] = self._job.token_ids
        return {**self._head, "choices": [choice], "usage": usage(self._job)}

    def opening(self) -> bytes:
        """The event before the first text: a chat names its role, a completion has none."""
        return self._event([self._choice({"role": "assistant", "content": ""})]) if self._chat else b""

    def event(self, piece: Piece) -> bytes:
        """The event for a piece of text, b"" if there is nothing to say."""
        ids = piece.token_ids if self._job.request.return_token_ids else ()
        if not piece.text and piece.finish is None and not ids:
            return b""
        choice = self._choice({"content": piece.text} if self._chat else piece.text, piece.finish)
        if ids:
            choice["token_ids"] = ids
        return self._event([choice])

    def closing(self) -> bytes:
        """The last events: usage if it was asked for, and the end mark."""
        if not self._job.request.include_usage:
            return DONE
        return self._event([], usage(self._job)) + DONE

    def _choice(self, said: object, finish: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta" if self._chat else "text": said, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: Sequence[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        tail: dict[str, Any] = {"choices": choices} if used is None else {"choices": choices, "usage": used}
        return b"data: " + self._prefix + b", " + json.dumps(tail)[1:].encode() + b"\n\n"


def stream_error(message: str) -> bytes:
    """The event that ends a stream on an error."""
    return b"data: " + json.dumps(error_body(500, message)).encode() + b"\n\n" + DONE
