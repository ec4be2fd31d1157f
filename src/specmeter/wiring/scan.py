"""``check --scan``: finds the states that a head was trained on, without trying all combinations.

fc is linear: its output is the sum over slots i of W_i H[k_i]. All W_i H[k] are computed once. Then one slot at a time
is varied over all states with the others held, and set to the state of least loss (coordinate descent), until a whole
sweep changes nothing. n slots of N+1 states cost n (N+1) short head forwards a sweep instead of (N+1)^n, and two or
three sweeps from each of two or three starts suffice. States next to each other differ little, so the answer is then
polished on several times more text, against the two states on either side of each slot only.

The answer counts when the starts agree, the head drafts right clearly more often than it does when given the states
of other positions, and every slot beats the states two layers away clearly (paired over rows). How clearly it beats the
layers next to it is reported for each slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmeter.wiring.feed import default_states
from specmeter.wiring.measure import SoftLoss, acceptance, fuse, in_errors
from specmeter.wiring.numeric import Bench, Unroller

CLEARLY = 3.0
MOST_SWEEPS = 6
MOST_STARTS = 3
# The polish looks this many layers to either side.
REACH = 2

States = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One state of the answer with its closest rival and their distance in paired standard errors.

    ``far_margin`` is the least distance to a state that is not next to it.
    """

    state: int
    rival: int
    margin: float
    far_margin: float


@dataclass(frozen=True)
class Scan:
    """The outcome: ``states`` is None when it is not decidable and ``reason`` says why; ``best`` has the least loss."""

    states: States | None
    best: States
    slots: tuple[Slot, ...]
    reason: str
    agreement: float
    loss: float
    evaluations: int
    combinations: int
    rows: int
    seconds: float

    @property
    def certain(self) -> bool:
        """Whether every slot is clear of its neighbouring layers too."""
        return self.states is not None and all(slot.margin >= CLEARLY for slot in self.slots)


class Losses:
    """The head's loss for a choice of states, from the precomputed W_i H[k]."""

    def __init__(self, bench: Bench) -> None:
        self.evaluations = 0
        self._loss = SoftLoss(bench, Unroller(bench, 1))
        self._parts = _parts(bench)

    @torch.inference_mode()
    def of(self, states: States) -> Tensor:
        """The loss at every judged row."""
        self.evaluations += 1
        hidden = self._parts[0][states[0]].float()
        for slot, state in enumerate(states[1:], 1):
            hidden = hidden + self._parts[slot][state]
        return self._loss.of(hidden.to(self._parts[0].dtype))


@torch.inference_mode()
def _parts(bench: Bench) -> list[Tensor]:
    """W_i H[k] for every slot i, [layers + 1, rows, hidden] each: fc applied to states that are zero in other slots."""
    layers, rows, hidden = bench.states.shape
    parts = []
    for slot in range(bench.slots):
        wide = bench.states.new_zeros(rows, bench.slots * hidden)
        made = []
        for state in range(layers):
            wide[:, slot * hidden : (slot + 1) * hidden] = bench.states[state]
            made.append(bench.head.fuse(wide).clone())
        parts.append(torch.stack(made))
    return parts


def starts(slots: int, layers: int) -> list[States]:
    """Where the descent begins: the trainers' default or an even spread, all slots in the middle, and low down."""
    even = tuple(round((slot + 1) * layers / (slots + 1)) for slot in range(slots))
    first = default_states(layers) if slots == 3 else even
    middle = tuple(layers // 2 for _ in range(slots))
    low = tuple(max(1, layers // 4) for _ in range(slots))
    return list(dict.fromkeys([first, middle, low]))[:MOST_STARTS]


def run_scan(bench: Bench, more: Callable[[], Sequence[Bench]], progress: Callable[[str], None]) -> Scan:
    """Find the trained states on ``bench``, then polish the answer on the benches that ``more`` makes."""
    begun = time.perf_counter()
    losses = Losses(bench)
    ends: list[tuple[States, float]] = []
    for number, start in enumerate(starts(bench.slots, bench.layers), 1):
        states, loss = _descend(losses, start, bench.layers)
        ends.append((states, loss))
        progress(f"start {number}: {list(start)} -> {list(states)}, loss {loss:.3f}")
        if _agreeing(ends) >= 2:
            break
    best = min(ends, key=lambda end: end[1])[0]
    agreement, reason = _hits(bench, best)
    if not reason and _agreeing(ends) < 2:
        reason = "different starts end at different states"
    slots: tuple[Slot, ...] = ()
    evaluations, rows, loss = losses.evaluations, int(bench.judged.sum()), min(end[1] for end in ends)
    if not reason:
        polish = _Polish([bench, *more()])
        best = polish.run(best, bench.layers)
        slots = polish.slots(best, bench.layers)
        evaluations, rows, loss = evaluations + polish.evaluations, polish.rows, float(polish.of(best).mean())
        progress(f"polished on {rows} positions: {list(best)}")
        vague = [str(number) for number, slot in enumerate(slots, 1) if slot.far_margin < CLEARLY]
        if vague:
            near = ", ".join(f"H[{k}]" for k in best)
            reason = (
                f"state {' and '.join(vague)} of {near} could as well be two layers away: it hardly matters to the head"
            )
    return Scan(
        states=None if reason else best,
        best=best,
        slots=slots,
        reason=reason,
        agreement=agreement,
        loss=loss,
        evaluations=evaluations,
        combinations=(bench.layers + 1) ** bench.slots,
        rows=rows,
        seconds=time.perf_counter() - begun,
    )


def _agreeing(ends: list[tuple[States, float]]) -> int:
    best = min(ends, key=lambda end: end[1])[0]
    # Ends one layer apart agree: the polish decides between them.
    return sum(all(abs(a - b) <= 1 for a, b in zip(end[0], best, strict=True)) for end in ends)


def _descend(losses: Losses, start: States, layers: int) -> tuple[States, float]:
    """Coordinate descent from a start: the states it ends at and their loss."""
    states, least = start, float("inf")
    for _ in range(MOST_SWEEPS):
        before = states
        for slot in range(len(states)):
            means = [float(losses.of((*states[:slot], k, *states[slot + 1 :])).mean()) for k in range(layers + 1)]
            least = min(means)
            states = (*states[:slot], means.index(least), *states[slot + 1 :])
        if states == before:
            break
    return states, least


class _Polish:
    """Losses over several benches; a choice of states is measured once."""

    def __init__(self, benches: Sequence[Bench]) -> None:
        self._benches = [(bench, SoftLoss(bench, Unroller(bench, 1))) for bench in benches]
        self._known: dict[States, Tensor] = {}
        self.rows = sum(len(loss.rows) for _, loss in self._benches)

    @property
    def evaluations(self) -> int:
        return len(self._known) * len(self._benches)

    def of(self, states: States) -> Tensor:
        """The loss at every judged row of all benches."""
        if states not in self._known:
            self._known[states] = torch.cat([loss.of(fuse(bench, states)) for bench, loss in self._benches])
        return self._known[states]

    def run(self, states: States, layers: int) -> States:
        """Move to better states nearby until there is none."""
        for _ in range(MOST_SWEEPS):
            before = states
            for slot in range(len(states)):
                near = self._near(states, slot, layers)
                states = min(near, key=lambda choice: float(self.of(choice).mean()))
            if states == before:
                break
        return states

    def slots(self, states: States, layers: int) -> tuple[Slot, ...]:
        """Each state with the rival nearby that comes closest."""
        found = []
        for slot, state in enumerate(states):
            rivals = [choice for choice in self._near(states, slot, layers) if choice != states]
            margins = [(in_errors(self.of(choice) - self.of(states)), choice[slot]) for choice in rivals]
            margin, rival = min(margins)
            far = min((m for m, other in margins if abs(other - state) > 1), default=0.0)
            found.append(Slot(state, rival, margin, far))
        return tuple(found)

    def _near(self, states: States, slot: int, layers: int) -> list[States]:
        around = range(max(0, states[slot] - REACH), min(layers, states[slot] + REACH) + 1)
        return [(*states[:slot], k, *states[slot + 1 :]) for k in around]


def _hits(bench: Bench, states: States) -> tuple[float, str]:
    """Share of positions whose first draft is right, and why no wiring makes this head draft (or empty).

    The control is the same wiring with the rows' states shuffled: a head that has learnt from states drafts worse then.
    """
    unroller = Unroller(bench, 1)
    hidden = fuse(bench, states)
    order = torch.randperm(len(hidden), generator=torch.Generator().manual_seed(0))
    right = acceptance(unroller, hidden).counts.float()
    control = acceptance(unroller, hidden[order]).counts.float()
    share, other = float(right.mean()), float(control.mean())
    if in_errors(right - control) >= CLEARLY:
        return share, ""
    reason = (
        f"the head's first draft is right at {100 * share:.1f} % of the positions, and at {100 * other:.1f} % when it"
        " is given the states of other positions: no wiring makes it draft"
    )
    return share, reason
