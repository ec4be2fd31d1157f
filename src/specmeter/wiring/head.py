"""The draft head as its tensors tell it: its kind, and how many target states its ``fc`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specmeter.checkpoint.folder import Checkpoint
from specmeter.checkpoint.safetensors_header import Tensor
from specmeter.errors import SpecmeterError
from specmeter.wiring.shape import Shape, read_shape

EAGLE3 = "eagle3"
EAGLE = "eagle"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Head:
    """A draft head. ``tensors`` go by their plain names: no ``model.`` in front, ``midlayer`` written as ``layers.0``.

    ``states`` is the width of ``fc`` in hidden states of the target, None when it is no whole number of them or there
    is no ``fc``; ``target_hidden`` the width of one state as the head's config has it.
    """

    checkpoint: Checkpoint
    shape: Shape
    kind: str
    tensors: Mapping[str, Tensor]
    target_hidden: int | None
    states: int | None

    @property
    def config(self) -> Mapping[str, object]:
        """The head's config with a nested layer config flattened."""
        return self.shape.config

    def option(self, name: str) -> object:
        """An option of the head's config, wherever it stands: nested in ``eagle_config``, or on top."""
        nested = self.config.get("eagle_config")
        return {**self.config, **(nested if isinstance(nested, Mapping) else {})}.get(name)

    @property
    def latent(self) -> bool:
        """Whether its attention is multi-head latent attention, as in heads for DeepSeek and Kimi."""
        return any("kv_a_proj" in name for name in self.tensors)


def read_head(checkpoint: Checkpoint, target: Shape) -> Head:
    """Describe the draft in a checkpoint."""
    shape = read_shape(checkpoint.config, "draft")
    tensors = _by_plain_name(checkpoint)
    asked = shape.config.get("target_hidden_size")
    target_hidden = asked if isinstance(asked, int) else shape.hidden
    fc = tensors.get("fc.weight")
    kind = _kind(shape, tensors)
    states = None
    if kind == EAGLE3 and fc is not None and len(fc.shape) == 2:
        width = target.hidden or target_hidden or 0
        states = fc.shape[1] // width if width and fc.shape[1] % width == 0 else None
    return Head(checkpoint, shape, kind, tensors, target_hidden, states)


def _by_plain_name(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        other = tensors.setdefault(_plain(name), tensor)
        if other is not tensor:
            raise SpecmeterError(
                f"the draft folder holds two heads: {other.name!r} and {name!r} are the same tensor of a head",
                f"They lie in {other.file.name} and {tensor.file.name}; what an engine loads depends on their order.",
                "Keep one head a folder.",
            )
    return tensors


def _plain(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _kind(shape: Shape, tensors: Mapping[str, Tensor]) -> str:
    if "eagle3" in shape.architecture.lower() or any(name in tensors for name in ("d2t", "t2d")):
        return EAGLE3
    if "layers.0.hidden_norm.weight" in tensors or shape.config.get("speculators_model_type") == "eagle3":
        return EAGLE3
    # EAGLE and EAGLE-2 join the embedding with one state before an ordinary layer that has no hidden_norm.
    fc, hidden = tensors.get("fc.weight"), shape.hidden
    if fc is not None and hidden and fc.shape[-1:] == (2 * hidden,):
        return EAGLE
    return EAGLE if "eagle" in shape.architecture.lower() else UNKNOWN
