"""Which request goes when: settings interleaved in seeded blocks, so that drift hits all of them alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specmeter.bench.client import Call
from specmeter.bench.prompts import Prompt
from specmeter.engines import Engine, Setting

WARM_UP = -1


@dataclass(frozen=True)
class Sending:
    """What all requests have in common."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True


def call(prompt: Prompt, setting: Setting | None, engine: Engine | None, how: Sending, block: int, tag: str) -> Call:
    """One request; ``setting`` None leaves the server's own (labelled ``server``)."""
    own = setting is not None and engine is not None and engine.can("per_request")
    label = "server" if setting is None else setting.label
    return Call(
        request_id=f"{tag}-{block}-{label}-{prompt.prompt_id}",
        prompt=prompt,
        max_tokens=how.max_tokens,
        temperature=how.temperature,
        # The same seed for a prompt under every setting: pairs differ by the setting only.
        seed=how.seed + max(block, 0),
        ignore_eos=how.ignore_eos,
        setting=label,
        block=block,
        body=engine.request_body(setting) if own and engine is not None and setting is not None else {},
    )


def with_unique_prefix(prompt: Prompt, seed: int, block: int, index: int) -> Prompt:
    """The prompt with a line of its own before its first message, the same for the same numbers.

    Nothing behind the line is found in a server's prefix cache, be it the same prompt in another block.
    """
    line = f"[{random.Random(f'{seed}-{block}-{index}').getrandbits(64):016x}]"
    (role, content), *others = prompt.messages
    return replace(prompt, messages=((role, f"{line}\n{content}"), *others))


def interleaved(
    prompts: Sequence[Prompt], settings: Sequence[Setting | None], engine: Engine | None, how: Sending, tag: str = "r"
) -> list[Call]:
    """A block a prompt; every block holds each setting once, in an order drawn by the seed."""
    rng = random.Random(how.seed)
    calls: list[Call] = []
    for block, prompt in enumerate(prompts):
        order = list(settings)
        rng.shuffle(order)
        calls.extend(call(prompt, setting, engine, how, block, tag) for setting in order)
    return calls


def warm_up(prompt: Prompt, settings: Sequence[Setting | None], engine: Engine | None, how: Sending) -> list[Call]:
    """One request for each setting, never counted: first runs pay for caches, packing and allocation."""
    short = Sending(min(how.max_tokens, 32), how.temperature, how.seed, how.ignore_eos)
    return [call(prompt, setting, engine, short, WARM_UP, "warm") for setting in settings]
