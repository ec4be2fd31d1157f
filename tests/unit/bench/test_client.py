"""The load generator against real sockets: sound streams, and every way a stream can be wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from specmeter.bench.acceptance import acceptance
from specmeter.bench.client import Api, Call, Outcome, request_body
from specmeter.bench.load import Load, arrivals, as_request, drive, lateness_ms, raise_failure, summarise
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.session import Session
from specmeter.engines import engine_named
from specmeter.engines.base import Counters, ServerSpec
from specmeter.engines.server import Server
from specmeter.errors import SpecmeterError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
PROMPT = Prompt("p1", "chat", (("user", "hello"),))
Script = Callable[[asyncio.StreamWriter, dict], object]


@contextmanager
def serving(script: Script, heads: list[str] | None = None) -> Iterator[str]:
    """A loopback HTTP server that reads one request and then does what ``script`` says; ``heads`` gets its headers."""
    loop = asyncio.new_event_loop()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head.decode().lower())
        length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        body = json.loads(await reader.readexactly(length))
        await script(writer, body)
        writer.close()

    async def main() -> None:
        await asyncio.start_server(handle, sock=listener)
        await asyncio.Event().wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(_quiet(main())), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    thread.join(60)
    listener.close()


async def _quiet(coroutine: object) -> None:
    try:
        await coroutine
    except asyncio.CancelledError:
        pass


def _event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _piece(text: object) -> bytes:
    return _event({"choices": [{"delta": {"content": text}}]})


USAGE = _event(
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5, "specmeter": {"cycles": 2, "accepted": 2}}}
)
DONE = b"data: [DONE]\n\n"


def _send(*parts: bytes, pause_s: float = 0.0) -> Script:
    async def script(writer: asyncio.StreamWriter, body: dict) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return script


def _one(script: Script, api: Api = "chat", **fields: object) -> Outcome:
    with serving(script) as url:
        return drive(url, "m", [Call("r1", PROMPT, 5, **fields)], Load(), api).outcomes[0]


def test_tokens_are_counted_by_usage_and_times_by_arrival() -> None:
    outcome = _one(_send(HEAD, _piece("a"), _piece("bcd"), _piece("e"), USAGE + DONE, pause_s=0.3))
    assert outcome.error == "" and outcome.text == "abcde"
    assert (outcome.output_tokens, outcome.prompt_tokens, outcome.cycles, outcome.accepted) == (5, 4, 2, 2)
    assert len(outcome.arrivals_ns) == 3
    assert 300 < (outcome.last_ns - outcome.first_ns) / 1e6 < 10_000, "two pauses, the first piece perhaps read late"
    assert outcome.token_ms == pytest.approx((outcome.last_ns - outcome.first_ns) / 4e6)
    assert as_request(outcome).decode_rate == pytest.approx(1000 / outcome.token_ms)


ROLE = _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
FINISH = _event({"choices": [{"delta": {}, "finish_reason": "length"}]})


@pytest.mark.parametrize("silent", [[_piece("")] * 4, [b": nothing for tokens without text\n\n"] * 4])
def test_tokens_without_text_at_the_end_take_their_time_too(silent: list[bytes]) -> None:
    parts = [ROLE, _piece("a"), _piece("b"), *silent, FINISH + USAGE + DONE]
    outcome = _one(_send(HEAD, *parts, pause_s=0.1))
    assert outcome.error == "" and outcome.text == "ab"
    # The text took one pause, all of the tokens six.
    assert (outcome.last_ns - outcome.first_ns) / 1e6 > 500
    assert as_request(outcome).end_ns == outcome.last_ns
    assert len(outcome.arrivals_ns) == (6 if silent[0] == _piece("") else 2), "neither the role nor the finish"


def test_a_finish_behind_the_only_piece_makes_no_rate() -> None:
    outcome = _one(_send(HEAD, ROLE, _piece("all of it"), FINISH, USAGE + DONE, pause_s=0.05))
    assert outcome.error == "" and outcome.token_ms is None and as_request(outcome).decode_rate is None


def test_events_cut_anywhere_and_carriage_returns() -> None:
    whole = (_piece("a") + b": comment\n\n" + _piece("b") + USAGE + DONE).replace(b"\n", b"\r\n")
    outcome = _one(_send(HEAD, *[whole[i : i + 7] for i in range(0, len(whole), 7)]))
    assert outcome.error == "" and outcome.text == "ab"


def test_a_line_end_cut_in_two_is_one_line_end() -> None:
    whole = (_piece("a") + _piece("b") + USAGE + DONE).replace(b"\n", b"\r\n")
    outcome = _one(_send(HEAD, *[whole[i : i + 1] for i in range(len(whole))], pause_s=0.001))
    assert outcome.error == "" and outcome.text == "ab"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((HEAD, b"data: {broken\n\n", DONE), "is not JSON"),
        ((HEAD, b"data: [1]\n\n", DONE), "is not an object"),
        ((HEAD, b"<html>oops</html>\n\n"), "is no event"),
        ((HEAD, b'data: {"choices": 3}\n\n', DONE), "expected fields"),
        ((HEAD, _piece("a")), "before its end mark"),
        ((HEAD, _piece("a"), b'data: {"cho'), "within an event"),
        ((HEAD, _piece("a"), DONE), "does not report usage"),
        ((HEAD, _event({"error": {"message": "out of cache"}}), DONE), "out of cache"),
        (
            (b"HTTP/1.1 404 Not Found\r\ncontent-length: 35\r\n\r\n" + b'{"error":{"message":"no model named"}'[:35],),
            "HTTP 404",
        ),
        ((b"",), "the connection failed"),
        ((b"HTTP/1.1 banana\r\n\r\n",), "the connection failed"),
    ],
)
def test_wrong_streams_are_told_in_words(parts: tuple[bytes, ...], reason: str) -> None:
    outcome = _one(_send(*parts))
    assert reason in outcome.error
    with pytest.raises(SpecmeterError) as caught:
        raise_failure([outcome])
    assert caught.value.exit == 4 and "p1" in caught.value.why


def _usage_of(**fields: object) -> bytes:
    return _event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5, **fields}})


DEEP = b'data: {"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (_event({"choices": [], "usage": "none"}), "usage is 'none', not an object"),
        (_usage_of(completion_tokens=-5), "completion_tokens is -5, not a count"),
        (_usage_of(completion_tokens=10**400), "completion_tokens is 1000000000000000000"),
        (_usage_of(completion_tokens=True), "completion_tokens is True, not a count"),
        (_usage_of(prompt_tokens="4"), "prompt_tokens is '4', not a count"),
        (_usage_of(prompt_tokens_details=3), "usage.prompt_tokens_details is 3, not an object"),
        (_usage_of(specmeter=[1]), "usage.specmeter is [1], not an object"),
        (_usage_of(specmeter={"accepted_per_position": "12"}), "accepted_per_position is '12', not a list"),
        (_usage_of(specmeter={"accepted_per_position": [1, -1]}), "accepted_per_position is -1, not a count"),
        (_piece(7), "a piece of text is 7, not text"),
        (DEEP, "is not JSON"),
    ],
)
def test_senseless_answers_fail_their_request(event: bytes, reason: str) -> None:
    with serving(_send(HEAD, _piece("a"), event, USAGE if event == _piece(7) else b"", DONE, pause_s=0.01)) as url:
        result = drive(url, "m", [Call("r1", PROMPT, 5)], Load())
    assert reason in result.outcomes[0].error
    summary = summarise(result)
    assert (summary["failed"], summary["output_tokens"], summary["total_tok_s"]) == (1, 0, 0.0)
    assert as_request(result.outcomes[0]).decode_rate is None


@pytest.mark.parametrize("path", ["/v1/models", "/get_server_info"])
def test_documents_too_deep_to_be_read_are_as_none(path: str) -> None:
    deep = httpx.MockTransport(lambda request: httpx.Response(200, text="[" * 100_000))
    with Server("http://127.0.0.1", engine_named("sglang"), transport=deep) as server:
        assert server.flags() == {} if path == "/get_server_info" else server.model_name() == "default"


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        outcome = drive(url, "m", [Call("r1", PROMPT, 5)], Load()).outcomes[0]
    assert "the connection failed" in outcome.error


def test_body_carries_settings_and_seed() -> None:
    seen: list[dict] = []

    async def script(writer: asyncio.StreamWriter, body: dict) -> None:
        seen.append(body)
        writer.write(HEAD + _piece("a") + USAGE + DONE)

    _one(script, seed=7, temperature=0.5, body={"speculative_num_steps": 3})
    assert seen[0]["seed"] == 7 and seen[0]["temperature"] == 0.5 and seen[0]["speculative_num_steps"] == 3
    assert seen[0]["stream_options"] == {"include_usage": True} and seen[0]["messages"][0]["content"] == "hello"


def test_a_key_is_sent_and_never_told() -> None:
    async def script(writer: asyncio.StreamWriter, body: dict) -> None:
        refusal = b'{"error": {"message": "no such key: k-123"}}'
        writer.write(b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n" % len(refusal) + refusal)

    outcome = _one(script, headers={"Authorization": "Bearer k-123"})
    assert outcome.error == "HTTP 401: no such key: ***" and "k-123" not in repr(outcome)
    seen: list[str] = []
    with serving(_send(HEAD + _piece("a") + USAGE + DONE), seen) as url, Server(url) as server:
        server.use_key(ServerSpec(None, url=url, env={"MY_KEY": "k-123"}, api_key_env="MY_KEY"))
        Session(server, None, None, "m", Progress(quiet=True)).drive("load", [Call("r1", PROMPT, 5)])
    assert "authorization: bearer k-123" in seen[0]


def test_sglang_generate_repeats_the_text() -> None:
    events = [
        _event({"text": t, "meta_info": {"prompt_tokens": 3, "completion_tokens": n}})
        for t, n in (("a", 1), ("abc", 3))
    ]
    outcome = _one(_send(HEAD, *events, DONE), api="generate")
    assert outcome.error == "" and outcome.text == "abc" and outcome.output_tokens == 3


def test_a_sampled_answer_of_sglang_has_its_seed() -> None:
    sampled = request_body(Call("r", PROMPT, 5, temperature=0.5, seed=7), "m", "generate")
    assert sampled["sampling_params"]["sampling_seed"] == 7
    assert "sampling_seed" not in request_body(Call("r", PROMPT, 5, seed=7), "m", "generate")["sampling_params"]


def test_failure_stops_the_load_unless_told_otherwise() -> None:
    calls = [Call(f"r{i}", PROMPT, 5) for i in range(6)]
    with serving(_send(HEAD, b"data: {broken\n\n")) as url:
        assert len(drive(url, "m", calls, Load()).outcomes) == 1
        assert len(drive(url, "m", calls, Load(stop_on_error=False)).outcomes) == 6


def test_concurrency_is_reached_and_not_passed() -> None:
    now, most = 0, 0

    async def script(writer: asyncio.StreamWriter, body: dict) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(500):  # until four are here, and a moment for a fifth
            await asyncio.sleep(0.02)
            if most == 4:
                break
        await asyncio.sleep(0.05)
        writer.write(HEAD + _piece("a") + USAGE + DONE)
        now -= 1

    with serving(script) as url:
        result = drive(url, "m", [Call(f"r{i}", PROMPT, 5) for i in range(12)], Load(concurrency=4))
    assert most == 4 and not any(outcome.error for outcome in result.outcomes)
    summary = summarise(result)
    assert summary["output_tokens"] == 60 and summary["requests"] == 12 and summary["failed"] == 0


def test_open_loop_keeps_its_seeded_schedule() -> None:
    calls = [Call(f"r{i}", PROMPT, 5) for i in range(20)]
    with serving(_send(HEAD + _piece("a") + USAGE + DONE)) as url:
        outcomes = drive(url, "m", calls, Load(rate=10.0, seed=5)).outcomes
    rng, due = random.Random(5), [0.0]
    for _ in calls[1:]:
        due.append(due[-1] + rng.expovariate(10.0))
    assert due[-1] > 1.2
    shifts = [outcome.send_ns / 1e9 - wanted for outcome, wanted in zip(outcomes, due, strict=True)]
    late = sorted(shift - min(shifts) for shift in shifts)
    # A busy machine holds some of them up, and none for good: sent all at once, half of them were 0.6 s off.
    assert late[len(late) // 2] < 0.4, late


def test_a_generator_that_falls_behind_says_so() -> None:
    load = Load(rate=10.0, seed=5)
    due = arrivals(4, 10.0, 5)
    sent = [int(1e9 * (1 + wanted + late)) for wanted, late in zip(due, (0.0, 0.0, 0.25, 0.5), strict=True)]
    outcomes = [Outcome(Call("r", PROMPT, 5), send_ns=at, end_ns=at) for at in sent]
    assert lateness_ms(outcomes, load) == pytest.approx([0, 0, 250, 500], abs=0.01)
    assert lateness_ms(outcomes, Load()) == []
    gaps = [b - a for a, b in itertools.pairwise(arrivals(4000, 8.0, 1))]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.05)
    # Exponential: the standard deviation is the mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)


def test_acceptance_by_position_kind_and_context() -> None:
    def answer(kind: str, prompt: int, cycles: int, accepted: int | None, tokens: int = 9) -> Outcome:
        call = Call("r", Prompt("p", kind, (("user", "x"),)), 9)
        return Outcome(call, 0, 1, (1,), "", prompt, None, tokens, cycles, accepted)

    outcomes = [answer("chat", 50, 10, 5), answer("code", 100, 10, 15), answer("code", 600, 20, 20)]
    found = acceptance(outcomes, Counters(cycles=40, accepted=40, per_position=(30, 10)))
    assert found["accept_length_tokens"] == 2.0 and found["accept_by_position"] == [0.75, 0.25]
    assert found["accept_by_kind"] == {"chat": 1.5, "code": pytest.approx(1 + 35 / 30)}
    assert found["accept_by_context"] == {"0-127": 2.0, "512-2047": 2.0}
    told_cycles = acceptance([answer("chat", 5, 4, None)], Counters())
    assert told_cycles["accept_length_tokens"] == 2.0 and told_cycles["accept_by_position"] == []
    assert acceptance([], Counters())["accept_length_tokens"] is None


@pytest.mark.parametrize("fields", [{"concurrency": 0}, {"rate": 0.0}, {"rate": -1.0}])
def test_loads_that_make_no_sense(fields: dict) -> None:
    with pytest.raises(SpecmeterError):
        Load(**fields)
