"""What may be tried: speculative settings, flags and variables, with their constraints and what is left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from specmeter.bench.arms import CompareArm, configured
from specmeter.engines import ServerSpec, Setting
from specmeter.engines.flags import flag_value, without_flags
from specmeter.engines.vllm import TABLE, speculative_config, without_speculative_config
from specmeter.errors import SpecmeterError

MAX_LISTED = 100_000
Knobs = tuple[tuple[str, str], ...]
ADAPTIVE, ADAPTIVE_CONFIG = "--speculative-adaptive", "--speculative-adaptive-config"
AS_GIVEN = Setting(1, 0, 0)
"""The place of a setting that is not known: it speculates, and it is no chain (``Candidate.own``)."""
AS_GIVEN_LABEL = "the command as it stands"


@dataclass(frozen=True, order=True)
class Candidate:
    """One point: a speculative setting, flags (value ``on``: a switch) and environment variables, both sorted.

    A knob that is not named keeps what the user's command and environment say. ``own``: the command as it stands,
    whose setting its engine chooses by itself (``setting`` is AS_GIVEN then, and no knob is put in).
    """

    setting: Setting
    flags: Knobs = ()
    env: Knobs = ()
    own: bool = False

    @property
    def label(self) -> str:
        """How reports name it."""
        knobs = [name if value == "on" else f"{name}={value}" for name, value in (*self.flags, *self.env)]
        return ", ".join([AS_GIVEN_LABEL if self.own else self.setting.label, *knobs])

    @property
    def key(self) -> str:
        """The same for the same point in every run: JSON with sorted keys."""
        words = [self.setting_json(), dict(self.flags), dict(self.env)]
        return json.dumps(words, sort_keys=True)

    def setting_json(self) -> dict[str, object]:
        """The setting as it stands in reports and journals."""
        return {**self.setting.as_json(), **({"label": AS_GIVEN_LABEL} if self.own else {})}

    @property
    def plain(self) -> Candidate:
        """The baseline with the same flags and variables, less the flags that it has not: those of speculation."""
        flags = tuple((name, value) for name, value in self.flags if not is_speculative(name))
        return Candidate(Setting.of(0), flags, self.env)

    def arm(self, spec: ServerSpec, name: str | None = None) -> CompareArm:
        """The server's command and environment with this point put in.

        The engine's own change of steps while it serves is taken out: it would serve others than the point's.
        """
        if self.own:
            return CompareArm(name or self.label, spec, None)
        flags = [(flag, None if value == "on" else value) for flag, value in self.flags]
        return configured(name or self.label, _fixed(spec), self.setting, flags, dict(self.env))


def is_speculative(flag: str) -> bool:
    """Whether a flag of a dimension goes away with speculation (engines.sglang and engines.vllm, ``with_setting``)."""
    return flag.replace("_", "-").startswith(("--speculative-", "--spec-"))


def adapts(spec: ServerSpec) -> bool:
    """Whether the command lets its engine change the steps while it serves: SGLang's switch, vLLM's table."""
    if spec.engine == "sglang":
        return ADAPTIVE in (word.partition("=")[0].replace("_", "-") for word in spec.command)
    return spec.engine == "vllm" and TABLE in (speculative_config(spec.command) or {})


def _fixed(spec: ServerSpec) -> ServerSpec:
    if not adapts(spec) and flag_value(spec.command, ADAPTIVE_CONFIG) is None:
        return spec
    if spec.engine == "sglang":
        return replace(spec, command=without_flags(spec.command, (ADAPTIVE_CONFIG,), switches=(ADAPTIVE,)))
    config = {name: value for name, value in (speculative_config(spec.command) or {}).items() if name != TABLE}
    plain = without_speculative_config(spec.command)
    return replace(spec, command=(*plain, "--speculative-config", json.dumps(config)))


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
