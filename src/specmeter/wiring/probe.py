"""``check --probe``: what the head accepts under an engine's wiring, and under wirings close to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specmeter.wiring.disagreement import states_text
from specmeter.wiring.findings import Finding, error, note
from specmeter.wiring.measure import Acceptance, SoftLoss, acceptance, fuse, in_errors
from specmeter.wiring.numeric import Bench, Unroller

STEPS = 3
# A neighbour counts as better when its loss is less by this many standard errors, paired over rows.
CLEARLY = 3.0


@dataclass(frozen=True)
class Wiring:
    """One way to feed the head. ``change`` says how it differs from the engine's own ("" for that one)."""

    states: tuple[int, ...]
    change: str = ""
    normalise: bool = False
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


def neighbours(base: tuple[int, ...], layers: int) -> Iterator[Wiring]:
    """Wirings that a common mistake would make of ``base``."""
    for shift in (-1, 1):
        yield Wiring(tuple(k + shift for k in base), f"every state {shift:+d}")
    for slot, state in enumerate(base):
        for shift in (-1, 1):
            yield Wiring((*base[:slot], state + shift, *base[slot + 1 :]), f"state {slot + 1} {shift:+d}")
    if 0 in base:
        yield Wiring(tuple(sorted(k or 1 for k in base)), "embedding output out")
    else:
        yield Wiring((0, *base[1:]), "embedding output in place of the first state")
    yield Wiring(tuple(reversed(base)), "order reversed")
    for slot in range(len(base) - 1):
        swapped = list(base)
        swapped[slot], swapped[slot + 1] = swapped[slot + 1], swapped[slot]
        yield Wiring(tuple(swapped), f"states {slot + 1} and {slot + 2} swapped")
    yield Wiring(base, "each state normalised before fc", normalise=True)
    yield Wiring(base, "vocabulary map ignored", map_ignored=True)


def run_probe(bench: Bench, engine: str, base: tuple[int, ...], steps: int = STEPS) -> Probe:
    """Measure a wiring and its neighbours."""
    unroller = Unroller(bench, steps)
    loss = SoftLoss(bench, unroller)
    own, own_loss = _measure(bench, unroller, loss, Wiring(base))
    seen = {base}
    results = []
    for wiring in neighbours(base, bench.layers):
        plain = not wiring.normalise and not wiring.map_ignored
        inside = all(0 <= k <= bench.layers for k in wiring.states)
        if not inside or (plain and wiring.states in seen):
            continue
        seen.add(wiring.states)
        result, its_loss = _measure(bench, unroller, loss, wiring)
        results.append(Measured(wiring, result, in_errors(own_loss - its_loss)))
    results.sort(key=lambda m: -m.result.accept_length())
    return Probe(engine, Measured(Wiring(base), own, 0.0), tuple(results))


def _measure(bench: Bench, unroller: Unroller, loss: SoftLoss, wiring: Wiring) -> tuple[Acceptance, Tensor]:
    ids = torch.arange(len(bench.head.target_ids)) if wiring.map_ignored else None
    hidden = fuse(bench, wiring.states, wiring.normalise)
    return acceptance(unroller, hidden, ids), loss.of(hidden)


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
