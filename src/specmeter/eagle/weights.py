"""Checkpoint tensors by name, from the safetensors files of a model directory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specmeter.checkpoint.folder import open_checkpoint
from specmeter.errors import SpecmeterError


class Checkpoint:
    """The tensors of a directory, each of which is taken once: what is taken is no longer held here.

    ``take`` checks the shape and converts, so a wrong file is noticed by name.
    """

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        """Reads the ``*.safetensors`` of ``folder``, those of its index if it has one, into ``device``'s memory.

        Raises SpecmeterError if there are none, one cannot be read, or a tensor is there twice.
        """
        self.folder = folder
        self._tensors: dict[str, Tensor] = {}
        # The headers first: pipes, false sizes and a name that occurs twice are refused, which the loader does not do.
        files = sorted({tensor.file for tensor in open_checkpoint(folder, "model").tensors.values()})
        if not files:
            raise SpecmeterError(
                f"{folder} has no weights.", "It holds no *.safetensors file.", "Name a complete model directory."
            )
        for path in files:
            try:
                self._tensors.update(load_file(path, device=str(device or "cpu")))
            except (SafetensorError, OSError, KeyError) as error:  # KeyError: a dtype that this torch lacks
                raise SpecmeterError(f"Cannot read {path}.", str(error), "Fetch or copy the file again.") from error

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def floating_dtype(self) -> torch.dtype:
        """The dtype of the first floating point tensor."""
        return next((t.dtype for t in self._tensors.values() if t.dtype.is_floating_point), torch.float32)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor ``name``; SpecmeterError if it is absent, not of ``shape``, or no integers where they are wanted.

        Converting between integers and fractions would make other numbers of them.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise SpecmeterError(
                f"The weights in {self.folder} lack {name}.", "", "Name a model of the layout its config.json states."
            )
        if tuple(tensor.shape) != shape:
            raise SpecmeterError(
                f"{name} in {self.folder} has shape {list(tensor.shape)}.",
                f"Its config.json and its target call for {list(shape)}.",
                "Name a head and a target that belong together.",
            )
        if dtype is not None and (tensor.is_complex() or tensor.is_floating_point() != dtype.is_floating_point):
            kinds = "floating point numbers" if dtype.is_floating_point else "whole numbers"
            raise SpecmeterError(
                f"{name} in {self.folder} has dtype {str(tensor.dtype).removeprefix('torch.')}.",
                f"It must hold {kinds}.",
                "Fetch or export the checkpoint again.",
            )
        del self._tensors[name]
        return tensor if dtype is None else tensor.to(dtype)
