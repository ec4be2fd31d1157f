"""What every engine offers the commands, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specmeter.errors import SpecmeterError

Capability = Literal["per_request", "no_spec", "switch"]


@dataclass(frozen=True, order=True)
class Setting:
    """One speculative setting, in SGLang's terms.

    ``steps`` is the number of draft steps a cycle (0: no speculation), ``topk`` the branches a step keeps (1: a chain),
    ``draft_tokens`` the tokens of a verify forward, the root included (a chain has ``steps + 1``).
    """

    steps: int
    topk: int = 1
    draft_tokens: int = 0

    @classmethod
    def of(cls, steps: int, topk: int = 1, draft_tokens: int | None = None) -> Setting:
        """A checked setting; ``draft_tokens`` None means ``steps + 1``. Raises SpecmeterError when out of range."""
        if steps < 0:
            raise SpecmeterError(f"steps is {steps}; it must be 0 (no speculation) or more.")
        if steps == 0:
            return cls(0, 1, 0)
        if topk < 1:
            raise SpecmeterError(f"top-k is {topk}; it must be 1 (a chain) or more.")
        tokens = steps + 1 if draft_tokens is None else draft_tokens
        most = steps + 1 if topk == 1 else 1 + topk + (steps - 1) * topk * topk
        least = steps + 1 if topk == 1 else 2
        if not least <= tokens <= most:
            raise SpecmeterError(
                f"draft tokens is {tokens}; with {steps} steps and top-k {topk} it must lie in {least}..{most}.",
                "A chain verifies steps + 1 tokens; a tree has 1 + k + (steps - 1) k^2 candidates, the root included.",
            )
        return cls(steps, topk, tokens)

    @property
    def label(self) -> str:
        """How reports name it: ``baseline``, ``k=3``, or ``k=4 top-k=4 tokens=12``."""
        if self.steps == 0:
            return "baseline"
        return f"k={self.steps}" if self.topk == 1 else f"k={self.steps} top-k={self.topk} tokens={self.draft_tokens}"

    @property
    def draft_count(self) -> int:
        """Draft tokens verified a cycle, the root excluded."""
        return max(0, self.draft_tokens - 1)

    def as_json(self) -> dict[str, object]:
        """The setting as it stands in reports: label, steps, topk, draft_tokens."""
        return {"label": self.label, "steps": self.steps, "topk": self.topk, "draft_tokens": self.draft_tokens}


@dataclass(frozen=True)
class ServerSpec:
    """A server to start (``command``), to use (``url``), or one that carries our link (``link``).

    ``engine`` is None when nothing says which engine answers at ``url``. ``api_key_env`` names the variable that holds
    the key which the server wants, if any.
    """

    engine: str | None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    link: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    api_key_env: str | None = None


@dataclass(frozen=True)
class Counters:
    """An engine's own counters at one moment; None where the engine does not tell.

    ``cycles``, ``drafted`` and ``accepted`` (bonus token excluded) only grow; ``per_position[i]`` counts the cycles
    that accepted the draft at position i + 1. ``accept_length`` is the engine's own gauge (SGLang), bonus included.
    ``finished`` counts requests; where it is told, ``cycles`` and ``generated`` are those of these requests (SGLang).
    """

    cycles: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    generated: int | None = None
    per_position: tuple[int, ...] = ()
    accept_length: float | None = None
    finished: int | None = None

    def since(self, before: Counters) -> Counters:
        """What was counted between ``before`` and now; the gauge is not kept, since it has no such difference."""

        def less(now: int | None, then: int | None) -> int | None:
            return None if now is None or then is None else now - then

        padded = (*before.per_position, *([0] * (len(self.per_position) - len(before.per_position))))
        return Counters(
            cycles=less(self.cycles, before.cycles),
            drafted=less(self.drafted, before.drafted),
            accepted=less(self.accepted, before.accepted),
            generated=less(self.generated, before.generated),
            per_position=tuple(now - then for now, then in zip(self.per_position, padded, strict=False)),
            finished=less(self.finished, before.finished),
        )

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens gained a cycle, 1 + accepted / cycles, or the engine's gauge where it counts neither.

        Without ``accepted`` it is all tokens but each request's first, which the prompt's own forward gives, a cycle.
        """
        if self.cycles and self.accepted is not None:
            return 1.0 + self.accepted / self.cycles
        if self.cycles and self.generated is not None and self.finished:
            return (self.generated - self.finished) / self.cycles
        return self.accept_length


class Engine(Protocol):
    """What differs between engines: the command line, the request, the metrics. Stateless; one object an engine."""

    name: str

    def can(self, what: Capability) -> bool:
        """``per_request``: settings travel with the request; ``no_spec``: steps 0 too; ``switch``: live, for all."""
        ...

    def command_port(self, command: tuple[str, ...]) -> int | None:
        """The port that ``command`` states, or None if it leaves it to the default."""
        ...

    def with_port(self, command: tuple[str, ...], port: int) -> tuple[str, ...]:
        """The command, listening on loopback at ``port``."""
        ...

    def with_setting(self, command: tuple[str, ...], setting: Setting) -> tuple[str, ...]:
        """The command of a start with ``setting``; steps 0 takes the speculative flags out."""
        ...

    def switched(self, command: tuple[str, ...], settings: Sequence[Setting]) -> tuple[str, ...]:
        """The command of a start in which ``settings`` can be switched live, for all requests at once.

        Raises SpecmeterError with the reason where this engine, or one of the settings, cannot be.
        """
        ...

    def setting_of(self, command: tuple[str, ...]) -> Setting | None:
        """The setting that ``command`` asks for (steps 0: none), or None if it does not say."""
        ...

    def request_body(self, setting: Setting) -> dict[str, object]:
        """What a request carries to be served with ``setting``; empty if the engine does not take it per request."""
        ...

    def counters(self, metrics: str, info: Mapping[str, object]) -> Counters:
        """The counters in a ``/metrics`` text and the ``info`` document."""
        ...

    def info_path(self) -> str | None:
        """Path of the JSON document that tells the resolved flags, or None if the engine has none."""
        ...

    def default_start_timeout_s(self) -> float:
        """How long a start may take before it is given up, in seconds."""
        ...
