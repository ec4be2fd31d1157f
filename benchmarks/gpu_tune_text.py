"""The results of sglang_tune_gpu.py as text: what was foretold, what the search found, what the proof shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(found: Mapping[str, Any], sizes: Mapping[str, str]) -> str:
    """All tables that there are data for."""
    lines = [f"== {found['subject']}: SGLang 0.5.16 tuned, against {found['default_steps']} steps and no speculation"]
    if found.get("search"):
        lines += _search(found["search"], found.get("predicted"))
    for size, words in sizes.items():
        if proof := found.get(f"proof.{size}"):
            lines += ["", f"The proof, {words}:", *_proof(proof, found.get("predicted"), found.get("search"))]
    failed = [f"{name}: {start['reason']}" for name, start in (found.get("starts") or {}).items() if start["reason"]]
    return "\n".join([*lines, *(["", "not up:", *failed] if failed else [])]) + "\n"


def _search(search: Mapping[str, Any], predicted: Mapping[str, Any] | None) -> list[str]:
    """A row a step count: the search's rate in its one start, the model's beforehand, and the error of both kinds."""
    rows, told = search["rows"], (predicted or {}).get("rows") or {}
    lines = [search["line"]]
    if predicted:
        pays = {True: "it pays", False: "it does not pay", None: "no baseline"}[predicted["pays"]]
        lines.append(f"foretold from {predicted['from_steps']} steps: best {predicted['best']}, {pays}")
    lines.append("   k  searched tok/s    AL   foretold tok/s (bounds)         error   error against its own 3 steps")
    own = _error(rows, told, "3")
    for k in sorted(rows, key=int):
        row, rate = rows[k], rows[k]["tok_s"]
        text = f"{k:>4}  {_number(rate, 1):>13}  {_number(row['accept_length'], 2):>5}"
        interval, error = (told.get(k) or {}).get("tokens_per_s"), _error(rows, told, k)
        if interval:
            bounds = f"[{_number(interval['low'], 1)}, {_number(interval['high'], 1)}]"
            text += f"   {_number(interval['point'], 1):>8} {bounds:<18} {_percent(error):>9}"
            if error is not None and own is not None:
                text += f"   {_percent((1 + error) / (1 + own) - 1):>9}"
        lines.append(text + ("  left the race" if row["raced_out"] else ""))
    return lines


def _error(rows: Mapping[str, Any], told: Mapping[str, Any], k: str) -> float | None:
    """Foretold over measured, less one."""
    measured, interval = (rows.get(k) or {}).get("tok_s"), (told.get(k) or {}).get("tokens_per_s")
    return interval["point"] / measured - 1 if measured and interval else None


def _proof(
    proof: Mapping[str, Any], predicted: Mapping[str, Any] | None, search: Mapping[str, Any] | None
) -> list[str]:
    if "pairs" not in proof:
        return [proof.get("reason", "nothing")]
    lines = []
    for arm in proof["arms"]:
        speed = arm["tokens_per_s"] or {"low": None, "point": None, "high": None}
        starts = ", ".join(f"{rate:.1f}" for rate in arm["start_rates_tok_s"])
        label = f" ({search['tuned']} steps)" if arm["name"] == "tuned" and search else ""
        lines.append(f"  {arm['name'] + label:<20} {_interval(speed, 1)} tok/s, starts {starts}")
    for pair in proof["pairs"]:
        name = f"{pair['arm']}/{pair['against']}"
        ratio = pair["ratio"] or {"low": None, "point": None, "high": None}
        welch = proof["welch"].get(name)
        more = f"; Welch {_interval(welch, 3)}" if welch else ""
        told = _foretold(name, predicted, search)
        line = f"  {name:<20} {_interval(ratio, 3)} {pair['verdict']}{more}"
        lines.append(line + (f"; foretold {told:.3f}" if told else "") + f" {pair['reason']}".rstrip())
    lines.append(
        f"  starts differ by {_number(proof['start_percent'], 2)} %, blocks by {_number(proof['block_percent'], 2)} %"
    )
    lines.append(f"  same greedy ids as baseline.1: {proof['same_ids']}")
    return lines


def _foretold(name: str, predicted: Mapping[str, Any] | None, search: Mapping[str, Any] | None) -> float | None:
    """The ratio that the model gave beforehand; its plain decoding is the profile's own."""
    if not predicted or not search:
        return None
    rows: Mapping[str, Any] = predicted["rows"]
    rates = {"default": _rate(rows, "3"), "tuned": _rate(rows, str(search["tuned"]))}
    rates["baseline"] = (rows.get("3") or {}).get("plain_tok_s")
    ours, theirs = (rates[part] for part in name.split("/"))
    return ours / theirs if ours and theirs else None


def _rate(rows: Mapping[str, Any], k: str) -> float | None:
    interval = (rows.get(k) or {}).get("tokens_per_s")
    return interval["point"] if interval else None


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _interval(ends: Mapping[str, Any], places: int) -> str:
    low, point, high = (_number(ends[end], places) for end in ("low", "point", "high"))
    return f"{point} [{low}, {high}]"
