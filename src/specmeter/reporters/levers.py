"""What would help, and by how much at the most: bounds that follow from the numbers of one analysed profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Less than this is not worth a line.
_LEAST = 0.005
# The phases whose work on the device goes too; engines with overlap scheduling hide the host's part already.
PHASES_OF = {
    "no waiting": (),
    "scheduler and Python between points hidden": (),
    "drafting for nothing": ("draft", "extend"),
    "cache work for nothing": ("kv",),
}
# From this ratio (its lower end) of cycles under the profiler to those beside them, idle time is the profiler's doing.
SLOWED = 1.05


@dataclass(frozen=True)
class Lever:
    """One change, the speed-up over now that it could give (0.1: 10 %), whether that is a bound, and the reasoning."""

    what: str
    gain: float
    bound: bool
    why: str

    @property
    def amount(self) -> str:
        """The gain in words."""
        return f"{'at most ' if self.bound else 'about '}{100 * self.gain:+.0f} %"


def levers(document: Mapping[str, Any]) -> list[Lever]:
    """The levers of a document of kind ``profile``, the largest first.

    A part of the cycle that took no time would make it 1 / (1 - share) times as fast (Amdahl's law): a bound.
    Fewer steps: accept length 1 + sum of the kept shares up to there, cycle less the steps' own time; verify is taken
    to cost the same, so this is an estimate from below. Where deep windows tell how long the device is busy, what the
    host does meanwhile is no gain (``_capped``).
    """
    windows = _windows(document)
    found = [*(_capped(lever, windows) for lever in _parts(document)), *_fewer_steps(document)]
    return sorted((lever for lever in found if lever.gain >= _LEAST), key=lambda lever: -lever.gain)


def _parts(document: Mapping[str, Any]) -> list[Lever]:
    cycle = document["cycle"]["mean_ms"]["point"]
    shares = {row["name"]: row["percent"] / 100 for row in document["phases"]}
    found = []
    step = document["baseline"]["step_ms"]
    verify = shares.get("verify", 0.0) * cycle
    if step is not None and verify > step["point"]:
        saved = (verify - step["point"]) / cycle
        why = f"verify takes {verify:.2f} ms, a baseline step {step['point']:.2f} ms"
        found.append(Lever("verify as cheap as a baseline step", _amdahl(saved), True, why))
    waiting = document["coverage"]["of_which_wait_percent"] / 100
    host = shares.get("schedule", 0.0) + document["coverage"]["glue_percent"] / 100
    for what, share, why in (
        ("no waiting", waiting, "named waits"),
        ("scheduler and Python between points hidden", host, "schedule and glue"),
        ("drafting for nothing", shares.get("draft", 0.0) + shares.get("extend", 0.0), "draft and extend"),
        ("cache work for nothing", shares.get("kv", 0.0), "kv"),
    ):
        found.append(Lever(what, _amdahl(share), True, f"{why}: {100 * share:.1f} % of the cycle"))
    return found


def _capped(lever: Lever, windows: Sequence[Mapping[str, Any]]) -> Lever:
    """The lever with what the device allows as its bound, where that is less.

    The device's idle time and what it runs for the lever's phases are all that could go: idle + busy of those, over the
    time between the starts of cycles' work on the device, in the idlest window.
    """
    if lever.what not in PHASES_OF or not windows:
        return lever
    share = max(_share(window, PHASES_OF[lever.what]) for window in windows)
    if lever.gain <= _amdahl(share):
        return lever
    why = f"idle and busy with that, the device is for {100 * share:.0f} % of a cycle; {lever.why}"
    return replace(lever, gain=_amdahl(share), why=why)


def _share(window: Mapping[str, Any], phases: Sequence[str]) -> float:
    own = sum(row["busy_ms"] for row in window["phases"] if row["name"].split(".")[0] in phases)
    return float((window["idle_ms"]["point"] + own) / window["period_ms"]["point"])


def _windows(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Deep windows that tell how long the device is idle: not those that the profiler itself made slower."""
    found = (document.get("device") or {}).get("windows") or []
    return [
        window for window in found
        if not window["on_cpu"] and window.get("idle_ms") and (_slowing(window) or 0.0) < SLOWED
    ]  # fmt: skip


def _slowing(window: Mapping[str, Any]) -> float | None:
    ratio = (window.get("cost") or {}).get("ratio")
    return ratio["low"] if ratio else None


def _amdahl(share: float) -> float:
    return share / (1 - share) if share < 1 else 0.0


@dataclass(frozen=True)
class Shorter:
    """A chain of ``steps`` drafts as predicted from a longer one: tokens a cycle and ms a cycle."""

    steps: int
    tokens: float
    cycle_ms: float

    @property
    def tokens_per_s(self) -> float:
        """The decode rate, tok/s."""
        return 1000 * self.tokens / self.cycle_ms


def shorter_chains(document: Mapping[str, Any]) -> list[Shorter]:
    """What each step count up to the profiled one would give; empty where acceptance by position is not known."""
    kept = [p["cumulative"] for p in document["acceptance"]["positions"]]
    if not kept or any(share is None for share in kept) or document["acceptance"]["length_tokens"] is None:
        return []
    cycle = document["cycle"]["mean_ms"]["point"]
    cost = {row["step"]: row["ms"] * row["cycles"] / document["cycle"]["count"] for row in document["draft_steps"]}
    return [
        Shorter(count, 1 + sum(kept[:count]), cycle - sum(ms for step, ms in cost.items() if step > count))
        for count in range(1, len(kept) + 1)
    ]


def _fewer_steps(document: Mapping[str, Any]) -> list[Lever]:
    chains = shorter_chains(document)
    if len(chains) < 2:
        return []
    now, best = chains[-1], max(chains[:-1], key=lambda chain: chain.tokens_per_s)
    gain = best.tokens_per_s / now.tokens_per_s - 1
    why = f"yields {best.tokens:.2f} tokens in {best.cycle_ms:.2f} ms; `specmeter sweep` measures it"
    steps = f"{best.steps} draft step{'s' if best.steps > 1 else ''}"
    return [Lever(f"{steps} instead of {now.steps}", gain, False, why)]
