"""What may be tried: speculative settings, flags and variables, with their constraints and what is left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specmeter.bench.arms import CompareArm, configured
from specmeter.engines import ServerSpec, Setting
from specmeter.errors import SpecmeterError

MAX_LISTED = 100_000
Knobs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, order=True)
class Candidate:
    """One point: a speculative setting, flags (value ``on``: a switch) and environment variables, both sorted.

    A knob that is not named keeps what the user's command and environment say.
    """

    setting: Setting
    flags: Knobs = ()
    env: Knobs = ()

    @property
    def label(self) -> str:
        """How reports name it."""
        knobs = [name if value == "on" else f"{name}={value}" for name, value in (*self.flags, *self.env)]
        return ", ".join([self.setting.label, *knobs])

    @property
    def key(self) -> str:
        """The same for the same point in every run: JSON with sorted keys."""
        return json.dumps([self.setting.as_json(), dict(self.flags), dict(self.env)], sort_keys=True)

    def arm(self, spec: ServerSpec, name: str | None = None) -> CompareArm:
        """The server's command and environment with this point put in."""
        flags = [(flag, None if value == "on" else value) for flag, value in self.flags]
        return configured(name or self.label, spec, self.setting, flags, dict(self.env))


@dataclass(frozen=True)
class Dimension:
    """One knob that needs a start of its own: a flag (``--x``) or a variable, and its values; None leaves it alone."""

    name: str
    values: tuple[str | None, ...]

    @property
    def is_flag(self) -> bool:
        """A flag rather than a variable."""
        return self.name.startswith("--")


@dataclass(frozen=True)
class Space:
    """Settings x dimensions, less what ``forbidden`` names; ``skipped`` tells what was left out and why.

    A forbidden combination maps ``steps``, ``topk``, ``draft_tokens`` or a dimension's name to a value as text
    (``default``: left alone).
    """

    settings: tuple[Setting, ...]
    dimensions: tuple[Dimension, ...] = ()
    forbidden: tuple[Mapping[str, str], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    source: str = ""

    @property
    def size(self) -> int:
        """Points before constraints."""
        total = len(self.settings)
        for dimension in self.dimensions:
            total *= len(dimension.values)
        return total

    def candidate(self, setting: Setting, values: Mapping[str, str | None]) -> Candidate:
        """The point with these values of the dimensions; None leaves a knob alone."""
        knobs = [(d, values.get(d.name)) for d in self.dimensions]
        flags = tuple(sorted((d.name, v) for d, v in knobs if v is not None and d.is_flag))
        env = tuple(sorted((d.name, v) for d, v in knobs if v is not None and not d.is_flag))
        return Candidate(setting, flags, env)

    def allows(self, candidate: Candidate) -> bool:
        """Whether no forbidden combination holds for it."""
        facts = {
            "steps": str(candidate.setting.steps),
            "topk": str(candidate.setting.topk),
            "draft_tokens": str(candidate.setting.draft_tokens),
            **dict(candidate.flags),
            **dict(candidate.env),
        }
        return not any(all(facts.get(k, "default") == v for k, v in rule.items()) for rule in self.forbidden)

    def candidates(self) -> Iterator[Candidate]:
        """Every allowed point, in a fixed order; raises SpecmeterError if there is none or far too many to list."""
        if self.size > MAX_LISTED:
            raise SpecmeterError(f"The space has {self.size} points.", next_step="Narrow it with --space FILE.")
        found = False
        for values in itertools.product(*(d.values for d in self.dimensions)):
            chosen = dict(zip((d.name for d in self.dimensions), values, strict=True))
            for setting in self.settings:
                candidate = self.candidate(setting, chosen)
                if self.allows(candidate):
                    found = True
                    yield candidate
        if not found:
            raise SpecmeterError(
                "The space has no feasible point.",
                f"{self.size} points, all of them forbidden." if self.size else "A dimension has no value.",
                "Widen it, or take a rule out of `forbid`.",
            )

    def as_json(self) -> dict[str, object]:
        """What the report tells of it."""
        return {
            "points": self.size,
            "settings": [setting.label for setting in self.settings],
            "dimensions": [{"name": d.name, "values": list(d.values)} for d in self.dimensions],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "flags_read_from": self.source,
        }


def settings_of(steps: Sequence[int], topk: Sequence[int], draft_tokens: Sequence[int]) -> tuple[Setting, ...]:
    """Chains of each step count, and for each top-k above 1 the trees of each admitted size.

    A chain verifies steps + 1 tokens: with top-k 1 draft tokens are no free choice. A size that a tree cannot have is
    left out; raises SpecmeterError if nothing is left.
    """
    found: list[Setting] = []
    for k, branches in itertools.product(steps, topk):
        if k == 0 or branches == 1:
            found.append(Setting.of(k))
            continue
        for tokens in draft_tokens:
            try:
                found.append(Setting.of(k, branches, tokens))
            except SpecmeterError:
                continue
    if not found:
        raise SpecmeterError(
            "The space has no feasible point.",
            f"No tree of steps {list(steps)} and top-k {list(topk)} has one of {list(draft_tokens)} draft tokens.",
            "A chain has steps + 1; a tree has 2 to 1 + k + (steps - 1) k^2, the root included.",
        )
    return tuple(dict.fromkeys(found))
