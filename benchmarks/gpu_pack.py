"""What comes back from a lent machine: results and logs as one archive in parts small enough to be fetched."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PART_BYTES = 15 * 1024 * 1024
MOST_PARTS = 4
LOG_BYTES = 400_000
LARGE_BYTES = 1_000_000
SLACK_BYTES = 256 * 1024  # tar's headers, gzip's own, and what gzip holds back before it writes


def machine() -> dict[str, Any]:
    """GPU, driver, versions and load, for the results."""
    facts: dict[str, Any] = {"unix_s": time.time(), "python": platform.python_version(), "cpus": os.cpu_count()}
    facts["load"] = os.getloadavg()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,clocks.sm", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        facts["gpus"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    return facts


def packer(out: Path) -> Callable[[Path], None]:
    """A ``closing`` for run_parts that leaves WORK's results below ``out``: results.tgz in parts, and a summary."""

    def pack(work: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        for old in (*out.glob("results.tgz*"), *out.glob("left_out.json")):
            old.unlink()
        (work / "machine.json").write_text(json.dumps(machine(), indent=1))
        for log in (work / "logs").glob("*.log"):
            log.with_suffix(".log.gz").write_bytes(gzip.compress(_ends(log)))
        archive = work / "results.tgz"
        left_out = archive_within(work, archive, MOST_PARTS * PART_BYTES)
        _split(archive, out)
        if left_out:
            (out / "left_out.json").write_text(json.dumps(left_out, indent=1))
            print(f"{len(left_out)} files did not fit and stay here, raw windows first: left_out.json", flush=True)
        shutil.copy(work / "parts.jsonl", out / "parts.jsonl")

    return pack


def archive_within(work: Path, archive: Path, most_bytes: int) -> list[str]:
    """Write WORK's results and logs to ``archive``, whole and of ``most_bytes`` at most; gives the names left out.

    What is small and says most comes first, then columns and rings, then the profiler's raw windows, the newest
    first: those of an earlier call have come back with it. A file that would not fit is left out, never cut.
    """
    left_out = []
    with archive.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=4) as tar:
        for path in sorted(_files(work), key=lambda path: (_rank(path), -path.stat().st_mtime_ns, path)):
            name = str(path.relative_to(work))
            if file.tell() + _packed_bytes(path) + SLACK_BYTES > most_bytes:
                left_out.append(name)
            else:
                tar.add(path, arcname=name)
    return left_out


def restore(out: Path, work: Path, again: Sequence[str] = ()) -> bool:
    """Put what an earlier machine brought back (``packer``'s archive in ``out``) into an empty WORK; False: not empty.

    Parts named in ``again`` are to be done on each machine, so what is told of them is left behind, attempts too.
    Raises FileNotFoundError without an archive, and tarfile.TarError or EOFError for one that is cut.
    """
    if (work / "parts.jsonl").exists():
        return False
    count = len(list(out.glob("results.tgz.part-*")))
    if not count:
        raise FileNotFoundError(f"no results.tgz.part-* in {out}")
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as whole:
        for number in range(count):
            whole.write((out / f"results.tgz.part-{number}").read_bytes())
        whole.seek(0)
        with tarfile.open(fileobj=whole) as tar:
            tar.extractall(work, filter="data")
    for name in again:
        (work / "done" / f"{name}.json").unlink(missing_ok=True)
    lines = (work / "parts.jsonl").read_text().splitlines()
    kept = [line for line in lines if not {"begun", "ended"} & (told := json.loads(line)).keys()
            or (told.get("begun") or told.get("ended")) not in again]  # fmt: skip
    (work / "parts.jsonl").write_text("".join(f"{line}\n" for line in kept))
    return True


def _files(work: Path) -> list[Path]:
    found = [work / name for name in ("parts.jsonl", "machine.json")] + list((work / "logs").glob("*.log.gz"))
    found += (work / "done").glob("[!.]*.json")
    return [path for path in (*found, *(work / "results").rglob("*")) if path.is_file() and not path.is_symlink()]


def _rank(path: Path) -> int:
    """0 results and logs, 1 columns and rings, 2 raw windows."""
    if path.parent.name == "deep" and not path.name.endswith(".meta.json"):
        return 2
    return 1 if path.suffix in (".ring", ".parquet") or path.stat().st_size > LARGE_BYTES else 0


def _packed_bytes(path: Path) -> int:
    """At most what the file adds to the archive: its own size where that is small or packed already."""
    size = path.stat().st_size
    if path.suffix != ".ring":
        return size
    packer, packed = zlib.compressobj(1), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            packed += len(packer.compress(block))
    return min(size, packed + len(packer.flush()))


def show_logs(work: Path, lines: int = 70) -> None:
    """The end of what the parts printed, newest part last."""
    names = [json.loads(line).get("begun") for line in (work / "parts.jsonl").read_text().splitlines()]
    for name in dict.fromkeys(name for name in names if name):
        print(f"== {name}")
        print("\n".join((work / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-lines:]), flush=True)


def _ends(log: Path) -> bytes:
    """The first and the last part of a long log."""
    data = log.read_bytes()
    half = LOG_BYTES // 2
    return data if len(data) <= LOG_BYTES else data[:half] + b"\n[...]\n" + data[-half:]


def _split(archive: Path, out: Path) -> None:
    with archive.open("rb") as file:
        number = 0
        while piece := file.read(PART_BYTES):
            (out / f"results.tgz.part-{number}").write_bytes(piece)
            number += 1
