"""The tables of device time as text cells, for terminal and page alike: each gives (columns, rows)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmeter.analysis.kernel_classes import TITLES
from specmeter.analysis.stalls import RULE
from specmeter.reporters.inert import inert
from specmeter.reporters.numbers import MISSING, number, percent, units

Cells = tuple[list[str], list[list[str]]]
Window = Mapping[str, Any]
# Phases whose classes are shown, in the order of a cycle.
SHOWN = ("draft", "verify", "accept", "extend", "kv")


def title_of(name: str) -> str:
    """A class of kernels as a report writes it."""
    return TITLES.get(name, name)


def heading_of(window: Window) -> str:
    """What the window holds: ``Device time (deep window: 200 decode cycles, batch 1, 3 steps, verify as a graph)``."""
    cycles = window["cycles"]
    if not cycles:
        return "Device time (deep window)"
    kind = "plain" if cycles["kind"] == "plain" else "decode"
    words = [inert(window["setting"], 60)] if window["setting"] else []
    words.append(f"{cycles['cycles']} {kind} cycles")
    words += [f"batch {cycles['batch']}"] if cycles["batch"] is not None else []
    words += [f"{cycles['steps']} steps"] if cycles["steps"] else []
    if not window["on_cpu"]:
        words.append("verify as a graph" if cycles["graph"] else "verify eager")
    return f"Device time (deep window: {', '.join(words)})"


def other_window(window: Window) -> str:
    """One line on a window whose tables are not shown: another rank's, or another setting's."""
    words = window["verdict"]["sentence"] if window["verdict"] else f"no device times: {window['reason']}."
    setting = f"{inert(window['setting'], 60)}, " if window["setting"] else ""
    return f"{setting}rank {window['rank']} on {inert(window['host'], 40)}, process {window['pid']}: {words}"


def facts_line(window: Window) -> str:
    """The card, the share of the busy time that named leaf phases hold, and how far the clocks may be apart."""
    coverage, error = window["coverage"], window["clock_error_us"]
    clocks = "within an error that is not known" if error is None else f"within {error:.1f} us"
    return (
        f"{window['device'] or 'Unnamed device'}, process {window['pid']}: {coverage['leaf_percent']:.1f} % of the "
        f"busy time lies in kernels of named leaf phases, {coverage['glue_percent']:.1f} % in frames between them, "
        f"{coverage['outside_percent']:.1f} % outside; profiler and probes agree on the time {clocks}"
    )


def cost_line(window: Window) -> str:
    """What the profiler did to the cycle; empty where that is not known."""
    cost = window.get("cost") or {}
    ratio, inside, outside = cost.get("ratio"), cost.get("inside_ns"), cost.get("outside_ns")
    if not ratio or not inside or not outside:
        return f"What the profiler costs is not known: {cost['reason']}" if cost.get("reason") else ""
    ends = [ratio["low"], ratio["high"]]
    around = "just before" if left_words(cost) else "just before and after"
    return (
        f"Under the profiler a cycle takes {inside['point'] / 1e6:.3f} ms, {around} "
        f"{outside['point'] / 1e6:.3f} ms: {100 * (ratio['point'] - 1):+.1f} %"
        + (f" [{', '.join(f'{100 * (end - 1):+.1f}' for end in ends)}]" if None not in ends else "")
        + "; host times below contain it"
        + left_words(cost)
    )


def left_words(cost: Mapping[str, Any]) -> str:
    """That cycles after the window took longer than those before it; empty where they did not."""
    left = cost.get("left_ratio")
    if not left or left["low"] <= 1:
        return ""
    return (
        f". Cycles after it took {100 * (left['point'] - 1):+.1f} % [{100 * (left['low'] - 1):+.1f}, "
        f"{100 * (left['high'] - 1):+.1f}] against those before: the profiler stays in part"
    )


def phase_rows(window: Window) -> Cells:
    """Phases with busy, idle inside and before, host work and wait (ms), launch delay (us) and the verdict."""
    columns = ["phase", "busy", "idle in", "before", "host", "waits", "delay us", "kernels", "launched", "bound by"]
    rows = []
    for row in window["phases"]:
        delay = row["delay"]
        if row["busy_ms"] == 0 and row["host_work_ms"] + row["host_wait_ms"] < 5e-4:
            continue
        launched = row["graph"] if row["kernels"] else MISSING
        rows.append(
            [
                row["name"], number(row["busy_ms"]), number(row["idle_inside_ms"]), number(row["idle_before_ms"]),
                number(row["host_work_ms"]), number(row["host_wait_ms"]),
                f"{number(delay['median_us'], 1)} / {number(delay['p95_us'], 1)}" if delay["n"] else MISSING,
                f"{row['kernels']:.0f}", launched, bound_words(row["bound"]) if row["kernels"] else MISSING,
            ]
        )  # fmt: skip
    return columns, rows


def bound_words(bound: Mapping[str, Any]) -> str:
    """``host-bound 71 %``: the word with the share it rests on; of a mixed one the largest two."""
    shares = {"host": bound["host"], "waiting": bound["waiting"], "comm.": bound["communication"]}
    shares["device"] = bound["device"]
    largest = sorted(shares.items(), key=lambda item: -item[1])
    if bound["word"] == "mixed":
        return "mixed: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in largest[:2])
    return f"{bound['word']} {100 * largest[0][1]:.0f} %" if largest[0][1] > 0 else MISSING


def idle_rows(window: Window) -> Cells:
    """Where idle time comes from: the host's code during it, and the phase that ended it."""
    columns = ["idle because", "the host was in", "until", "ms", "share"]
    rows = [
        [
            row["cause"], " ".join(filter(None, (row["point"], f"({row['call']})" if row["call"] else ""))) or MISSING,
            row["next"], number(row["ms"]), f"{row['percent']:.1f} %",
        ]
        for row in window["idle"]["rows"]
    ]  # fmt: skip
    total = window["idle"]["total_ms"]
    if window["idle"]["rest_ms"] > 0:
        share = percent(window["idle"]["rest_ms"] / total if total else None)
        rows.append(["the rest", MISSING, MISSING, number(window["idle"]["rest_ms"]), share])
    return columns, rows


def class_rows(window: Window) -> Cells:
    """Classes of kernels by phase, ms a cycle (of operators on a CPU: the host's)."""
    table: dict[str, dict[str, float]] = {}
    for row in window["classes"]:
        if row["phase"] in SHOWN:
            table.setdefault(row["class"], {})[row["phase"]] = row["ms"]
    phases = [phase for phase in SHOWN if any(phase in row for row in table.values())]
    ordered = sorted(table.items(), key=lambda item: -sum(item[1].values()))
    rows = [[title_of(name), *(number(row.get(phase)) for phase in phases)] for name, row in ordered]
    return ["class, ms", *phases], rows


def width_rows(found: Mapping[str, Any]) -> Cells:
    """Verify against a plain step, class by class."""
    columns = ["class", "verify ms", "plain ms", "more", "factor", "kernels", "why"]
    rows = []
    for row in found["classes"]:
        factor = MISSING if row["factor"] is None else f"{row['factor']:.2f}"
        kernels = f"{row['verify_kernels']:.0f} / {row['plain_kernels']:.0f}"
        times = [number(row["verify_ms"]), number(row["plain_ms"]), f"{row['more_ms']:+.3f}"]
        rows.append([title_of(row["class"]), *times, factor, kernels, row["reason"]])
    idle = found["idle"]
    rows.append(
        ["idle inside", number(idle["verify_ms"]), number(idle["plain_ms"]), f"{idle['more_ms']:+.3f}", "", "", ""]
    )
    return columns, rows


def graph_rows(window: Window) -> Cells:
    """Graph hits by phase and batch."""
    columns = ["phase", "batch", "cycles", "by graph", "padded to"]
    rows = [
        [
            row["phase"], MISSING if row["batch"] is None else str(row["batch"]), str(row["cycles"]),
            str(row["graph_cycles"]), row["reason"] if row["padded"] is None else str(row["padded"]),
        ]
        for row in window["graphs"]
    ]  # fmt: skip
    return columns, rows


def step_rows(window: Window) -> Cells:
    """Single draft steps inside a fused graph."""
    columns = ["point", "step", "ms", "kernels"]
    names = {0: "before the steps", None: "after the steps"}
    rows = [
        [row["point"], names.get(row["step"], str(row["step"])), number(row["ms"]), str(row["kernels"])]
        for row in window["draft_steps"]
    ]
    return columns, rows


def name_rows(listed: Sequence[Mapping[str, Any]]) -> Cells:
    """Kernels (or operators) by name."""
    rows = [[row["name"], number(row["ms"]), f"{row['kernels']:.1f}", f"{row['percent']:.1f} %"] for row in listed]
    return ["name", "ms", "calls", "of busy"], rows


def other_cycles(window: Window) -> list[str]:
    """One line a kind of cycle that the tables leave out."""
    found = []
    for row in window["cycles"]["others"]:
        batch = f"batch {row['batch']}, " if row["batch"] is not None else ""
        steps = f"{row['steps']} steps, " if row["steps"] else ""
        words = (
            f"{row['cycles']} {row['kind']} cycles ({batch}{steps}verify {'as a graph' if row['graph'] else 'eager'})"
        )
        times = f": busy {row['busy_ms']:.3f} ms, idle {row['idle_ms']:.3f} ms" if "busy_ms" in row else ""
        found.append(f"Not in these tables: {words}{times}")
    if window["cycles"].get("stalled"):
        count = units(window["cycles"]["stalled"], "cycle")
        found.append(f"Not in these tables: {count} {RULE}, left out as stalls of the machine")
    return found
