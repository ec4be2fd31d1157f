"""What to try next: what the user runs now, the baseline, the cost model's best, then what Optuna suggests."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specmeter.engines import Setting
from specmeter.errors import needs_extra
from specmeter.tune.space import Candidate, Space

Predict = Callable[[Setting], float | None]
"""Predicted decode rate in tokens a second of a setting with the user's own flags; None where the model cannot say."""
# A candidate predicted to be so much slower than the best prediction is not run: the model is within 5 to 9 % here.
HOPELESS = 0.15
LISTED = 24
ASKS = 60


class Planner:
    """Proposes candidates, each once; hears what came of them."""

    def __init__(self, space: Space, start: Candidate, predict: Predict | None, seed: int) -> None:
        need_optuna(space)
        self.space = space
        self.skipped: dict[str, str] = {}
        self.predicted = _predictions(space.settings, predict)
        self._seed = seed
        self._seen: set[str] = set()
        self._queue = [start, start.plain, *self._own(start)]
        # Once for all: Optuna refuses a choice whose values change, and settings go on being left out in the search.
        self._labels = [setting.label for setting in space.settings if setting.label not in self.skipped]
        self._study: Any = None

    def _own(self, start: Candidate) -> list[Candidate]:
        """Every setting with the user's own knobs, the best prediction first, the hopeless left out."""
        known = [value for setting, value in self.predicted.items() if setting.steps]
        best = max(known, default=0.0)
        chosen: list[Setting] = []
        for setting in sorted(self.space.settings, key=lambda s: (-self.predicted.get(s, math.inf), s)):
            value = self.predicted.get(setting)
            if value is not None and value < (1 - HOPELESS) * best and setting.steps:
                self.skipped[setting.label] = f"predicted {value:.1f} tok/s, the best prediction is {best:.1f}"
            else:
                chosen.append(setting)
        found = [Candidate(setting, start.flags, start.env) for setting in chosen]
        return [candidate for candidate in found if self.space.allows(candidate)][:LISTED]

    def settings_in_order(self) -> list[Setting]:
        """The settings of the first start of an engine that serves several: the queue's, each once.

        A command whose setting is not known has a start of its own.
        """
        return list(dict.fromkeys(candidate.setting for candidate in self._queue if not candidate.own))

    def queued(self) -> int:
        """How many candidates are planned already, apart from what Optuna may suggest."""
        return len({candidate.key for candidate in self._queue} - self._seen)

    def seen(self, candidates: Iterable[Candidate]) -> None:
        """These have been run (by a journal's earlier session, or together)."""
        self._seen.update(candidate.key for candidate in candidates)

    def next(self) -> Candidate | None:
        """The next candidate not yet seen; None when the space is exhausted."""
        while self._queue:
            candidate = self._queue.pop(0)
            if candidate.key not in self._seen:
                return self._take(candidate)
        return self._suggested() if suggests(self.space) else None

    def _take(self, candidate: Candidate) -> Candidate:
        self._seen.add(candidate.key)
        return candidate

    def _suggested(self) -> Candidate | None:
        for _ in range(ASKS):
            candidate = self._ask()
            if candidate.key not in self._seen and self.space.allows(candidate):
                return self._take(candidate)
        left = [c for c in self.space.candidates() if c.key not in self._seen and c.setting.label not in self.skipped]
        return self._take(random.Random(self._seed).choice(left)) if left else None

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """A candidate's mean log rate; None if it is infeasible."""
        if not suggests(self.space):
            return
        optuna = _optuna()
        study, distributions = self._opened(), self._distributions()
        parameters = self._parameters(candidate)
        if any(value not in distributions[name].choices for name, value in parameters.items()):
            return  # the starting point may lie outside the space
        state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(params=parameters, distributions=distributions, value=value, state=state)
        )

    def _ask(self) -> Candidate:
        trial = self._opened().ask(self._distributions())
        labels = {setting.label: setting for setting in self.space.settings}
        values = {d.name: _value(trial.params[d.name]) for d in self.space.dimensions}
        return self.space.candidate(labels[trial.params["setting"]], values)

    def _opened(self) -> Any:
        """The study: tree-structured Parzen estimators (Bergstra et al., NIPS 2011) as Optuna has them, seeded."""
        if self._study is None:
            optuna = _optuna()
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=6)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        return self._study

    def _distributions(self) -> dict[str, Any]:
        categorical = _optuna().distributions.CategoricalDistribution
        return {
            "setting": categorical(self._labels),
            **{d.name: categorical([_word(value) for value in d.values]) for d in self.space.dimensions},
        }

    def _parameters(self, candidate: Candidate) -> dict[str, str]:
        knobs = dict((*candidate.flags, *candidate.env))
        return {
            "setting": candidate.setting.label,
            **{d.name: _word(knobs.get(d.name)) for d in self.space.dimensions},
        }


def suggests(space: Space) -> bool:
    """Whether the space has more than is listed one by one, so that Optuna suggests what to try."""
    return bool(space.dimensions) or len(space.settings) > LISTED


def need_optuna(space: Space) -> None:
    """Raise SpecmeterError (exit 5) where the space needs Optuna and it is not there; before anything is started."""
    if suggests(space):
        _optuna()


def _word(value: str | None) -> str:
    return "default" if value is None else f"={value}"


def _value(word: str) -> str | None:
    return None if word == "default" else word[1:]


def _predictions(settings: Sequence[Setting], predict: Predict | None) -> dict[Setting, float]:
    if predict is None:
        return {}
    found = {setting: predict(setting) for setting in settings}
    return {setting: value for setting, value in found.items() if value is not None and value > 0}


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise needs_extra(
            f"A space with flags or variables, or of more than {LISTED} settings, needs Optuna.",
            str(error),
            "tune",
            ", or narrow the space to few speculative settings",
        ) from error
