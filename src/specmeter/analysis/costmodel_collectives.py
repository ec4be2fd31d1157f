"""Collectives belong to the phase that issues them: only so can it be said what the draft's cost."""

from __future__ import annotations

import re

import numpy as np

from specmeter.trace.plan import phase_of
from specmeter.trace.tables import Columns

# Points on collectives as recipes name them, whatever phase the name says.
COLLECTIVE = re.compile(r"\.(all_?reduce|(all_?)?gather|reduce_?scatter|all_?to_?all|broadcast|collective)$")
ISSUERS = ("draft", "verify", "extend")


def by_issuer(spans: Columns) -> Columns:
    """The spans, with each collective renamed from ``wait.all_reduce`` to ``draft.all_reduce`` and its like.

    The issuer is the span of a draft, verify or extend point in the same process that encloses it in time; its draft
    step is taken over. A collective that none encloses keeps its name. Self times stay as they are: the enclosing
    point's holds no collective.
    """
    points = spans["point"].astype(str)
    names, at = np.unique(points, return_inverse=True)
    collective = np.array([bool(COLLECTIVE.search(name)) for name in names])[at]
    if not bool(collective.any()):
        return spans
    leaf = np.array(["." in name and phase_of(name) in ISSUERS for name in names])[at] & ~collective
    renamed, step = points.astype(object), spans["step"].copy()
    for pid in np.unique(spans["pid"][collective]):
        inner = np.flatnonzero(collective & (spans["pid"] == pid))
        outer = np.flatnonzero(leaf & (spans["pid"] == pid))
        if not len(outer):
            continue
        outer = outer[np.argsort(spans["t0_ns"][outer], kind="stable")]
        before = np.searchsorted(spans["t0_ns"][outer], spans["t0_ns"][inner], side="right") - 1
        issuer = outer[np.maximum(before, 0)]
        within = spans["t0_ns"][inner] + spans["dur_ns"][inner] <= spans["t0_ns"][issuer] + spans["dur_ns"][issuer]
        good = (before >= 0) & within
        for i, o in zip(inner[good], issuer[good], strict=True):
            renamed[i] = f"{phase_of(points[o])}.{points[i].rpartition('.')[2]}"
        step[inner[good]] = spans["step"][issuer[good]]
    return {**spans, "point": renamed, "step": step}
