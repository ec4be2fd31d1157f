"""Whether greedy answers of several settings are one and the same, and whether a difference begins at a near-tie.

Plain and speculative decoding run matrix products of other shapes. In bfloat16 their logits differ in the last bits, so
that where two tokens are as good as equally likely either may win. A server that tells log probabilities shows whether
that is so where two answers part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from specmeter.bench.client import Outcome
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Session
from specmeter.trace.strict_json import parse_json

# Log probabilities so near are a near-tie: two units in the last place of a bfloat16 logit from 16 to 32.
NEAR = 0.25
MOST_ASKED = 3
MOST_SHOWN = 10
_LIKELIEST = 5
_MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Tie:
    """The two tokens at which two answers part, ``gap_nats`` apart in log probability."""

    ours: str
    theirs: str
    gap_nats: float

    def as_json(self) -> dict[str, Any]:
        """For the report; ``near_tie``: within NEAR."""
        return {"tokens": [self.ours, self.theirs], "gap_nats": self.gap_nats, "near_tie": self.gap_nats <= NEAR}


Named = Sequence[tuple[str, Outcome]]
Ties = Mapping[tuple[str, str], Tie]


def output_equality(outcomes: Named, reference: str, temperature: float, ties: Ties | None = None) -> dict[str, Any]:
    """Whether greedy answers equal the reference's: per arm how many prompts, and the first place that differs.

    ``ties`` by arm and prompt are what a server said of that place; ``steady`` counts prompts whose own repeats all
    agree, which says how much of a difference chance explains.
    """
    if temperature > 0:
        return {"checked": False, "reason": "answers are sampled, so they may differ"}
    texts = _texts(outcomes)
    ours = texts.get(reference, {})
    rows = []
    for name, by_prompt in texts.items():
        pairs = [(prompt, found[0], ours[prompt][0]) for prompt, found in by_prompt.items() if prompt in ours]
        unequal = [
            {"prompt": p, "first_difference_chars": first_difference(a, b), **_told((ties or {}).get((name, p)))}
            for p, a, b in pairs
            if a != b
        ]
        steady = sum(1 for found in by_prompt.values() if len(set(found)) == 1)
        row = {"arm": name, "compared": len(pairs), "equal": len(pairs) - len(unequal), "steady": steady}
        rows.append({**row, "unequal": unequal[:MOST_SHOWN]})
    return {"checked": True, "reason": "", "near_tie_nats": NEAR, "arms": rows}


def _told(tie: Tie | None) -> dict[str, Any]:
    return tie.as_json() if tie is not None else {"tokens": None, "gap_nats": None, "near_tie": None}


def _texts(outcomes: Named) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for name, outcome in outcomes:
        found.setdefault(name, {}).setdefault(outcome.call.prompt.prompt_id, []).append(outcome.text)
    return found


def first_difference(a: str, b: str) -> int:
    """Characters that two texts have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ask_about_ties(
    running: Session, outcomes: Named, reference: str, sending: Sending, ties: MutableMapping[tuple[str, str], Tie]
) -> None:
    """Have the server decode up to MOST_ASKED unequal prompts of each arm again, with log probabilities, into ``ties``.

    Any server of the comparison will do: up to where two answers part all of them wrote the same. One that tells no log
    probabilities, or fails here, leaves the difference unexplained and nothing else changed.
    """
    texts, prompts = _texts(outcomes), {outcome.call.prompt.prompt_id: outcome.call.prompt for _, outcome in outcomes}
    for name, by_prompt in texts.items():
        unequal = [p for p, found in by_prompt.items() if found[0] != texts.get(reference, {}).get(p, found)[0]]
        for prompt in unequal[:MOST_ASKED]:
            if (name, prompt) in ties:
                continue
            with contextlib.suppress(httpx.HTTPError, ValueError):
                said = _decoded(running, prompts[prompt], sending)
                tie = tie_at(said, by_prompt[prompt][0], texts[reference][prompt][0])
                if tie is None:
                    break  # it wrote something else this time, or tells too little: more would only take its time
                ties[name, prompt] = tie


def _decoded(running: Session, prompt: Prompt, sending: Sending) -> Any:
    """The server's answer, whole, with the likeliest tokens of every place. Raises HTTPError or ValueError."""
    body = {
        "model": running.model,
        "messages": prompt.as_messages(),
        "max_tokens": sending.max_tokens,
        "temperature": 0.0,
        "seed": sending.seed,
        "ignore_eos": sending.ignore_eos,
        "logprobs": True,
        "top_logprobs": _LIKELIEST,
    }
    with httpx.Client(base_url=running.server.url, trust_env=False, timeout=300.0) as client:
        answer = client.post("/v1/chat/completions", json=body, headers=dict(running.server.headers))
    if answer.status_code != 200 or len(answer.content) > _MOST_BYTES:
        raise ValueError("no answer")
    return parse_json(answer.content)


def tie_at(said: object, ours: str, theirs: str) -> Tie | None:
    """What an answer with log probabilities says of the place where two texts part; None where it does not tell.

    The answer has to agree with both up to there. A text's token there is the longest of the likeliest ones that it
    goes on with.
    """
    place, written = first_difference(ours, theirs), ""
    for token, likeliest in _places(said):
        if len(written) + len(token) <= place:
            written += token
            continue
        if ours[: len(written)] != written:
            return None
        mine, other = (_goes_on(text[len(written) :], likeliest) for text in (ours, theirs))
        if mine is None or other is None or mine == other:
            return None
        return Tie(mine, other, abs(likeliest[mine] - likeliest[other]))
    return None


def _goes_on(text: str, likeliest: Mapping[str, float]) -> str | None:
    return max((token for token in likeliest if token and text.startswith(token)), key=len, default=None)


def _places(said: object) -> list[tuple[str, dict[str, float]]]:
    """The tokens of an answer, each with the log probabilities of the likeliest there. Raises ValueError."""
    try:
        content = said["choices"][0]["logprobs"]["content"]  # type: ignore[index]
        return [
            (
                str(entry["token"]),
                {str(top["token"]): float(top["logprob"]) for top in [*entry["top_logprobs"], entry]},
            )
            for entry in content
        ]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError("the answer has no log probabilities") from error
