"""Huge pages under the weights: what is collapsed, what is left alone, and what is said where the kernel refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmeter.eagle.huge_pages import HugePages, Mapping, anonymous_mapping, filled_blocks, refusal

# In a process of its own: four blocks full, one of them half and one empty, in a mapping that nothing else shares.
CHILD = """
import ctypes, errno, mmap, re, sys
from specmeter.eagle import huge_pages as h
libc = ctypes.CDLL(None, use_errno=True)
{before}
seen = h.filled_blocks()
size = 2 << 20
region = mmap.mmap(-1, 8 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
base = ctypes.addressof(ctypes.c_char.from_buffer(region))
first = -(-base // size) * size - base
for block in range(4):
    region[first + block * size : first + (block + 1) * size] = bytes([block + 1]) * size
region[first + 4 * size : first + 4 * size + size // 2] = b"h" * (size // 2)
found = h.collapse(seen)
for block in range(4):
    assert region[first + block * size : first + (block + 1) * size] == bytes([block + 1]) * size
huge, inside = 0, False
for line in open("/proc/self/smaps"):
    if re.match("[0-9a-f]+-", line):
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        inside = low <= base + first < high
    elif inside and line.startswith("AnonHugePages:"):
        huge += int(line.split()[1]) << 10
print(found.size >> 21, found.growth, huge >> 21, "|", found)
"""


def collapsed(before: str = "") -> tuple[list[int], str]:
    """[blocks reported, bytes grown, blocks of the region that the kernel counts], and the words."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(before=before)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    numbers, words = done.stdout.strip().split(" | ")
    return [int(number) for number in numbers.split()], words


@pytest.mark.skipif(bool(refusal()), reason=f"no huge pages here: {refusal()}")
class TestHere:
    """Where this kernel has huge pages."""

    def test_what_was_filled_is_in_huge_pages_and_what_was_not_is_left(self) -> None:
        (reported, growth, counted), words = collapsed()
        if "left to the kernel" in words:
            pytest.skip("Linux before 6.1 has no MADV_COLLAPSE")
        assert counted == 4, words
        # The interpreter's own heap may have filled a block meanwhile.
        assert 4 <= reported <= 6 and growth <= (reported - 4) << 19
        assert words == f"{reported * 2} MB in huge pages"

    def test_what_was_full_before_is_left_alone(self) -> None:
        (reported, _, counted), words = collapsed("h.SHARE = 2")
        assert (reported, counted) == (0, 0) and words == "no huge pages: no block of the weights is large enough"

    def test_a_process_for_which_they_are_turned_off_says_so(self) -> None:
        (reported, _, counted), words = collapsed("assert libc.prctl(41, 1, 0, 0, 0) == 0")  # PR_SET_THP_DISABLE
        assert (reported, counted) == (0, 0) and "turned off for this process" in words

    def test_an_advice_that_the_kernel_does_not_know_is_no_error(self) -> None:
        # What Linux before 6.1 answers to MADV_COLLAPSE and one without MADV_HUGEPAGE to that.
        (reported, _, counted), words = collapsed("h.MADV_COLLAPSE = h.MADV_HUGEPAGE = 9999")
        assert (reported, counted) == (0, 0) and words == "no huge pages: the kernel refused (EINVAL)"

    def test_an_older_kernel_is_asked_to_collapse_by_and_by(self) -> None:
        (reported, _, _), words = collapsed("h.MADV_COLLAPSE = 9999")
        assert reported == 0 and "left to the kernel" in words

    def test_blocks_are_whole_and_full_enough(self) -> None:
        size = int((Path("/sys/kernel/mm/transparent_hugepage") / "hpage_pmd_size").read_text())
        found = filled_blocks()
        assert all(at % size == 0 and 0.75 * size <= held <= size for at, held in found.items())


@pytest.mark.parametrize(
    ("mode", "size", "status", "says"),
    [
        ("always madvise [never]", "2097152", "THP_enabled:\t1", "says never"),
        ("always [madvise] never", "2097152", "THP_enabled:\t0", "turned off for this process"),
        ("always [madvise] never", "no number", "", "does not tell"),
        (None, None, "", "does not tell"),
        ("[always] madvise never", "2097152", "", ""),
    ],
)
def test_the_reason_is_the_kernels(tmp_path: Path, mode: str | None, size: str | None, status: str, says: str) -> None:
    for name, text in (("enabled", mode), ("hpage_pmd_size", size), ("status", status)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    found = refusal(tmp_path, tmp_path)
    assert says in found and bool(found) == bool(says)


ADDRESSES = st.tuples(st.integers(0, 2**47), st.integers(1, 2**40))


@given(ADDRESSES, st.sampled_from(["", "[heap]", "[anon: glibc: malloc]"]))
def test_anonymous_memory_is_read_from_its_line(place: tuple[int, int], name: str) -> None:
    start, length = place
    line = f"{start:x}-{start + length:x} rw-p 00000000 00:00 0 {name}".ljust(73) + "\n"
    assert anonymous_mapping(line) == Mapping(start, start + length)


@given(
    ADDRESSES,
    st.sampled_from(["rw-s", "r--p", "rwxp", "---p", "rw-p"]),
    st.sampled_from(["00:00 0", "fe:01 77"]),
    st.sampled_from(["", "[stack]", "[vvar]", "/a file [heap]", "/dev/zero (deleted)", "[heap]"]),
)
def test_other_memory_is_not(place: tuple[int, int], rights: str, inode: str, name: str) -> None:
    line = f"{place[0]:x}-{sum(place):x} {rights} 00000000 {inode}          {name}"
    ours = rights == "rw-p" and inode == "00:00 0" and name in ("", "[heap]")
    assert (anonymous_mapping(line) is not None) == ours


@given(st.text())
def test_any_line_is_read_without_an_error(line: str) -> None:
    found = anonymous_mapping(line)
    assert found is None or "rw-p" in line


def test_words() -> None:
    assert str(HugePages(404 << 20, 0)) == "404 MB in huge pages"
    assert str(HugePages(why="turned off")) == "no huge pages: turned off"
    assert str(HugePages(4 << 20, 0, "x")) == "4 MB in huge pages, x"
