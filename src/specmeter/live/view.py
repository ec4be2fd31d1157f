"""The live view as lines of styled text: no widget in it, so that a test reads what a person sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specmeter.live.recent import Recent
from specmeter.live.server import LiveServer
from specmeter.reporters.inert import inert
from specmeter.reporters.language import COLOURS, LETTERS
from specmeter.trace.plan import PHASES

Line = list[tuple[str, str]]
_BLOCKS, _PLAIN_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_REST = "rest"


@dataclass(frozen=True)
class Shown:
    """How to show: ``width`` in columns, ``seconds`` that figures are over, the baseline step in ms (None: unknown).

    ``keys``: somebody can press them.
    """

    width: int = 100
    seconds: int = 10
    baseline_ms: float | None = None
    unicode: bool = True
    keys: bool = True


def server_lines(server: LiveServer, second: int, shown: Shown, chosen: bool = False) -> list[Line]:
    """A heading and the lines of every rank. ``second`` is the present one of perf_counter."""
    alive = sum(1 for p in server.found if p.alive)
    state = "armed" if server.armed else ("not armed" if alive else "no process")
    mark = ">" if chosen else " "
    head: Line = [
        (f"{mark} {inert(server.link.id, 40)}", "bold reverse" if chosen else "bold"),
        (f"  {inert(server.engine, 40)}  ", ""),
        (state, "green" if server.armed else "yellow"),
        (f"  {alive} process{'es' if alive != 1 else ''}", ""),
    ]
    if server.lost:
        head.append((f"  {server.lost} record{'s' * (server.lost != 1)} lost", "red"))
    lines = [head]
    if server.fault:
        lines.append([(f"    {inert(server.fault, shown.width)}", "red")])
    for key in sorted(server.ranks):
        rank = server.ranks[key]
        recent = rank.stats.recent(second, shown.seconds)
        who = f"rank {key[1]}" if key[1] >= 0 else f"process {key[2]}"
        lines += rank_lines(who, recent, rank.stats.trend(second), shown)
    if not server.ranks:
        lines.append([(f"    {_without_cycles(server, alive, shown)}", "dim")])
    return [clip(line, shown.width) for line in lines]


def _without_cycles(server: LiveServer, alive: int, shown: Shown) -> str:
    """Why a server has no figures, or what to do about it."""
    if server.armed:
        return "no cycle yet since this look began"
    if alive:
        return "press a to arm" if shown.keys else f"`specmeter arm --link {inert(server.link.id, 40)}` arms it"
    return "its server has ended" if server.found else "waiting for the server"


def rank_lines(who: str, recent: Recent, trend: Sequence[float], shown: Shown) -> list[Line]:
    """One rank: the cycle bar, then what it yields, then acceptance and trend."""
    speed = f"  {recent.tokens_per_s:7.1f} tok/s"
    if recent.cycle_ms is None:
        plain = f"  plain step {recent.plain_ms:.2f} ms" if recent.plain_ms else "  no speculative cycle"
        quiet: Line = [
            (f"  {who:<14}", ""),
            (speed.strip(), "bold"),
            (f"{plain} in the last {recent.seconds} s", "dim"),
        ]
        return [quiet, [*_trend(trend, shown)]]
    lines = [[(f"  {who:<14}", ""), *bar(recent, max(10, shown.width - 30)), (f" {recent.cycle_ms:8.2f} ms", "bold")]]
    yields: Line = [(" " * 16, ""), (speed.strip(), "bold"), ("  accept ", ""), *_accept(recent, shown)]
    if recent.kept:
        yields.append((f"  kept {' '.join(f'{100 * share:.0f}' for share in recent.kept)} %", ""))
    if recent.batch is not None:
        yields.append((f"  batch {recent.batch:.1f}", ""))
    if recent.clean:
        yields.append((f"  probes in {100 * (1 - recent.clean / recent.cycles):.1f} %", "dim"))
    seam = "  seams -" if recent.seam_ms is None else f"  seams {recent.seam_ms:.2f} ms"
    return [*lines, yields, [*_trend(trend, shown), (seam, "dim" if recent.seam_ms is None else "")]]


def bar(recent: Recent, width: int) -> Line:
    """The mean cycle, a letter a phase, as in the report; ``?`` is what no leaf point covers."""
    assert recent.cycle_ms is not None
    parts = [(p, recent.phases_ms[p]) for p in PHASES if p in recent.phases_ms] + [(_REST, max(recent.rest_ms, 0.0))]
    line: Line = [("|", "")]
    done, total = 0.0, max(sum(ms for _n, ms in parts), 1e-9)
    for name, ms in parts:
        begin, done = round(done * width / total), done + ms
        cells = round(done * width / total) - begin
        key = "unattributed" if name == _REST else name
        line.append((LETTERS[key] * cells, COLOURS[key]))
    return [*line, ("|", "")]


def legend(recent: Recent, width: int = 0) -> str:
    """The shares of the bar in words, in lines of at most ``width`` columns (0: one line)."""
    if recent.cycle_ms is None:
        return ""
    whole = recent.split_ms or recent.cycle_ms
    parts = [f"{LETTERS[p]}={p} {100 * ms / whole:.1f} %" for p, ms in recent.phases_ms.items()]
    lines = [""]
    for part in (*parts, f"?=between points {100 * max(recent.rest_ms, 0.0) / whole:.1f} %"):
        longer = f"{lines[-1]} {part}".lstrip()
        if not width or len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def plain_text(lines: Sequence[Line]) -> str:
    """Lines without their styles."""
    return "\n".join("".join(text for text, _style in line).rstrip() for line in lines)


def clip(line: Line, width: int) -> Line:
    """The line cut to ``width`` columns; all of its characters are one column wide."""
    out: Line = []
    for text, style in line:
        if width <= 0:
            break
        out.append((text[:width], style))
        width -= len(text)
    return out


def _accept(recent: Recent, shown: Shown) -> Line:
    length = recent.accept_length
    if length is None:
        return [("not read", "dim")]
    step = recent.plain_ms or shown.baseline_ms
    assert recent.cycle_ms is not None
    if not step:
        return [(f"{length:.2f}", "bold"), (" (break-even not known)", "dim")]
    even = recent.cycle_ms / step
    return [(f"{length:.2f}", "bold green" if length >= even else "bold red"), (f" (break-even {even:.2f})", "")]


def _trend(trend: Sequence[float], shown: Shown) -> Line:
    blocks = _BLOCKS if shown.unicode else _PLAIN_BLOCKS
    width = min(len(trend), max(10, shown.width - 60))
    values = list(trend)[-width:]
    most = max(values, default=0.0) or 1.0
    # The lowest block is kept for nothing at all, so that a slow second and an idle one differ.
    drawn = "".join(blocks[0] if not v else blocks[1 + min(7, int(7 * v / most))] for v in values)
    return [(" " * 16, ""), (drawn, "cyan")]
