"""What a prediction takes for granted, in sentences."""

from __future__ import annotations

from specmeter.analysis.costmodel_evidence import Evidence
from specmeter.analysis.costmodel_trees import why_not
from specmeter.analysis.stalls import RULE

ASSUMPTIONS = (
    "a cycle is the sum of its phases, each modelled by itself (no line through whole cycles)",
    "a draft step costs the same at every place in the chain",
    "the verify forward is straight between measured widths, and beyond the widest goes on along the last segment",
    "a draft's chance to be kept depends on its position, not on how long the chain is",
    "prompts, context lengths, batch and machine are those of the run",
)


def assumptions(evidence: Evidence) -> tuple[str, ...]:
    """What holds for every prediction, and what this evidence lacks or takes from elsewhere."""
    return (*ASSUMPTIONS, *_of_evidence(evidence))


def _of_evidence(evidence: Evidence) -> list[str]:
    notes = []
    if len({s.steps for s in evidence.chains}) == 1:
        known = any(s.steps == 0 for s in evidence.samples)
        notes.append(
            "one step count was profiled: the verify forward's slope comes "
            + ("from the baseline's width of 1" if known else "from nowhere, so that verify is taken as flat")
        )
    step = evidence.device_step
    if step is not None:
        notes.append(
            f"a draft step costs {step.ms:.3f} ms, what the device took for one in the run's deep window, where it is "
            "what the cycle waits for; the host's times do not show it"
        )
    if evidence.plain_from:
        notes.append(
            f"plain decoding (verify at width 1, the baseline step) comes from {evidence.plain_from}, another start of "
            f"the same server build: {100 * evidence.apart:.0f} % of it is in the errors"
        )
    if any(s.topk > 1 for s in evidence.samples) and why_not(evidence):
        notes.append(f"trees are reported as measured only: {why_not(evidence)}")
    stalled = sum(s.stalled for s in evidence.samples)
    if stalled:
        notes.append(f"{stalled} cycles {RULE} are left out: stalls of the machine")
    if not any(s.accepts for s in evidence.chains):
        notes.append("acceptance by position comes from the saved analysis, without an interval of its own")
    if evidence.experts is not None:
        notes.append("tokens choose experts independently and alike, which counts more of them than real routing does")
    notes.append("another start of the same server may differ by up to 6 % for no reason of the setting's")
    return notes
