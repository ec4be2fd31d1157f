"""Is a run worse than a saved one beyond noise? Accept length, cycle and break-even, each with its own threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmeter.analysis.setting_names import shown_setting
from specmeter.analysis.stalls import without_stalls
from specmeter.analysis.stats import Interval, paired_ratio
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import Run

WORSE, FINE, UNSETTLED, ABSENT = "worse", "not worse", "unsettled", "not compared"
# Equal starts of one server differed by up to 6 % in their cycle, so less is no finding across two starts. The
# break-even divides by the baseline of the same start, and acceptance does not depend on the start at all.
DEFAULTS: Mapping[str, float] = {"accept_length": 0.02, "cycle": 0.06, "break_even": 0.06}
_UNITS = {"accept_length": "tokens", "cycle": "ms", "break_even": "tokens"}
# A sign for each: +1 where more is worse.
_BAD = {"accept_length": -1, "cycle": 1, "break_even": 1}
_MIN_PROMPTS = 3


@dataclass(frozen=True)
class Finding:
    """One quantity of one setting.

    ``before`` and ``after`` in tokens or ms (geometric means over the shared prompts where prompts are shared), their
    ratio with its interval, the threshold as a share, and the word: worse, not worse, unsettled or not compared (with
    the ``reason``).
    """

    setting: str
    quantity: str
    unit: str
    before: float | None
    after: float | None
    ratio: Interval | None
    threshold: float
    word: str
    reason: str = ""


def judge(new: Run, saved: Run, thresholds: Mapping[str, float] = DEFAULTS) -> tuple[Finding, ...]:
    """Every quantity of every setting that both runs hold.

    ``worse`` only if the whole 95 % interval of new/saved lies beyond 1 +- threshold on the bad side; ``not worse`` if
    the bad end of it does not; else ``unsettled``. Raises SpecmeterError where the runs cannot be compared at all.
    """
    _comparable(new, saved)
    ours, theirs = _settings(new), _settings(saved)
    shared = [name for name in theirs if name in ours]
    if not shared:
        raise SpecmeterError(
            "The two runs share no setting.",
            f"{new.path} has {', '.join(ours) or 'none'}; {saved.path} has {', '.join(theirs) or 'none'}.",
            "Measure the saved run's setting again, with the same --steps.",
        )
    found = [
        _finding(new, saved, name, quantity, ours[name].get(quantity), theirs[name].get(quantity), thresholds[quantity])
        for name in shared
        for quantity in _UNITS
    ]
    if all(f.word == ABSENT for f in found):
        raise SpecmeterError(
            "Nothing in the two runs can be compared.",
            "; ".join(sorted({f.reason for f in found})),
            "Save a run of specmeter profile with acceptance and a baseline.",
        )
    return tuple(found)


def _comparable(new: Run, saved: Run) -> None:
    for run in (new, saved):
        kind = run.analysis.get("kind")
        if kind not in ("profile", "sweep"):
            raise SpecmeterError(
                f"{run.path} holds no profile or sweep to judge.",
                f"Its analysis is of kind {kind}." if kind else "It has no analysis.json: was it cut off?",
                "Name a run directory of specmeter profile or sweep.",
            )
    engines = [_engine(run) for run in (new, saved)]
    if engines[0] != engines[1]:
        raise SpecmeterError(
            "The runs are of different engines.", f"{engines[0]} and {engines[1]}.", "Gate an engine against itself."
        )
    models = [_model(run) for run in (new, saved)]
    if all(models) and models[0] != models[1]:
        what, why = "The runs are of different models.", f"{new.path} served {models[0]}, {saved.path} {models[1]}."
        raise SpecmeterError(what, why, "Gate a model against itself, served under the same name.")
    prompts = [run.run.get("prompts") for run in (new, saved)]
    if prompts[0] != prompts[1]:
        raise SpecmeterError(
            "The runs used different prompts.",
            f"{prompts[0]} and {prompts[1]}: acceptance depends on content.",
            "Record both with the same --prompts, --kind and --seed.",
        )
    sums = [run.run.get("prompts_sha256") for run in (new, saved)]
    if all(sums) and sums[0] != sums[1]:
        raise SpecmeterError(
            "The runs used different prompts under one name.",
            f"The texts of {prompts[0]} are not the same in both: acceptance depends on content.",
            "Record both with the same prompt file.",
        )
    _same_texts(new, saved)


def _same_texts(new: Run, saved: Run) -> None:
    """Files of one name may hold different prompts, or servers of one engine different models.

    A prompt counts as many tokens in both runs then only by chance. Raises SpecmeterError where most differ: a chat
    template may put a date into some of them.
    """
    ours, theirs = _prompt_lengths(new), _prompt_lengths(saved)
    shared = sorted(ours.keys() & theirs.keys())
    other = [prompt for prompt in shared if not ours[prompt] & theirs[prompt]]
    if shared and 2 * len(other) > len(shared):
        first, counts = other[0], f"{len(other)} of {len(shared)} prompts differ in their tokens"
        raise SpecmeterError(
            "The runs used different prompts under the same names, or another model.",
            f"{counts}: {first} has {min(ours[first])} in {new.path} and {min(theirs[first])} in {saved.path}.",
            "Record both with the same prompt file, model and chat template.",
        )


def _prompt_lengths(run: Run) -> dict[str, set[int]]:
    """By prompt the tokens that the server counted, of finished requests; empty where it did not count."""
    table = run.requests
    found: dict[str, set[int]] = {}
    if table and "error" in table:
        for prompt, tokens, error in zip(table["prompt_id"], table["prompt_tokens"], table["error"], strict=True):
            if not error and tokens > 0:
                found.setdefault(str(prompt), set()).add(int(tokens))
    return found


def missing_settings(new: Run, saved: Run) -> list[str]:
    """The settings that the saved run has and the new one lacks: nothing is said of them."""
    ours = _settings(new)
    return [name for name in _settings(saved) if name not in ours]


def _model(run: Run) -> str:
    """The last part of the name that the server gave its model: CI may keep it in another folder each time."""
    return str(run.run.get("model") or "").rstrip("/").rpartition("/")[2]


def _engine(run: Run) -> str:
    return str((run.analysis.get("engine") or {}).get("name") or run.plan.get("engine") or "unknown")


def _settings(run: Run) -> dict[str, dict[str, Interval | float | None]]:
    """By setting: the saved figures, as intervals where there are such."""
    document = run.analysis
    if document["kind"] == "sweep":
        return {
            str(arm["setting"]): {
                "accept_length": _interval(arm.get("accept_length_tokens")),
                "cycle": _interval(arm.get("cycle_ms")),
                "break_even": _interval(arm.get("break_even_interval") or arm.get("break_even_tokens")),
            }
            for arm in document["arms"]
            if arm["setting"] != document.get("baseline")
        }
    settings = [name for name in run.run.get("settings") or ["server"] if name != "baseline"]
    return {
        shown_setting(run, str(document.get("setting") or (settings or ["server"])[0])): {
            "accept_length": _interval(document["acceptance"]["length_tokens"]),
            "cycle": _interval(document["cycle"]["mean_ms"]),
            "break_even": _interval(document["break_even_tokens"]),
        }
    }


def _interval(value: Any) -> Interval | float | None:
    if value is None or isinstance(value, (int, float)):
        return value
    low = -math.inf if value["low"] is None else value["low"]
    high = math.inf if value["high"] is None else value["high"]
    return Interval(low, value["point"], high, value["level"], value["method"], value["n"], value["unit"])


def _finding(
    new: Run,
    saved: Run,
    setting: str,
    quantity: str,
    after: Interval | float | None,
    before: Interval | float | None,
    threshold: float,
) -> Finding:
    unit = _UNITS[quantity]
    if before is None and after is None:
        return Finding(setting, quantity, unit, None, None, None, threshold, ABSENT, "neither run has it")
    if before is None or after is None:
        lacking = saved if before is None else new
        raise SpecmeterError(
            f"{quantity.replace('_', ' ')} of {setting} cannot be judged.",
            f"{lacking.path} has none, the other run does.",
            "Record it again with the same options (profile reads acceptance and measures a baseline).",
        )
    paired = _paired(new, saved, setting, quantity)
    if paired is not None:
        first, second, ratio = paired
    else:
        first, second = (v.point if isinstance(v, Interval) else float(v) for v in (before, after))
        ratio = _independent(after, before)
    word, reason = _word(ratio, threshold, _BAD[quantity])
    return Finding(setting, quantity, unit, first, second, ratio, threshold, word, reason)


def _word(ratio: Interval, threshold: float, bad: int) -> tuple[str, str]:
    if not (math.isfinite(ratio.low) and math.isfinite(ratio.high)):
        return UNSETTLED, f"no interval that tells anything, over {ratio.n} {ratio.unit}{'' if ratio.n == 1 else 's'}"
    worst, mildest = (ratio.high, ratio.low) if bad > 0 else (1 / ratio.low, 1 / ratio.high)
    if mildest > 1 + threshold:
        return WORSE, ""
    if worst <= 1 + threshold:
        return FINE, ""
    half = math.log(ratio.high / ratio.low) / 2
    away = abs(math.log(1 + threshold) - bad * math.log(ratio.point))
    # The half width falls with the root of the number of units.
    need = math.ceil(ratio.n * (half / away) ** 2) if away > 0.05 * half else None
    more = f"about {need} {ratio.unit}s would settle it" if need is not None else "it sits on the threshold"
    return UNSETTLED, more


def _paired(new: Run, saved: Run, setting: str, quantity: str) -> tuple[float, float, Interval] | None:
    """Before, after and the ratio prompt by prompt, since prompts differ more than runs; None with too few shared."""
    a, b = _by_prompt(new, setting, quantity), _by_prompt(saved, setting, quantity)
    shared = sorted(a.keys() & b.keys())
    if len(shared) < _MIN_PROMPTS:
        return None
    ours, theirs = [a[p] for p in shared], [b[p] for p in shared]
    before = math.exp(float(np.mean(np.log(theirs))))
    return before, math.exp(float(np.mean(np.log(ours)))), paired_ratio(ours, theirs, "prompt")


def _by_prompt(run: Run, setting: str, quantity: str) -> dict[str, float]:
    cycles = run.cycles
    if not cycles or not len(cycles["t0_ns"]):
        return {}
    good = (cycles["kind"] == "decode") & (cycles["probed"] == 1)
    if quantity != "accept_length":
        # The first and the last cycle of a request are dropped for their times only.
        good &= cycles["dropped"] == ""
    good &= (cycles["rank"] == cycles["rank"].min()) & (cycles["prompt_id"] != "")
    names = [name for name in set(cycles["setting"].tolist()) if shown_setting(run, str(name)) == setting]
    mine, plain = good & np.isin(cycles["setting"], names), good & (cycles["setting"] == "baseline")
    if quantity != "accept_length":
        mine, plain = without_stalls(cycles["dur_ns"], mine), without_stalls(cycles["dur_ns"], plain)
    prompts = sorted(set(cycles["prompt_id"][mine].tolist()))
    out = {}
    for prompt in prompts:
        of = cycles["prompt_id"] == prompt
        value = _value(quantity, cycles, mine & of, plain & of)
        if value is not None:
            out[str(prompt)] = value
    return out


def _value(quantity: str, cycles: Mapping[str, Any], mine: Any, plain: Any) -> float | None:
    if not bool(np.any(mine)):
        return None
    time = float(cycles["dur_ns"][mine].mean()) / 1e6
    if quantity == "cycle":
        return time
    if quantity == "break_even":
        return time / (float(cycles["dur_ns"][plain].mean()) / 1e6) if bool(np.any(plain)) else None
    accepted, batch = cycles["accepted"][mine], np.maximum(cycles["batch"][mine], 1)
    known = accepted >= 0
    return 1 + float(accepted[known].sum() / batch[known].sum()) if bool(known.any()) else None


def _independent(after: Interval | float, before: Interval | float) -> Interval:
    """The ratio of two estimates that share nothing: half widths of the logarithms add in squares (delta method)."""
    halves, points, count = [], [], []
    for value in (after, before):
        if isinstance(value, Interval) and value.low > 0 and math.isfinite(value.high):
            halves.append(math.log(value.high / value.low) / 2)
        else:
            halves.append(math.inf)
        points.append(value.point if isinstance(value, Interval) else float(value))
        count.append(value.n if isinstance(value, Interval) else 0)
    ratio, half = points[0] / points[1], math.hypot(*halves)
    method, unit = "two independent estimates, delta method on logs", after.unit if isinstance(after, Interval) else ""
    if not math.isfinite(half):
        return Interval(-math.inf, ratio, math.inf, 0.95, method, min(count), unit)
    return Interval(ratio * math.exp(-half), ratio, ratio * math.exp(half), 0.95, method, min(count), unit)


def passed(findings: Sequence[Finding]) -> bool:
    """True unless something got worse; what is unsettled does not fail a job, but is said."""
    return all(f.word != WORSE for f in findings)
