"""The HTTP side of the server: routes, bodies, streams, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specmeter.eagle.server_jobs import Dispatcher, Job, Piece, QueueFull, Stopping
from specmeter.eagle.server_metrics import render
from specmeter.eagle.server_requests import ApiError, Limits, Request, parse_request
from specmeter.eagle.server_responses import Answer, error_body, stream_error
from specmeter.eagle.tokenizer import Tokenizer

MAX_BODY_BYTES = 8 << 20
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True)
class Service:
    """What the routes work with. ``memory`` tells where the weights lie, for the line at the start."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    limits: Limits
    created: int
    memory: str = ""


def make_app(service: Service) -> Starlette:
    """The ASGI application."""

    async def models(request: HttpRequest) -> Response:
        limits = service.limits
        entry = {"id": limits.model, "object": "model", "created": service.created, "owned_by": "specmeter"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": limits.max_context}]})

    async def health(request: HttpRequest) -> Response:
        alive = service.dispatcher.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, status_code=200 if alive else 503)

    async def metrics(request: HttpRequest) -> Response:
        text = render(service.dispatcher.counts, service.dispatcher.running, service.dispatcher.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    routes = [
        Route("/v1/completions", _handler(service, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", _handler(service, chat=True), methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.status_code, error.detail), status_code=error.status_code)


def _handler(service: Service, chat: bool) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(request: HttpRequest) -> Response:
        try:
            parsed = parse_request(await _read_json(request), chat, service.tokenizer, service.limits)
            job = Job(parsed, asyncio.get_running_loop(), service.tokenizer)
            service.dispatcher.submit(job)
        except ApiError as error:
            return _refusal(service, error.status, error.message, error.param)
        except QueueFull:
            return _refusal(service, 503, "The queue is full: as many requests wait as this server lets.")
        except Stopping:
            return _refusal(service, 503, "The server is stopping.")
        return _Reply(service, job, parsed)

    return handle


async def _read_json(request: HttpRequest) -> object:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    except ClientDisconnect as error:
        raise ApiError(400, "The client left while sending.") from error
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON: {error}") from error


def _refusal(service: Service, status: int, message: str, param: str | None = None) -> Response:
    service.dispatcher.counts.finish("rejected")
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse(error_body(status, message, param), status_code=status, headers=headers)


class _Reply(Response):
    """The answer to a queued job, written as it comes; a client that leaves cancels the job."""

    def __init__(self, service: Service, job: Job, request: Request) -> None:
        self.status_code = 200
        self.background = None
        self._service = service
        self._job = job
        self._request = request
        self._answer = Answer(job, service.limits.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self._request.stream else self._whole(scope, receive, send))
        finally:
            leaving.cancel()
            self._job.cancelled = True

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.dispatcher.cancel(self._job)
        self._job.news.put_nowait(Piece("", error="The client left."))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        piece = await self._job.news.get()
        if piece.error is not None:
            status = 500 if self._service.dispatcher.alive else 503
            response = JSONResponse(error_body(status, piece.error), status_code=status)
        else:
            response = JSONResponse(self._answer.whole(piece.text, piece.finish or "stop"))
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        news, event = self._job.news, self._answer.event
        body = self._answer.opening()
        while True:
            piece = await news.get()
            body += event(piece) if piece.error is None else stream_error(piece.error)
            if piece.finish is not None or piece.error is not None:
                break
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
        if piece.error is None:
            body += self._answer.closing()
        await send({"type": "http.response.body", "body": body, "more_body": False})
