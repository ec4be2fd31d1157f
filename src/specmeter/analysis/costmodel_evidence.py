"""What the cost model stands on, and what a what-if changes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specmeter.analysis.collective_words import Communication
from specmeter.analysis.costmodel_data import Sample
from specmeter.analysis.costmodel_device import DeviceStep
from specmeter.analysis.costmodel_seams import Seams
from specmeter.analysis.moe import Experts
from specmeter.analysis.stats import Interval
from specmeter.errors import SpecmeterError

# Chains longer than this are predicted only where such were recorded: what is known of acceptance says nothing there.
MOST_STEPS = 16


@dataclass(frozen=True)
class Assumed:
    """What a what-if changes: ``factors`` of points or phases (0: gone), ``acceptance`` by position instead of the
    recorded one, ``length`` an accept length (tokens) at the present steps, and ``batch``. ``saved_ms`` are
    milliseconds of a cycle at the present steps that go, by phase."""

    factors: Mapping[str, float] = field(default_factory=dict)
    acceptance: tuple[float, ...] | None = None
    length: float | None = None
    batch: float | None = None
    saved_ms: Mapping[str, float] = field(default_factory=dict)

    def saved_at(self, steps: int, now: int) -> float:
        """What goes of a cycle of ``steps`` draft steps, ms: the draft phase's runs once a step from the second on."""
        return sum(
            ms * (steps - 1) / (now - 1) if phase == "draft" and now > 1 else ms for phase, ms in self.saved_ms.items()
        )


@dataclass(frozen=True)
class Evidence:
    """What the model stands on: samples, experts (None: dense), the baseline step (ms) where no sample of it is there,
    acceptance by position where the cycles hold none, and the steps that run at present. ``communication``
    is what a deep window at these steps saw of collectives. ``plain_from`` names the run that the plain cycles come
    from where that is another one, and ``apart`` is how far (0.06: 6 %) its start may then be off.
    ``device_step`` is a draft step as a deep window saw it, ``seams`` the time that the device waits for the host."""

    samples: tuple[Sample, ...]
    now: int
    experts: Experts | None = None
    baseline_ms: Interval | None = None
    acceptance: tuple[float, ...] | None = None
    communication: Communication | None = None
    plain_from: str = ""
    apart: float = 0.0
    device_step: DeviceStep | None = None
    seams: Seams | None = None

    @property
    def chains(self) -> list[Sample]:
        """Samples of chains."""
        return [s for s in self.samples if s.steps > 0 and s.topk == 1]

    def check_steps(self, steps: int, words: str) -> None:
        """Raise SpecmeterError for more draft steps than are predicted; ``words`` is what asked for them."""
        most = max([MOST_STEPS, self.now, *(s.steps for s in self.chains)])
        if steps > most:
            raise SpecmeterError(
                f"{words}: chains of up to {most} draft steps are predicted.",
                "What was recorded says nothing of longer ones.",
                f"Ask for {most} steps or fewer.",
            )

    @property
    def batch(self) -> float:
        """The batch that most cycles of chains had; everything is said for it unless another is asked."""
        return max(self.chains, key=lambda s: s.cycles).batch

    def plain(self, batch: float | None = None) -> Sample | None:
        """The baseline's cycles at ``batch`` (None: the usual one), if there are any."""
        wanted = round(self.batch if batch is None else batch)
        return next((s for s in self.samples if s.steps == 0 and round(s.batch) == wanted), None)
