"""Prometheus text exposition, read strictly enough to be trusted: name, labels, value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST = 1e30  # no counter of a server is above it, and sums of such values stay finite
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"\s*,?\s*')


@dataclass(frozen=True)
class Sample:
    """One line of the exposition."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> Iterator[Sample]:
    """The samples of a ``/metrics`` text; lines that are no sample, NaN and values beyond MOST are skipped."""
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if line.startswith("#") or match is None:
            continue
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        if abs(value) < MOST:  # false for NaN too
            yield Sample(match.group(1), dict(_LABEL.findall(match.group(2) or "")), value)


class Metrics:
    """The samples of one scrape, by name with a trailing ``_total`` ignored."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, list[Sample]] = {}
        for sample in parse_metrics(text):
            self.samples.setdefault(sample.name.removesuffix("_total"), []).append(sample)

    def total(self, name: str) -> int | None:
        """The sum over all label sets (ranks, models) of a counter, or None if it is not there."""
        found = self.samples.get(name)
        return None if found is None else round(sum(sample.value for sample in found))

    def mean(self, name: str) -> float | None:
        """The mean over all label sets of a gauge, or None if it is not there."""
        found = self.samples.get(name)
        return None if not found else sum(sample.value for sample in found) / len(found)

    def by_position(self, name: str, label: str = "position") -> tuple[int, ...]:
        """A counter with a position label as a tuple, positions counted from the lowest seen; empty if absent."""
        found: dict[int, float] = {}
        for sample in self.samples.get(name, []):
            text = sample.labels.get(label, "")
            if text.isdecimal() and len(text) < 10:
                position = int(text)
                found[position] = found.get(position, 0.0) + sample.value
        return tuple(round(found[position]) for position in sorted(found))
