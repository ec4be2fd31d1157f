"""Bodies of the OpenAI-compatible requests, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from specmeter.eagle.settings import Sampling, SpecSettings
from specmeter.eagle.tokenizer import Tokenizer
from specmeter.errors import SpecmeterError

T = TypeVar("T")
MAX_STOPS = 16
SPEC_FIELDS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_draft_p_min",
)
# Fields that change the answer and that this engine does not have, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}


class ApiError(Exception):
    """A request that is refused: HTTP status, the reason, and the field that is at fault, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


@dataclass(frozen=True)
class Limits:
    """What the server can take: its model's name, context and vocabulary in tokens, and the default speculation."""

    model: str
    max_context: int
    vocab_size: int
    spec: SpecSettings
    has_draft: bool


@dataclass(frozen=True)
class Request:
    """A checked request. ``chat`` is which of the two answers' shapes it gets."""

    chat: bool
    prompt_ids: list[int]
    sampling: Sampling
    spec: SpecSettings
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    skip_special_tokens: bool
    return_token_ids: bool


def parse_request(body: object, chat: bool, tokenizer: Tokenizer, limits: Limits) -> Request:
    """The request in a JSON body; ApiError (400 or 404) with the reason and the field if it cannot be served."""
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.")
    _check_supported(body, limits)
    prompt = _chat_ids(body, tokenizer) if chat else _prompt_ids(body.get("prompt"), tokenizer)
    _check_prompt(prompt, limits, "messages" if chat else "prompt")
    stream = _get(body, "stream", bool, False)
    options = _get(body, "stream_options", dict, {})
    if options and not stream:
        raise ApiError(400, "stream_options needs stream = true.", "stream_options")
    return Request(
        chat=chat,
        prompt_ids=prompt,
        sampling=_sampling(body, chat, limits.max_context - len(prompt), tokenizer),
        spec=_spec(body, limits),
        stop=_stops(body.get("stop")),
        stream=stream,
        include_usage=_get(options, "include_usage", bool, False),
        skip_special_tokens=_get(body, "skip_special_tokens", bool, True),
        return_token_ids=_get(body, "return_token_ids", bool, False),
    )


def _check_supported(body: Mapping[str, Any], limits: Limits) -> None:
    model = body.get("model")
    if model is not None and model != limits.model:
        raise ApiError(404, f"There is no model {model!r} here; this server has {limits.model!r}.", "model")
    for name, harmless in UNSUPPORTED.items():
        if name in body and body[name] not in harmless:
            raise ApiError(400, f"{name} is not supported by this server.", name)


def _get(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field of one JSON type, or ``default`` if it is absent or null. An int passes as a float, a bool as neither."""
    value = body.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return kind(value)  # type: ignore[call-arg]
        except OverflowError:
            raise ApiError(400, f"{name} is beyond every floating point number.", name) from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ApiError(400, f"{name} must be of type {_JSON_NAMES[kind]}.", name)
    return value


_JSON_NAMES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}


def _chat_ids(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message.", "messages")
    plain = [_message(message, place) for place, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(plain, _get(body, "add_generation_prompt", bool, True))
    except SpecmeterError as error:
        raise ApiError(400, f"{error.what} {error.why}".strip(), "messages") from error
    return tokenizer.encode(text, add_special_tokens=False)


def _message(message: object, place: int) -> dict[str, str]:
    field = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{field} must be an object with a role.", field)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(parts) != len(content):
            raise ApiError(400, f"{field}.content may hold text parts only.", field)
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise ApiError(400, f"{field}.content must be a string.", field)
    role = message["role"]
    return {"role": _encodable(role, f"{field}.role"), "content": _encodable(content, f"{field}.content")}


def _encodable(text: str, field: str) -> str:
    """``text``, or ApiError 400: JSON can spell half of a surrogate pair, which is no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ApiError(400, f"{field} holds {half}, half of a surrogate pair, which is no text.", field) from None
    return text


def _prompt_ids(prompt: object, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(_encodable(prompt, "prompt"))
    if isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return list(prompt)
    raise ApiError(400, "prompt must be one string or one list of token ids.", "prompt")


def _check_prompt(prompt: Sequence[int], limits: Limits, field: str) -> None:
    if not prompt:
        raise ApiError(400, "The prompt is empty.", field)
    if len(prompt) >= limits.max_context:
        raise ApiError(
            400, f"The prompt has {len(prompt)} tokens; the context holds {limits.max_context} with the answer.", field
        )
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise ApiError(400, f"The prompt has a token id outside 0 to {limits.vocab_size - 1}.", field)


def _sampling(body: Mapping[str, Any], chat: bool, room: int, tokenizer: Tokenizer) -> Sampling:
    newer = _get(body, "max_completion_tokens", int, 0) if chat else 0
    wanted = newer or _get(body, "max_tokens", int, room if chat else min(16, room))
    if wanted > room:
        raise ApiError(400, f"max_tokens is {wanted}, but the prompt leaves room for {room} tokens.", "max_tokens")
    extra = body.get("stop_token_ids") or []
    if not isinstance(extra, list) or not all(isinstance(i, int) for i in extra):
        raise ApiError(400, "stop_token_ids must be a list of token ids.", "stop_token_ids")
    try:
        return Sampling(
            temperature=_get(body, "temperature", float, 1.0),
            top_p=_get(body, "top_p", float, 1.0),
            seed=_get(body, "seed", int, 0) if body.get("seed") is not None else None,
            max_tokens=wanted,
            stop_ids=(*tokenizer.stop_ids, *extra),
            ignore_eos=_get(body, "ignore_eos", bool, False),
        )
    except SpecmeterError as error:
        raise _from_setting(error) from error


def _spec(body: Mapping[str, Any], limits: Limits) -> SpecSettings:
    if all(body.get(name) is None for name in SPEC_FIELDS):
        return limits.spec
    steps = _get(body, "speculative_num_steps", int, limits.spec.speculative_num_steps)
    topk = _get(body, "speculative_eagle_topk", int, 1)
    tokens = body.get("speculative_num_draft_tokens")
    p_min = _get(body, "speculative_draft_p_min", float, limits.spec.speculative_draft_p_min)
    try:
        spec = SpecSettings(steps, topk, tokens, p_min)
    except SpecmeterError as error:
        raise _from_setting(error) from error
    if spec.speculative_num_steps and not limits.has_draft:
        raise ApiError(400, "This server has no draft head: it can do 0 steps only.", "speculative_num_steps")
    return spec


def _from_setting(error: SpecmeterError) -> ApiError:
    return ApiError(400, f"{error.what} {error.why}".strip(), error.what.split(" ", 1)[0])


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"stop must be a string or a list of at most {MAX_STOPS} strings, none empty.", "stop")
    return tuple(_encodable(stop, "stop") for stop in stops)
