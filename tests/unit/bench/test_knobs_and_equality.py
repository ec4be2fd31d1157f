"""Knobs that a server does not run with are told; answers that part at a near-tie are shown as such."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specmeter.bench.arms import CompareArm, arms_from_words
from specmeter.bench.client import Call, Outcome
from specmeter.bench.comparing import Gathered, _look_at_knobs, warnings_of
from specmeter.bench.equality import NEAR, Tie, ask_about_ties, output_equality, tie_at
from specmeter.bench.knobs import knobs_of, not_held
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Session
from specmeter.engines import Server
from specmeter.reporters.terminal import render_analysis
from tests.unit.bench.test_arms import SGLANG, VLLM

PROMPT = Prompt("p", "chat", (("user", "hello"),))


def held(arm: CompareArm, resolved: dict[str, str]) -> dict[str, bool | None]:
    return {knob.knob: knob.holds for knob in knobs_of(arm, resolved)}


def sglang(words: str) -> CompareArm:
    return arms_from_words([words, "x:server"], SGLANG)[0]


def test_a_variable_that_the_engine_rewrites_is_told_even_where_all_arms_have_the_same() -> None:
    arm = sglang("fast:k=2,NCCL_ALGO=Tree,NCCL_NVLS_ENABLE=0,NCCL_PROTO=LL")
    resolved = {"env.NCCL_ALGO": "Ring", "env.NCCL_NVLS_ENABLE": "0", "env.NCCL_PROTO": "(not set)"}
    assert held(arm, resolved) == {"NCCL_ALGO": False, "NCCL_NVLS_ENABLE": True, "NCCL_PROTO": False}
    rows = [{"arm": arm.name, **knob.as_json()} for knob in knobs_of(arm, resolved)]
    assert [line.split(" in ")[0] for line in not_held(rows)] == [
        "fast: NCCL_ALGO is Ring", "fast: NCCL_PROTO is (not set)"
    ]  # fmt: skip


def test_flags_against_what_the_engine_made_of_them() -> None:
    arm = sglang(
        "k=3,--attention-backend=fa3,--mem-fraction-static=0.80,--enable-mixed-chunk,--dtype=auto,--cuda-graph-bs=1 2 4"
    )
    resolved = {
        "speculative_num_steps": "3", "speculative_num_draft_tokens": "6", "attention_backend": "triton",
        "mem_fraction_static": "0.8", "enable_mixed_chunk": "False", "dtype": "torch.bfloat16", "model_path": "/m",
        "cuda_graph_bs": "[1, 2, 4]", "speculative_algorithm": "EAGLE3",
    }  # fmt: skip
    found = held(arm, resolved)
    assert found["--speculative-num-steps"] is True and found["--speculative-num-draft-tokens"] is False
    assert found["--attention-backend"] is False and found["--enable-mixed-chunk"] is False
    assert found["--mem-fraction-static"] is True and found["--cuda-graph-bs"] is True
    assert found["--dtype"] is None and "--model-path" in found
    assert "--speculative-draft-model-path" not in found, "the engine does not tell it"


@pytest.mark.parametrize(
    ("words", "told", "holds"),
    [
        ("k=2", "SpeculativeConfig(method='eagle3', num_spec_tokens=2)", True),
        ("k=2", "SpeculativeConfig(method='eagle3', num_spec_tokens=5)", False),
        ("baseline", "None", True),
        ("baseline", "SpeculativeConfig(method='eagle3', num_spec_tokens=5)", False),
    ],
)
def test_the_step_count_of_vllm_and_its_baseline(words: str, told: str, holds: bool) -> None:
    arm = arms_from_words([f"a:{words}", "x:server"], VLLM)[0]
    found = held(arm, {"speculative_config": told})
    assert found.pop("--speculative-config", None) is None, "a document is not compared word for word"
    assert list(found.values()) == [holds]


def test_secrets_are_masked_on_both_sides_and_say_nothing() -> None:
    arm = sglang("k=2,HF_TOKEN=hunter2secret,--api-key=hunter2secret")
    rows = [knob.as_json() for knob in knobs_of(arm, {"env.HF_TOKEN": "***", "api_key": "***"})]
    assert "hunter2secret" not in str(rows) and all(row["holds"] is None for row in rows)


def test_a_knob_that_failed_in_one_start_stays_told() -> None:
    gathered, arm = Gathered(), sglang("fast:k=2,NCCL_ALGO=Tree")
    for found in ("Tree", "Ring", "Tree"):
        _look_at_knobs(arm, {"env.NCCL_ALGO": found}, True, gathered)
    document = {"knobs": [{"arm": arm.name, **row} for row in gathered.knobs[arm.name]]}
    (warning,) = warnings_of(document)
    assert warning.startswith("fast: NCCL_ALGO is Ring in the server and not Tree")
    together = knobs_of(arm, {"env.NCCL_ALGO": "Tree", "speculative_num_steps": "5"}, command=False)
    assert [(knob.knob, knob.holds) for knob in together] == [("NCCL_ALGO", True)]


def outcome(text: str) -> Outcome:
    return Outcome(Call("r", PROMPT, 8), 0, 1, text=text)


def said(*places: dict[str, float]) -> dict[str, Any]:
    """An answer as OpenAI's API gives it: at each place the likeliest tokens, the first of which was written."""
    content = []
    for likeliest in places:
        token, logprob = next(iter(likeliest.items()))
        top = [{"token": name, "logprob": value} for name, value in likeliest.items()]
        content.append({"token": token, "logprob": logprob, "top_logprobs": top})
    return {"choices": [{"logprobs": {"content": content}}]}


def test_output_equality_finds_the_first_difference_and_shows_the_tie() -> None:
    outcomes = [("a", outcome("same x")), ("b", outcome("same y")), ("b", outcome("same y"))]
    found = output_equality(outcomes, "a", 0.0)
    row = next(row for row in found["arms"] if row["arm"] == "b")
    assert (row["compared"], row["equal"], row["steady"]) == (1, 0, 1)
    unknown = {"tokens": None, "gap_nats": None, "near_tie": None}
    assert row["unequal"] == [{"prompt": "p", "first_difference_chars": 5, **unknown}]
    ties = {("b", "p"): Tie("y", "x", 0.03)}
    near = output_equality(outcomes, "a", 0.0, ties)["arms"][1]["unequal"][0]
    assert near["near_tie"] is True and near["tokens"] == ["y", "x"]
    assert not output_equality([], "a", 0.7)["checked"]


def test_where_two_answers_part_the_tokens_and_their_gap() -> None:
    answer = said({"The": -0.1}, {" cat": -0.9, " car": -1.0, " c": -3.0, " dog": -4.0}, {" sat": -0.2})
    assert tie_at(answer, "The cat sat", "The car is") == Tie(" cat", " car", pytest.approx(0.1))
    assert tie_at(answer, "The car is", "The cat sat") == Tie(" car", " cat", pytest.approx(0.1))
    far = tie_at(answer, "The cat sat", "The dog is")
    assert far is not None and far.gap_nats > NEAR and far.as_json()["near_tie"] is False
    assert tie_at(answer, "The cat sat", "The bird is") is None, "not among the likeliest"
    assert tie_at(answer, "A cat sat", "A car is") is None, "this time it wrote something else"
    assert tie_at(answer, "The cat sat", "The cat sat on") is None


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"logprobs": None}]}, [], None, "x"])
def test_an_answer_without_log_probabilities_is_a_value_error(answer: object) -> None:
    with pytest.raises(ValueError, match="no log probabilities"):
        tie_at(answer, "ab", "ac")


def test_the_report_says_near_tie(compared: dict[str, Any]) -> None:
    row = {"arm": "k=2", "compared": 4, "equal": 3, "steady": 4}
    unequal = {"prompt": "p1", "first_difference_chars": 12, "tokens": [" a", " the"], "gap_nats": 0.06}
    for near, word in ((True, "a near-tie"), (False, "no near-tie")):
        output = {"checked": True, "reason": "", "arms": [{**row, "unequal": [{**unequal, "near_tie": near}]}]}
        text = " ".join(render_analysis({**compared, "output": output}).split())
        assert f"differs from character 12 on: ' a' and ' the' are 0.060 nats apart there, {word}" in text
    old = {key: value for key, value in unequal.items() if key in ("prompt", "first_difference_chars")}
    output = {"checked": True, "reason": "", "arms": [{**row, "unequal": [old]}]}
    assert "from character 12 on" in " ".join(render_analysis({**compared, "output": output}).split())


@pytest.fixture
def compared() -> dict[str, Any]:
    """A document of compare as analyse_compare makes it."""
    from specmeter.analysis.compare import ArmFacts, analyse_compare
    from specmeter.trace import Request

    requests = [
        Request(f"{arm}{start}{block}", "p", arm, block, 0, 1000, 1000 + 10**9, 5, 11 + start, "", start)
        for start, arm in enumerate(["baseline", "k=2"] * 3)
        for block in range(3)
    ]
    return analyse_compare([ArmFacts("baseline"), ArmFacts("k=2")], requests, 0.01)


def test_an_arm_without_a_command_is_looked_at_by_its_variables() -> None:
    arm = replace(sglang("a:k=2"), setting=None)
    assert knobs_of(replace(arm, spec=replace(arm.spec, command=(), env={})), {"attention_backend": "x"}) == []


@contextmanager
def answering(status: int, document: object) -> Iterator[tuple[Session, list[dict[str, Any]]]]:
    """A server that gives every request one answer, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield Session(Server(url), None, None, "m", Progress()), asked
        finally:
            server.shutdown()
            thread.join()


def test_a_server_is_asked_once_where_answers_part() -> None:
    outcomes = [("plain", outcome("The cat sat")), ("k=2", outcome("The car is")), ("k=3", outcome("The cat sat"))]
    ties: dict[tuple[str, str], Tie] = {}
    answer = said({"The": -0.1}, {" cat": -0.9, " car": -1.0}, {" sat": -0.2})
    with answering(200, answer) as (running, asked):
        for _ in range(2):
            ask_about_ties(running, outcomes, "plain", Sending(8), ties)
    assert ties == {("k=2", "p"): Tie(" car", " cat", pytest.approx(0.1))}
    (body,) = asked
    assert body["logprobs"] is True and body["max_tokens"] == 8 and body["messages"][0]["content"] == "hello"


@pytest.mark.parametrize(("status", "document"), [(400, {}), (200, {}), (200, {"choices": [{"logprobs": None}]})])
def test_a_server_without_log_probabilities_leaves_the_difference_unexplained(status: int, document: object) -> None:
    outcomes = [("plain", outcome("The cat")), ("k=2", outcome("The car"))]
    ties: dict[tuple[str, str], Tie] = {}
    with answering(status, document) as (running, asked):
        ask_about_ties(running, outcomes, "plain", Sending(8), ties)
    assert ties == {} and len(asked) == 1
    gone = Session(Server("http://127.0.0.1:9"), None, None, "m", Progress())
    ask_about_ties(gone, outcomes, "plain", Sending(8), ties)
    assert ties == {}


@pytest.mark.parametrize(("words", "holds"), [("half", True), ("float16", True), ("float", False), ("bfloat16", False)])
def test_torchs_second_names_are_the_same_type(words: str, holds: bool) -> None:
    assert held(sglang(f"a:k=3,--dtype={words}"), {"dtype": "torch.float16"})["--dtype"] is holds
