"""One streamed request to an OpenAI-compatible server or SGLang's ``/generate``, timed as it comes in."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from specmeter.bench.prompts import Prompt
from specmeter.bench.usage import StreamError, Usage, checked_text, error_message, refusal, usage_of
from specmeter.trace.masking import mask_text

Api = Literal["chat", "completions", "generate"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/generate"}
READ_TIMEOUT_S = 300.0
MAX_EVENT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Call:
    """A request to send. ``body`` carries the engine's own fields, ``setting`` and ``block`` only label the result.

    ``headers`` go with it and may hold a key, so they are never printed.
    """

    request_id: str
    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    setting: str = ""
    block: int = 0
    body: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Outcome:
    """What came back for a call, on this machine's ``perf_counter_ns``.

    ``arrivals_ns`` holds the arrival of the first piece with text and of each piece after it, with text or without
    (special tokens have none); ``finish_ns`` is the arrival of the event that says why the answer ended, 0 without one.
    ``output_tokens`` is the server's count. ``error`` is empty if the answer is whole. ``accepted_per_position`` and
    ``cycles`` are the server's own words on this request.
    """

    call: Call
    send_ns: int
    end_ns: int
    arrivals_ns: tuple[int, ...] = ()
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    cycles: int | None = None
    accepted: int | None = None
    accepted_per_position: tuple[int, ...] = ()
    error: str = ""
    finish_ns: int = 0

    @property
    def first_ns(self) -> int:
        """Arrival of the first token; the end of the request if none came."""
        return self.arrivals_ns[0] if self.arrivals_ns else self.end_ns

    @property
    def last_ns(self) -> int:
        """Arrival of the last token: an answer may end in tokens without text, which only its finish tells of.

        Where all of it came at once, a finish just behind it says nothing of the time that its tokens took.
        """
        last = self.arrivals_ns[-1] if self.arrivals_ns else self.end_ns
        return max(last, self.finish_ns) if last > self.first_ns else last

    @property
    def token_ms(self) -> float | None:
        """Time per output token after the first, in ms; None for answers of one token."""
        if self.error or self.output_tokens < 2 or self.last_ns <= self.first_ns:
            return None
        return (self.last_ns - self.first_ns) / (self.output_tokens - 1) / 1e6


class Client:
    """Sends calls to one server. Use ``async with``; connections are kept alive between calls."""

    def __init__(self, base_url: str, model: str, api: Api = "chat", connections: int = 64) -> None:
        self.model = model
        self.api: Api = api
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=10.0, pool=None)
        self._http = httpx.AsyncClient(base_url=base_url, limits=limits, timeout=timeout, trust_env=False)

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def send(self, call: Call) -> Outcome:
        """Send one call and read its stream to the end; a failure is told in ``Outcome.error``, never raised."""
        answer = _Answer()
        began = time.perf_counter_ns()
        problem = ""
        try:
            body = request_body(call, self.model, self.api)
            async with self._http.stream("POST", PATHS[self.api], json=body, headers=call.headers) as response:
                if response.status_code != 200:
                    raise StreamError(refusal(response.status_code, await response.aread()))
                async for now, event in _events(response):
                    answer.take(now, event, self.api)
                answer.check_whole(self.api)
        except StreamError as error:
            problem = str(error)
        except httpx.HTTPError as error:
            problem = f"the connection failed: {type(error).__name__} {error}".rstrip()
        ended = time.perf_counter_ns()
        # A server may repeat the key that it refuses.
        keys = [value.partition(" ")[2] for value in call.headers.values()]
        return answer.outcome(call, began, ended, mask_text(problem, [key for key in keys if key]))


def request_body(call: Call, model: str, api: Api) -> dict[str, object]:
    """What is posted for a call."""
    if api == "generate":
        sampling = {
            "max_new_tokens": call.max_tokens,
            "temperature": call.temperature,
            "ignore_eos": call.ignore_eos,
        }
        if call.temperature > 0:  # a greedy answer has no use for it, and SGLang before 0.5.3 refuses the field
            sampling["sampling_seed"] = call.seed
        return {"text": call.prompt.text, "sampling_params": sampling, "stream": True, **call.body}
    said: dict[str, object] = {"messages": call.prompt.as_messages()} if api == "chat" else {"prompt": call.prompt.text}
    return {
        "model": model,
        **said,
        "max_tokens": call.max_tokens,
        "temperature": call.temperature,
        "seed": call.seed,
        "ignore_eos": call.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        **call.body,
    }


@dataclass(frozen=True)
class Received:
    """What another machine's load generator got for a call, unread, on that machine's ``perf_counter_ns``.

    ``events`` are the server-sent events with their arrival; with a status other than 200 the body. ``problem`` says
    what went wrong before the end, empty if nothing did.
    """

    send_ns: int
    end_ns: int
    status: int
    problem: str
    events: tuple[tuple[int, bytes], ...]


def read_received(call: Call, received: Received, api: Api) -> Outcome:
    """The outcome of what was received, judged as ``Client.send`` does."""
    answer = _Answer()
    problem = received.problem
    try:
        if received.status not in (0, 200):
            raise StreamError(refusal(received.status, b"".join(body for _, body in received.events)))
        for now, event in received.events:
            data = _data_of(event)
            if data:
                answer.take(now, data, api)
        if not problem:
            answer.check_whole(api)
    except StreamError as error:
        problem = str(error)
    return answer.outcome(call, received.send_ns, received.end_ns, problem)


class _Answer:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self.arrivals: list[int] = []
        self.finish_ns = 0
        self.texts: list[str] = []
        self.usage: Usage | None = None
        self.done = False

    def take(self, now: int, event: bytes, api: Api) -> None:
        """Add one event that arrived at ``now``; raises StreamError if it is no part of such a stream."""
        if event == b"[DONE]":
            self.done = True
            return
        try:
            document = json.loads(event)
        except (ValueError, RecursionError):
            raise StreamError(f"the stream is malformed: {event[:80]!r} is not JSON") from None
        if not isinstance(document, dict):
            raise StreamError(f"the stream is malformed: {event[:80]!r} is not an object")
        try:
            if "error" in document:
                raise StreamError(f"the server reports: {error_message(document)}")
            self._take_generate(now, document) if api == "generate" else self._take_openai(now, document)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise StreamError(f"the stream is malformed: {event[:80]!r} has not the expected fields") from None

    def _take_openai(self, now: int, document: Mapping[str, Any]) -> None:
        if document.get("usage"):
            self.usage = usage_of(document["usage"])
        for choice in document["choices"]:
            delta = choice.get("delta") or {}
            piece = (
                choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            )
            finish = choice.get("finish_reason")
            if finish:
                self.finish_ns = now
            if piece:
                self.texts.append(checked_text(piece))
            # A piece without text is a token that has none, or several; before the first text it is the opening role,
            # and with the finish it may be no token at all.
            if piece or (self.arrivals and not finish):
                self.arrivals.append(now)

    def _take_generate(self, now: int, document: Mapping[str, Any]) -> None:
        meta = document["meta_info"]
        self.texts = [checked_text(document["text"])]  # each event repeats the whole text so far
        usage = {
            "prompt_tokens": meta.get("prompt_tokens", 0),
            "completion_tokens": meta["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": meta.get("cached_tokens")},
            "specmeter": {"cycles": meta["spec_verify_ct"]} if meta.get("spec_verify_ct") else {},
        }
        self.usage = usage_of(usage)
        if meta["completion_tokens"]:
            self.arrivals.append(now)

    def check_whole(self, api: Api) -> None:
        """Raise StreamError if the stream ended before its end mark, or without the server's token count."""
        if not self.done:
            raise StreamError("the stream ended before its end mark [DONE]")
        if self.usage is None or self.usage.output is None:
            raise StreamError("the server does not report usage in the stream, so its tokens cannot be counted")

    def outcome(self, call: Call, began: int, ended: int, problem: str) -> Outcome:
        """The result, with what the server said about tokens and speculation."""
        usage = self.usage or Usage()
        return Outcome(
            call=call,
            send_ns=began,
            end_ns=ended,
            arrivals_ns=tuple(self.arrivals),
            text="".join(self.texts),
            prompt_tokens=usage.prompt or 0,
            cached_tokens=usage.cached,
            output_tokens=usage.output or 0,
            cycles=usage.cycles,
            accepted=usage.accepted,
            accepted_per_position=usage.per_position,
            error=problem,
            finish_ns=self.finish_ns,
        )


async def _events(response: httpx.Response) -> AsyncIterator[tuple[int, bytes]]:
    """The data of each server-sent event with the time its last byte arrived (WHATWG HTML, section 9.2)."""
    buffer = b""
    async for chunk in response.aiter_bytes():
        now = time.perf_counter_ns()
        buffer += chunk
        if b"\r" in buffer:  # in all of it: a line's end may be split between two chunks
            buffer = buffer.replace(b"\r\n", b"\n")
        if len(buffer) > MAX_EVENT_BYTES:
            raise StreamError("the stream is malformed: an event has no end")
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            data = _data_of(event)
            if data:
                yield now, data
    if buffer.strip():
        raise StreamError(f"the stream ended within an event: {buffer.strip()[:80]!r}")


def _data_of(event: bytes) -> bytes:
    """The data lines of one event, joined; empty for a comment. Raises StreamError for what is no event."""
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    if not data and event.strip() and not event.lstrip().startswith((b":", b"event:", b"id:", b"retry:")):
        raise StreamError(f"the stream is malformed: {event.strip()[:80]!r} is no event")
    return data
