"""Huge pages under the weights: decoding reads all of them every token, and with pages of 4 kB the look-up of addresses
takes a noticeable part of that (Linux, Documentation/admin-guide/mm/transhuge.rst).

The packed layouts give no address of their memory, so what loading filled is found by looking: the blocks of the size
of a huge page, in private anonymous memory, that were mostly empty before and are mostly resident after. Only these are
collapsed (MADV_COLLAPSE, Linux 6.1): thread stacks, files, the allocator's reserves, an unused cache and whatever the
process held before stay as they are. The pages that a block lacked are all that resident memory grows by.
Nothing here raises: where the kernel does not do it, the pages stay small and the reason is kept.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
PROCESS = Path("/proc/self")
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
# The share of a block's pages that must be resident. Freed memory of loading leaves holes in the allocator's arenas;
# at 3/4 the blocks hold six sevenths of what is resident, and filling their holes takes 2 % of the process's memory.
SHARE = 0.75
_LOOK = 1 << 30  # bytes that one look at residency covers: 256 kB of answer


@dataclass(frozen=True)
class HugePages:
    """What came of it: ``size`` bytes are in huge pages now, which took ``growth`` bytes of memory more than before.

    ``why`` says why there are none, or what is left to the kernel; empty if all went well.
    """

    size: int = 0
    growth: int = 0
    why: str = ""

    def __str__(self) -> str:
        if not self.size:
            return f"no huge pages: {self.why}"
        return f"{self.size >> 20} MB in huge pages" + (f", {self.why}" if self.why else "")


OFF = HugePages(why="turned off")


@dataclass(frozen=True)
class Mapping:
    """Addresses ``start`` up to ``end`` of one mapping."""

    start: int
    end: int


def anonymous_mapping(line: str) -> Mapping | None:
    """The mapping of a line of /proc/PID/maps if it is private, readable, writable memory of no file and no stack."""
    found = re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ (\d+)\s*(.*)", line.rstrip())
    if found is None or int(found[3]):
        return None
    name = found[4]
    if name and name != "[heap]" and not name.startswith("[anon:"):
        return None
    return Mapping(int(found[1], 16), int(found[2], 16))


def refusal(system: Path = SYSTEM, process: Path = PROCESS) -> str:
    """Why there can be no huge pages here, or nothing if there can."""
    if not sys.platform.startswith("linux"):
        return "they need Linux"
    try:
        mode = (system / "enabled").read_text()
        if "[never]" in mode:
            return f"{system / 'enabled'} says never"
        _block_size(system)
        status = (process / "status").read_text()
    except (OSError, ValueError):
        return "this kernel does not tell of transparent huge pages"
    # Since Linux 5.0; without the line there is nothing to turn them off for one process by.
    return "turned off for this process by its parent or itself" if re.search(r"THP_enabled:\s*0", status) else ""


def filled_blocks() -> dict[int, int]:
    """{address: resident bytes} of each block that is full enough to be worth a huge page. Empty if none can be had."""
    if refusal():
        return {}
    try:
        lines = (PROCESS / "maps").read_text(errors="replace").splitlines()
        size, libc = _block_size(SYSTEM), ctypes.CDLL(None, use_errno=True)
        found = (mapping for mapping in map(anonymous_mapping, lines) if mapping is not None)
        return {at: held for mapping in found for at, held in _residency(libc, mapping, size) if held >= SHARE * size}
    except (OSError, ValueError, AttributeError, MemoryError):
        return {}


def collapse(before: dict[int, int]) -> HugePages:
    """Puts the blocks that were filled since ``before`` (of ``filled_blocks``) into huge pages."""
    why = refusal()
    if why:
        return HugePages(why=why)
    held = {at: resident for at, resident in filled_blocks().items() if at not in before}
    if not held:
        return HugePages(why="no block of the weights is large enough")
    try:
        size, libc = _block_size(SYSTEM), ctypes.CDLL(None, use_errno=True)
        done, why = _collapse_runs(libc, sorted(held), size)
    except (OSError, ValueError, AttributeError) as error:
        return HugePages(why=str(error))
    return HugePages(len(done) * size, sum(size - held[at] for at in done), why)


def _block_size(system: Path) -> int:
    return int((system / "hpage_pmd_size").read_text())


def _residency(libc: ctypes.CDLL, mapping: Mapping, size: int) -> Iterator[tuple[int, int]]:
    """(address, resident bytes) of each whole block of ``mapping``, as mincore(2) tells."""
    at, end = -(-mapping.start // size) * size, mapping.end // size * size
    pages = size // mmap.PAGESIZE
    while at < end:
        length = min(end - at, max(_LOOK // size, 1) * size)
        answer = np.empty(length // mmap.PAGESIZE, np.uint8)
        if libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(length), ctypes.c_void_p(answer.ctypes.data)):
            return  # it is gone, or the call is forbidden
        counts = (answer & 1).reshape(-1, pages).sum(1, dtype=np.int64)
        for index in np.flatnonzero(counts).tolist():
            yield at + index * size, int(counts[index]) * mmap.PAGESIZE
        at += length


def _collapse_runs(libc: ctypes.CDLL, blocks: list[int], size: int) -> tuple[list[int], str]:
    """The blocks that are huge pages now, and why some are not. A call covers neighbours: each costs."""
    done: list[int] = []
    why = ""
    for run in _runs(blocks, size):
        number = _advise(libc, run[0], len(run) * size, MADV_COLLAPSE)
        if number == errno.EINVAL:
            # Linux before 6.1: a kernel thread collapses what is advised, over the next minutes.
            advised = _advise(libc, run[0], len(run) * size, MADV_HUGEPAGE) == 0
            why = "left to the kernel, which makes them over the next minutes" if advised else _words(number)
        elif number:
            # Some of the run may have succeeded, and only single blocks tell which.
            tried = {at: _advise(libc, at, size, MADV_COLLAPSE) for at in run}
            done += [at for at, failed in tried.items() if not failed]
            why = _words(number)
        else:
            done += run
    return done, why


def _runs(blocks: list[int], size: int) -> list[list[int]]:
    """Ascending addresses of blocks, neighbours together."""
    runs: list[list[int]] = []
    for at in blocks:
        if runs and runs[-1][-1] + size == at:
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs


def _advise(libc: ctypes.CDLL, at: int, length: int, advice: int) -> int:
    """0, or the number of the error."""
    failed = libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), advice)
    return ctypes.get_errno() if failed else 0


def _words(number: int) -> str:
    if number in (errno.ENOMEM, errno.EAGAIN):
        return "the kernel ran out of free huge pages"
    return f"the kernel refused ({errno.errorcode.get(number, number)})"
