"""A checkpoint folder as files: config, tensor headers, tokenizer. Nothing in it is executed or unpickled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specmeter.checkpoint.safetensors_header import Tensor, load_json, open_regular, read_header
from specmeter.errors import Exit, SpecmeterError

MAX_JSON_BYTES = 200_000_000
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@dataclass(frozen=True)
class Checkpoint:
    """One model folder.

    ``config`` is config.json as it stands, ``tensors`` every tensor by name with its header's claims (empty when the
    folder holds no weights at all, as for a config on its own), ``missing`` the names that an index lists and no shard
    holds, ``pickles`` weight files that were left alone.
    """

    folder: Path
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    missing: tuple[str, ...]
    pickles: tuple[str, ...]

    def digest(self, name: str) -> str | None:
        """SHA-256 of a file of the folder in hexadecimal, or None when it is not there."""
        path = self.folder / name
        if not path.exists():
            return None
        with open_regular(path) as stream:
            return hashlib.sha256(stream.read(MAX_JSON_BYTES)).hexdigest()

    def json(self, name: str) -> dict[str, object] | None:
        """A JSON object of the folder, or None when the file is not there."""
        return _read_object(self.folder / name) if os.path.lexists(self.folder / name) else None

    def chat_template(self) -> str | None:
        """The chat template: chat_template.jinja, else the one in tokenizer_config.json."""
        path = self.folder / "chat_template.jinja"
        if os.path.lexists(path):
            with open_regular(path) as stream:
                return stream.read(MAX_JSON_BYTES).decode("utf-8", "replace")
        template = (self.json("tokenizer_config.json") or {}).get("chat_template")
        return template if isinstance(template, str) else None


def open_checkpoint(folder: Path, role: str, weights: bool = True) -> Checkpoint:
    """Read the config and all headers of ``folder``; ``role`` ("target" or "draft") is used in messages.

    Raises SpecmeterError for a folder without config.json, unsound JSON or headers, two checkpoints in one folder, and
    a checkpoint that exists only as pickles.
    """
    names = _list(folder, role)
    if "config.json" not in names:
        raise SpecmeterError(
            f"the {role} folder {folder} has no config.json",
            why=f"It holds {_some(names)}.",
            next_step=f"Give the folder that the engine is started with (--{role} DIR).",
        )
    config = _read_object(folder / "config.json")
    pickles = tuple(n for n in names if n.endswith(_PICKLES) and n not in _NOT_WEIGHTS)
    shards = [n for n in names if n.endswith(".safetensors")]
    if pickles and not shards:
        raise SpecmeterError(
            f"the {role} in {folder} has its weights only as pickles: {_some(pickles)}",
            why="Loading a pickle runs code from it, so it is never opened here.",
            next_step="Convert it to safetensors where you trust it, then check again.",
            exit=Exit.REFUSED,
        )
    tensors, missing = _read_shards(folder, role, names, shards) if weights else ({}, ())
    return Checkpoint(folder, config, tensors, missing, pickles)


def _list(folder: Path, role: str) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as fault:
        raise SpecmeterError(
            f"cannot read the {role} folder {folder}", why=str(fault.strerror), next_step=f"Check --{role}."
        ) from None


def _read_object(path: Path) -> dict[str, object]:
    with open_regular(path) as stream:
        text = stream.read(MAX_JSON_BYTES)
    document = load_json(path, text, strict=False)
    if not isinstance(document, dict):
        raise SpecmeterError(f"{path} is not a JSON object", next_step="Fetch the file again.")
    return document


def _read_shards(
    folder: Path, role: str, names: list[str], shards: list[str]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    index = next((n for n in names if n.endswith(".safetensors.index.json")), None)
    if index is None:
        return _join(folder, role, shards), ()
    weight_map = _read_object(folder / index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise SpecmeterError(f"{folder / index} has no weight_map", next_step="Fetch the file again.")
    wanted = sorted({_plain_name(folder / index, shard) for shard in weight_map.values()})
    absent = [shard for shard in wanted if shard not in names]
    if absent:
        raise SpecmeterError(
            f"the {role}'s index names shards that are not in {folder}: {_some(absent)}",
            next_step="Fetch the missing files.",
        )
    tensors = _join(folder, role, wanted)
    return tensors, tuple(sorted(name for name in weight_map if name not in tensors))


def _plain_name(index: Path, shard: object) -> str:
    if not isinstance(shard, str) or os.sep in shard or shard in ("", ".", ".."):
        raise SpecmeterError(
            f"{index} names the shard {shard!r}, which is not a file name of its folder", exit=Exit.REFUSED
        )
    return shard


def _join(folder: Path, role: str, shards: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        found = read_header(folder / shard)
        twice = next((name for name in found if name in tensors), None)
        if twice is not None:
            raise SpecmeterError(
                f"the {role} folder holds two checkpoints: {tensors[twice].file.name} and {shard}",
                why=f"Both contain {twice!r}, so what an engine loads depends on the order of the files.",
                next_step="Keep one checkpoint a folder.",
            )
        tensors.update(found)
    return tensors


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:4]) or "nothing"
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
