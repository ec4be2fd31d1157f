"""Figures as Prometheus and OpenMetrics families, by the ``prometheus-client`` library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specmeter import __version__
from specmeter.exports.data import needs
from specmeter.exports.figures import BOUNDS_S, Buckets, Figures
from specmeter.reporters.inert import inert

LABELS = ("server", "host", "rank")


class Collector:
    """Gives the families of the figures that ``read`` returns, afresh at each scrape."""

    def __init__(self, read: Callable[[], Sequence[Figures]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """All families, each with a sample for every rank that knows its value."""
        return families(self._read())


def openmetrics_text(figures: Sequence[Figures]) -> str:
    """The figures in the OpenMetrics text format, ``# EOF`` at its end."""
    require_client()
    from prometheus_client.core import CollectorRegistry
    from prometheus_client.openmetrics.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(lambda: figures))
    text: str = generate_latest(registry).decode("utf-8")  # type: ignore[no-untyped-call]
    return text


def families(figures: Sequence[Figures]) -> Iterator[Any]:
    """The metric families; a value that is not known has no sample."""
    core = require_client()
    info = core.GaugeMetricFamily("specmeter_build_info", "The specmeter that reads.", labels=("version",))
    info.add_metric((__version__,), 1)
    yield info
    yield from _histograms(core, figures)
    yield from _counters(core, figures)
    yield from _gauges(core, figures)


def _histograms(core: Any, figures: Sequence[Figures]) -> Iterator[Any]:
    cycle = core.HistogramMetricFamily(
        "specmeter_cycle_duration_seconds", "A speculative decode cycle, from one to the next.", labels=LABELS
    )
    phase = core.HistogramMetricFamily(
        "specmeter_phase_duration_seconds", "Own time of a phase in a cycle, host clock.", labels=(*LABELS, "phase")
    )
    seam = core.HistogramMetricFamily(
        "specmeter_seam_duration_seconds",
        "Device idle in a cycle between its timed points. Absent where device time is not recorded.",
        labels=LABELS,
    )
    for f in figures:
        _add(cycle, _labels(f), f.cycle)
        for name, buckets in f.phases.items():
            _add(phase, (*_labels(f), name), buckets)
        if f.seam is not None:
            _add(seam, _labels(f), f.seam)
    yield from (family for family in (cycle, phase, seam) if family.samples)


def _counters(core: Any, figures: Sequence[Figures]) -> Iterator[Any]:
    cycles = core.CounterMetricFamily(
        "specmeter_observed_cycles",
        "Cycles seen, by kind: decode (with drafts), plain (without), unknown, empty, mixed, prefill, after-prefill.",
        labels=(*LABELS, "kind"),
    )
    tokens = core.CounterMetricFamily(
        "specmeter_tokens", "Tokens that verified sequences yielded, the bonus token included.", labels=LABELS
    )
    sequences = core.CounterMetricFamily(
        "specmeter_verified_sequences", "Sequences verified; tokens / sequences is the accept length.", labels=LABELS
    )
    drafted = core.CounterMetricFamily(
        "specmeter_drafted_tokens", "Sequences that drafted this position.", labels=(*LABELS, "position")
    )
    kept = core.CounterMetricFamily(
        "specmeter_accepted_drafts", "Sequences that kept this position.", labels=(*LABELS, "position")
    )
    lost = core.CounterMetricFamily(
        "specmeter_lost_records", "Records overwritten before they were read.", labels=LABELS
    )
    for f in figures:
        for kind, count in f.cycles.items():
            cycles.add_metric((*_labels(f), inert(kind)), count)
        if f.sequences:
            tokens.add_metric(_labels(f), f.tokens)
            sequences.add_metric(_labels(f), f.sequences)
        for place, position in enumerate(f.positions, 1):
            drafted.add_metric((*_labels(f), str(place)), position.drafted)
            kept.add_metric((*_labels(f), str(place)), position.kept)
        lost.add_metric(_labels(f), f.lost)
    yield from (family for family in (cycles, tokens, sequences, drafted, kept, lost) if family.samples)


def _gauges(core: Any, figures: Sequence[Figures]) -> Iterator[Any]:
    given: tuple[tuple[str, str, Callable[[Figures], float | None]], ...] = (
        ("specmeter_accept_length_tokens", "Tokens a cycle and sequence, bonus included.", lambda f: f.accept_length),
        ("specmeter_break_even_tokens", "Accept length below which speculation loses: cycle / baseline step.",
         lambda f: f.break_even),
        ("specmeter_baseline_step_seconds", "A decode step without speculation.", lambda f: f.baseline_step_s),
        ("specmeter_mean_cycle_seconds", "Mean speculative cycle (running: last minute).", lambda f: f.cycle_s),
        ("specmeter_probe_overhead_ratio", "The probes' share of a cycle, as measured.", lambda f: f.overhead_ratio),
        ("specmeter_armed", "1 with the probes in, 0 with the original code.",
         lambda f: None if f.armed is None else float(f.armed)),
    )  # fmt: skip
    for name, about, value in given:
        family = core.GaugeMetricFamily(name, about, labels=LABELS)
        for f in figures:
            number = value(f)
            if number is not None:
                family.add_metric(_labels(f), number)
        if family.samples:
            yield family


def _add(family: Any, labels: tuple[str, ...], buckets: Buckets) -> None:
    cumulated = buckets.counts.cumsum().tolist()
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    family.add_metric(labels, list(zip(bounds, cumulated, strict=True)), buckets.sum_s)


def _labels(figures: Figures) -> tuple[str, ...]:
    rank = str(figures.rank) if figures.rank >= 0 else ""
    return inert(figures.server, 120), inert(figures.host, 120), rank


def require_client() -> Any:
    """The client library's core module. Raises SpecmeterError (exit 5) naming the extra where it is not installed."""
    try:
        from prometheus_client import core
    except ImportError as error:
        raise needs("prometheus-client", "metrics", "Metrics") from error
    return core
