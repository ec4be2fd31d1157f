"""``check --probe``: what the head accepts under an engine's wiring, and under wirings close to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specmeter.wiring.disagreement import states_text
from specmeter.wiring.findings import Finding, error, note
from specmeter.wiring.measure import Acceptance, SoftLoss, acceptance, fuse, in_errors
from specmeter.wiring.numeric import Bench, Unroller, with_normed_residual

STEPS = 3
# A neighbour counts as better when its loss is less by this many standard errors, paired over rows.
CLEARLY = 3.0


@dataclass(frozen=True)
class Wiring:
    """One way to feed the head. ``change`` says how it differs from the engine's own ("" for that one).

    ``normalise`` gives each state unit root mean square before ``fc``; ``normed_residual`` is the option
    norm_before_residual of heads: the layer's residual is the normed hidden input; ``map_ignored`` takes draft ids for
    target ids.
    """

    states: tuple[int, ...]
    change: str = ""
    normalise: bool = False
    normed_residual: bool = False
    map_ignored: bool = False


@dataclass(frozen=True)
class Measured:
    """A wiring with its acceptance.

    ``gain`` is how much less its loss is than the base's, paired over rows, in standard errors.
    """

    wiring: Wiring
    result: Acceptance
    gain: float


@dataclass(frozen=True)
class Probe:
    """The probe of one engine's wiring: the base first, then the neighbours, best first."""

    engine: str
    base: Measured
    neighbours: tuple[Measured, ...]

    @property
    def rows(self) -> int:
        """Positions judged."""
        return len(self.base.result.counts)

    def better(self) -> Measured | None:
        """The best neighbour that is clearly better than the engine's own wiring, in loss and in accept length."""
        own = self.base.result.accept_length()
        clear = [m for m in self.neighbours if m.gain > CLEARLY and m.result.accept_length() > own]
        return max(clear, key=lambda m: m.gain, default=None)


def neighbours(base: Wiring, layers: int) -> Iterator[Wiring]:
    """Wirings that a common mistake would make of ``base``, those outside the target's layers left out."""
    seen = {base.states}
    for states, change in _other_states(base.states):
        if states not in seen and all(0 <= k <= layers for k in states):
            seen.add(states)
            yield replace(base, states=states, change=change)
    yield replace(base, change="each state normalised before fc", normalise=True)
    switch = "off" if base.normed_residual else "on"
    yield replace(base, change=f"norm before the residual {switch}", normed_residual=not base.normed_residual)
    yield replace(base, change="vocabulary map ignored", map_ignored=True)


def _other_states(base: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    for shift in (-1, 1):
        yield tuple(k + shift for k in base), f"every state {shift:+d}"
    for slot, state in enumerate(base):
        for shift in (-1, 1):
            yield (*base[:slot], state + shift, *base[slot + 1 :]), f"state {slot + 1} {shift:+d}"
    if 0 in base:
        yield tuple(sorted(k or 1 for k in base)), "embedding output out"
    else:
        yield (0, *base[1:]), "embedding output in place of the first state"
    yield tuple(reversed(base)), "order reversed"
    for slot in range(len(base) - 1):
        swapped = list(base)
        swapped[slot], swapped[slot + 1] = swapped[slot + 1], swapped[slot]
        yield tuple(swapped), f"states {slot + 1} and {slot + 2} swapped"


class _Runs:
    """Measures wirings on one bench; what a head with a normed residual needs is made when first asked for."""

    def __init__(self, bench: Bench, steps: int) -> None:
        self._bench = bench
        self._steps = steps
        self._made: dict[bool, tuple[Bench, Unroller, SoftLoss]] = {}

    def measure(self, wiring: Wiring) -> tuple[Acceptance, Tensor]:
        """Acceptance of a wiring, and its loss at every judged row."""
        bench, unroller, loss = self._parts(wiring.normed_residual)
        ids = torch.arange(len(bench.head.target_ids)) if wiring.map_ignored else None
        hidden = fuse(bench, wiring.states, wiring.normalise)
        return acceptance(unroller, hidden, ids), loss.of(hidden)

    def _parts(self, normed: bool) -> tuple[Bench, Unroller, SoftLoss]:
        if normed not in self._made:
            bench = with_normed_residual(self._bench) if normed else self._bench
            unroller = Unroller(bench, self._steps)
            self._made[normed] = bench, unroller, SoftLoss(bench, unroller)
        return self._made[normed]


def run_probe(bench: Bench, engine: str, base: Wiring, steps: int = STEPS) -> Probe:
    """Measure a wiring and its neighbours."""
    runs = _Runs(bench, steps)
    own, own_loss = runs.measure(base)
    results = []
    for wiring in neighbours(base, bench.layers):
        result, its_loss = runs.measure(wiring)
        results.append(Measured(wiring, result, in_errors(own_loss - its_loss)))
    results.sort(key=lambda m: -m.result.accept_length())
    return Probe(engine, Measured(base, own, 0.0), tuple(results))


def probe_findings(probe: Probe) -> list[Finding]:
    """What a probe means: a neighbour that is clearly better is a wiring fault."""
    length, first = probe.base.result.accept_length(), probe.base.result.per_position()[0]
    best = probe.better()
    if best is not None:
        other = best.result.accept_length()
        return [
            error(
                "probe-better-neighbour",
                f"with {best.wiring.change} ({states_text(best.wiring.states)}) the head accepts more: accept length "
                f"{other:.2f} against {length:.2f} under {probe.engine}",
                "The head was trained on other states, another order or another norm than it is fed.",
                "Run --scan to name the trained states.",
                engine=probe.engine,
            )
        ]
    if first < 0.1:
        return [
            error(
                "probe-accepts-nothing",
                f"under {probe.engine} the head's first draft is right at {100 * first:.0f} % of the positions",
                "Neither this wiring nor a close one suits the head.",
                "Run --scan; if that is not decidable, the head does not belong to this target.",
                engine=probe.engine,
            )
        ]
    return [
        note(
            "probe",
            f"expected accept length under {probe.engine}: {length:.2f} with {probe.base.result.steps} draft steps; "
            "no close wiring is clearly better",
            engine=probe.engine,
        )
    ]
