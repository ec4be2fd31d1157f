"""Runs ``--probe`` and ``--scan`` for a checked pair: loads both models once and writes the text they are judged on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specmeter.eagle.tokenizer import Tokenizer
from specmeter.errors import SpecmeterError
from specmeter.wiring.check import Result
from specmeter.wiring.disagreement import states_text
from specmeter.wiring.embedded_source import NAME as EMBEDDED
from specmeter.wiring.feed import Feed
from specmeter.wiring.findings import Finding, error, note, warning
from specmeter.wiring.numeric import Bench, load, prepare, write_text
from specmeter.wiring.probe import Measured, Probe, Wiring, probe_findings, run_probe
from specmeter.wiring.scan import Scan, run_scan

PROMPTS: tuple[str, ...] = tuple(json.loads(Path(__file__).with_name("probe_prompts.json").read_text("utf-8")))
LANES = 8
NEW_TOKENS = 96
# Batches of text for the scan's polish, beyond the first.
POLISH_BATCHES = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Numbers:
    """What was measured; each part is None or empty when it was not asked for."""

    probes: tuple[Probe, ...]
    scan: Scan | None
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, object]:
        """The figures for the ``--json`` document."""
        return {
            "probes": [_probe_json(probe) for probe in self.probes],
            "scan": None if self.scan is None else _scan_json(self.scan),
        }

    def as_lines(self) -> list[str]:
        """The figures for a terminal."""
        lines: list[str] = []
        for probe in self.probes:
            lines += _probe_lines(probe)
        return lines + ([] if self.scan is None else _scan_lines(self.scan))


def _measured_json(measured: Measured) -> dict[str, object]:
    return {
        "change": measured.wiring.change or None,
        "states": list(measured.wiring.states),
        "norm_before_residual": measured.wiring.normed_residual,
        "accept_length_tokens": round(measured.result.accept_length(), 4),
        "accepted_per_position": [round(share, 4) for share in measured.result.per_position()],
        "gain_standard_errors": round(measured.gain, 2),
    }


def _probe_json(probe: Probe) -> dict[str, object]:
    base = _measured_json(probe.base)
    return {
        "engine": probe.engine,
        "rows": probe.rows,
        "base": base,
        "others": [_measured_json(m) for m in probe.neighbours],
    }


def _scan_json(scan: Scan) -> dict[str, object]:
    return {
        "states": None if scan.states is None else list(scan.states),
        "reason": scan.reason or None,
        "certain": scan.certain,
        "slots": [
            {"state": slot.state, "rival": slot.rival, "margin_standard_errors": round(slot.margin, 2)}
            for slot in scan.slots
        ],
        "first_draft_right": round(scan.agreement, 4),
        "rows": scan.rows,
        "forwards": scan.evaluations,
        "combinations": scan.combinations,
        "seconds": round(scan.seconds, 1),
    }


def _probe_lines(probe: Probe) -> list[str]:
    steps = probe.base.result.steps
    lines = [f"probe   {probe.engine}: {probe.rows} positions, {steps} draft steps, greedy"]
    lines.append(f"        {'AL':>5}  {'accepted per position':<21}  wiring")
    for measured in (probe.base, *probe.neighbours):
        shares = " ".join(f"{share:.3f}" for share in measured.result.per_position())
        name = measured.wiring.change or "as this engine feeds it"
        length = measured.result.accept_length()
        lines.append(f"        {length:5.2f}  {shares:<21}  {name}: {states_text(measured.wiring.states)}")
    return lines


def _scan_lines(scan: Scan) -> list[str]:
    verdict = states_text(scan.states) if scan.states is not None else f"not decidable: {scan.reason}"
    lines = [f"scan    {verdict}"]
    lines += [f"        H[{s.state}] beats H[{s.rival}] by {s.margin:.1f} standard errors" for s in scan.slots]
    lines.append(
        f"        {scan.evaluations} head forwards in place of {scan.combinations} combinations, {scan.rows} positions,"
        f" {scan.seconds:.0f} s"
    )
    return lines


class Laboratory:
    """The loaded pair; makes benches of text on demand."""

    def __init__(self, target: Path, draft: Path, slots: int, threads: int | None, say: Say) -> None:
        self._say = say
        say("loading target and head")
        self.target, self.head = load(target, draft, slots, threads)
        self._tokenizer = Tokenizer(target)

    def bench(self, number: int) -> Bench:
        """The bench of the ``number``-th batch of prompts."""
        prompts = [PROMPTS[(number * LANES + lane) % len(PROMPTS)] for lane in range(LANES)]
        self._say(f"the target writes text, batch {number + 1}")
        text = write_text(self.target, self._tokenizer, prompts, NEW_TOKENS)
        return prepare(self.target, self.head, text)


def measure(result: Result, probe: bool, scan: bool, threads: int | None, say: Say) -> Numbers:
    """Probe every engine's wiring and scan for the trained one, as asked. Raises SpecmeterError when none can run."""
    head = result.pair.head
    if head.states is None:
        raise SpecmeterError(
            "the head's fc takes no whole number of the target's states, so it cannot be run",
            next_step="See the findings without --probe and --scan.",
        )
    laboratory = Laboratory(result.pair.target_files.folder, head.checkpoint.folder, head.states, threads, say)
    bench = laboratory.bench(0)
    probes, findings = _probe(result, bench, say) if probe else ([], [])
    scanned = None
    if scan:
        scanned = run_scan(bench, lambda: [laboratory.bench(1 + n) for n in range(POLISH_BATCHES)], say)
        findings += scan_findings(scanned, result)
    return Numbers(tuple(probes), scanned, tuple(findings))


def _probe(result: Result, bench: Bench, say: Say) -> tuple[list[Probe], list[Finding]]:
    wirings: dict[Wiring, str] = {}
    for feed in result.feeds:
        if feed.used and feed.states is not None and not feed.refusal and len(feed.states) == bench.slots:
            wiring = Wiring(feed.states, normed_residual=_normed_residual(result, feed))
            name = wirings.get(wiring)
            wirings[wiring] = f"{name} and {feed.name}" if name else feed.name
    if not wirings:
        why = "no engine in question feeds as many states as the head takes"
        return [], [warning("probe", "nothing to probe", why, "Correct the layer ids first.")]
    probes = []
    for wiring, name in wirings.items():
        say(f"probing the wiring of {name}")
        probes.append(run_probe(bench, name, wiring))
    return probes, [finding for probe in probes for finding in probe_findings(probe)]


def _normed_residual(result: Result, feed: Feed) -> bool:
    """Whether this engine norms the head's residual: the head's config asks for it, and the engine reads the option."""
    asked = bool(result.pair.head.config.get("norm_before_residual"))
    ignored = feed.engine == EMBEDDED or "norm_before_residual" in feed.ignored_options
    return asked and not ignored


def scan_findings(scan: Scan, result: Result) -> list[Finding]:
    """What the scan means for the engines in question."""
    if scan.states is None:
        return [warning("scan-undecided", "the trained states are not decidable", scan.reason)]
    named = ", ".join(f"H[{k}]" for k in scan.states)
    close = [f"H[{s.state}] against H[{s.rival}] ({s.margin:.1f})" for s in scan.slots if s.margin < 3]
    doubt = (
        f" Neighbouring layers that this text hardly tells apart, in standard errors: {', '.join(close)}."
        if close
        else ""
    )
    found = [note("scan", f"the head was trained on {named}" + (", or on neighbouring layers" if doubt else ""), doubt)]
    for feed in result.feeds:
        if not feed.used or feed.states is None or feed.states == scan.states:
            continue
        off = [slot for slot, k in zip(scan.slots, feed.states, strict=False) if k != slot.state]
        excused = len(feed.states) == len(scan.states) and all(
            slot.margin < 3 and feed.states[index] == slot.rival
            for index, slot in enumerate(scan.slots)
            if feed.states[index] != slot.state
        )
        if off and not excused:
            cure = f"Run check again with --trained {','.join(map(str, scan.states))} for the ids to write."
            what = f"{feed.name} feeds {', '.join(f'H[{k}]' for k in feed.states)}; the scan names {named}"
            found.append(error("scan-shift", what, "Found by numbers, from the weights alone.", cure, feed.name))
    return found
