"""What comes back from a lent machine: results and logs as one archive in parts small enough to be fetched."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PART_BYTES = 15 * 1024 * 1024
MOST_PARTS = 4
LOG_BYTES = 400_000


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
        for old in out.glob("results.tgz*"):
            old.unlink()
        (work / "machine.json").write_text(json.dumps(machine(), indent=1))
        archive = work / "results.tgz"
        with tarfile.open(archive, "w:gz", compresslevel=4) as tar:
            for name in ("results", "parts.jsonl", "machine.json"):
                if (work / name).exists():
                    tar.add(work / name, arcname=name)
            for log in sorted((work / "logs").glob("*.log")):
                short = log.with_suffix(".log.gz")
                short.write_bytes(gzip.compress(_ends(log)))
                tar.add(short, arcname=f"logs/{short.name}")
        _split(archive, out)
        shutil.copy(work / "parts.jsonl", out / "parts.jsonl")

    return pack


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
        for number in range(MOST_PARTS + 1):
            piece = file.read(PART_BYTES)
            if not piece:
                return
            if number == MOST_PARTS:
                print(f"the archive is larger than {MOST_PARTS} parts: {archive} keeps the rest", flush=True)
                return
            (out / f"results.tgz.part-{number}").write_bytes(piece)
