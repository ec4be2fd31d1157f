"""The load of the GPU scripts: greedy streamed requests to SGLang's ``/generate``, token ids kept.

Started with ``--incremental-streaming-output`` the server sends each event's new ids alone. Prompts are text, or token
ids where the server was started without a tokenizer. A URL that ends in ``/v1/completions`` is asked in OpenAI's words
instead, with vLLM's ``return_token_ids``. A stream counts only with its ``[DONE]``: without it the server was cut off.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from questions import PROMPTS

from specmeter.trace import Request

Prompt = str | tuple[int, ...]
REQUEST_TIMEOUT_S = 120.0
OPENAI, DONE = "/v1/completions", "data: [DONE]"

QUESTIONS = (
    *PROMPTS,
    "Translate into French: The train leaves at nine in the morning.",
    "Give two reasons why the sky is blue and one why sunsets are red.",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# SmolLM2's chat template, written out: /generate applies none.
CHATS: tuple[Prompt, ...] = tuple(
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n"
    for q in QUESTIONS
)


def id_prompts(vocab: int, count: int = 8, length: int = 64) -> tuple[Prompt, ...]:
    """Prompts of ids for a model without a tokenizer, all different; ids below 16 are left to control tokens."""
    return tuple(
        tuple(16 + (7919 * (n + 1) * (i + 3) + 31 * n) % (vocab - 16) for i in range(length)) for n in range(count)
    )


@dataclass(frozen=True)
class Load:
    """``rounds`` times over the first ``prompts`` of the script's prompts, ``at_once`` in flight."""

    rounds: int
    tokens: int = 192
    at_once: int = 1
    prompts: int = 6


@dataclass(frozen=True)
class Answer:
    """A request's times and its output ids; ``cycles``: verify steps that the server counted, None if it does not.

    ``at``: when each event with new ids came, perf_counter_ns.
    """

    request: Request
    ids: tuple[int, ...]
    cycles: int | None
    at: tuple[int, ...] = ()


@dataclass
class Answers:
    """What a load brought, in order of sending."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        return [answer.request for answer in self.answers]

    def by_prompt(self) -> dict[str, tuple[int, ...]]:
        """The first answer to each prompt."""
        found: dict[str, tuple[int, ...]] = {}
        for answer in self.answers:
            found.setdefault(answer.request.prompt_id, answer.ids)
        return found

    def summary(self) -> dict[str, Any]:
        """Requests, failures, median decode rate of a request, tokens a cycle as the server counts them."""
        good = [answer for answer in self.answers if not answer.request.error]
        rates = sorted(rate for answer in good if (rate := answer.request.decode_rate))
        told = [answer for answer in good if answer.cycles]
        gained = sum(len(answer.ids) - 1 for answer in told)
        cycles = sum(answer.cycles or 0 for answer in told)
        return {
            "requests": len(good),
            "errors": sorted({answer.request.error for answer in self.answers if answer.request.error}),
            "decode_tok_s_median": rates[len(rates) // 2] if rates else None,
            "decode_tok_s": [round(rate, 1) for rate in rates],
            "server_tokens_a_cycle": gained / cycles if cycles else None,
            "distinct_ids": len({id for answer in good for id in answer.ids}),
            "ids": sum(len(answer.ids) for answer in good),
        }


def drive(url: str, prompts: Sequence[Prompt], load: Load, name: str, setting: str, start: int = 0) -> Answers:
    """Run a load, ``load.at_once`` threads taking the next prompt each; block numbers are the rounds."""
    jobs = [(round_, index) for round_ in range(load.rounds) for index in range(min(load.prompts, len(prompts)))]
    found: list[Answer | None] = [None] * len(jobs)
    lock, left = threading.Lock(), iter(range(len(jobs)))

    def worker() -> None:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            while (job := _next(lock, left)) is not None:
                round_, index = jobs[job]
                label = (f"{name}-{round_}-{index}", f"p{index}", setting, round_, start)
                found[job] = ask(client, url, prompts[index], load.tokens, label)

    threads = [threading.Thread(target=worker) for _ in range(load.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Answers([answer for answer in found if answer is not None])


def _next(lock: threading.Lock, left: Any) -> int | None:
    with lock:
        return next(left, None)


def request_of(url: str, prompt: Prompt, tokens: int) -> tuple[str, dict[str, Any]]:
    """Where to send a greedy streamed request, and its body."""
    if url.endswith(OPENAI):
        said = prompt if isinstance(prompt, str) else list(prompt)
        body = {"prompt": said, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return url, {**body, "return_token_ids": True, "stream_options": {"include_usage": True}}
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    text = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return f"{url}/generate", {**text, "sampling_params": sampling, "stream": True}


def event_of(event: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """The new ids of an event of either kind, and what it says of the request."""
    ids = list(event.get("output_ids") or [])
    for choice in event.get("choices") or []:
        ids += choice.get("token_ids") or []
    return ids, event.get("meta_info") or event.get("usage") or {}


def ask(client: httpx.Client, url: str, prompt: Prompt, tokens: int, label: tuple[str, str, str, int, int]) -> Answer:
    """One greedy request. A failure is told in ``request.error``."""
    path, body = request_of(url, prompt, tokens)
    send, error, done = time.perf_counter_ns(), "", False
    ids: list[int] = []
    at: list[int] = []
    meta: dict[str, Any] = {}
    try:
        with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                done = done or line == DONE
                if not line.startswith("data: ") or line == DONE:
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"])[:200])
                new, told = event_of(event)
                if new:
                    at.append(time.perf_counter_ns())
                ids += new
                meta = told or meta
        if not done:
            raise ValueError(f"the stream ended after {len(ids)} ids without [DONE]")
    except (httpx.HTTPError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    end = time.perf_counter_ns()
    name, prompt_id, setting, block, start = label
    counted = int(meta.get("prompt_tokens") or 0)
    request = Request(name, prompt_id, setting, block, send, at[0] if at else end, end, counted, len(ids), error, start)
    cycles = meta.get("spec_verify_ct")
    return Answer(request, tuple(ids), int(cycles) if cycles else None, tuple(at))
