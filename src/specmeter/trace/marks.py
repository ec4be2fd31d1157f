"""What a ring says of its sampling (when the probes were put in and out), and when records of it are missing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specmeter.runtime import layout
from specmeter.trace.cycles import MIXTURE
from specmeter.trace.ring import Records, Ring

# Kinds whose t1 is a moment of the host's clock.
_TIMED = (layout.KIND_HOST_SPAN, layout.KIND_VALUE, layout.KIND_MARK, layout.KIND_COLLECTIVE)


def sampling_marks(ring: Ring) -> NDArray[np.int64]:
    """(time, state) of the changes of sampling in one process."""
    marks = _marks(ring)
    found = np.stack([marks["t0"], marks["value"].astype(np.int64)], axis=1)
    if ring.first_position > 0 and len(found):
        # The change that held before the oldest one is overwritten: those cycles count for neither side.
        found = np.concatenate([[[np.iinfo(np.int64).min, MIXTURE]], found])
    if ring.gaps and len(found):
        # A change may be among the missing records: what holds from there on is not known before the next one.
        begins = [begin for begin, _end in missing(ring).tolist() if not _for_good(found, begin)]
        unknown = np.array([[begin, MIXTURE] for begin in begins], np.int64).reshape(-1, 2)
        found = np.concatenate([found, unknown])
        found = found[np.argsort(found[:, 0], kind="stable")]
    return found


def _for_good(marks: NDArray[np.int64], at: int) -> bool:
    """Whether the probes were put in for all cycles before ``at``, and no draw after it shows (they mark often)."""
    here = int(np.searchsorted(marks[:, 0], at, "right")) - 1
    around = marks[max(here, 0) : here + 2, 1]
    return here >= 0 and bool((around == layout.SAMPLING_ALL).all())


def missing(ring: Ring) -> NDArray[np.int64]:
    """(from, to) of each stretch of time in which records of a ring are missing, ns of perf_counter."""
    timed = np.flatnonzero(np.isin(ring.records["kind"], _TIMED)) if ring.gaps else np.zeros(0, np.int64)
    if not len(timed):
        return np.zeros((0, 2), np.int64)
    t1 = ring.records["t1"][timed].astype(np.int64)
    after = np.searchsorted(timed, np.array(ring.gaps))
    sides = np.stack([t1[np.maximum(after - 1, 0)], t1[np.minimum(after, len(timed) - 1)]], axis=1)
    # Threads complete their records in nearly the order of time, not quite.
    return np.sort(sides, axis=1)


def change_us(ring: Ring) -> float:
    """The median time that a change of the probes took, us; 0 where there is none."""
    marks = _marks(ring)
    # What follows a mixture puts nothing in or out: it says that the mixture is over.
    took = (marks["t1"] - marks["t0"])[1:][marks["value"][:-1] != 2]
    return float(np.median(took)) / 1e3 if len(took) else 0.0


def _marks(ring: Ring) -> Records:
    records = ring.records
    found: Records = records[(records["kind"] == layout.KIND_MARK) & (records["point"] == layout.POINT_SAMPLING)]
    return found
