"""What an engine feeds to a draft: the value objects that the source readers and the version table both produce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Where a draft's config may name layer ids, in the order in which a reader of the report wants them.
TOP = ("eagle_aux_hidden_state_layer_ids",)
NESTED = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
KEYS: tuple[tuple[str, ...], ...] = (
    TOP,
    NESTED,
    ("eagle_config", "layer_ids"),
    ("dflash_config", "target_layer_ids"),
    ("dspark_target_layer_ids",),
    ("target_layer_ids",),
)
# Physical states, k meaning H[k], as heads of the embedded engine state them.
CAPTURE: tuple[tuple[str, ...], ...] = (("specmeter_capture",), ("eagle_config", "specmeter_capture"))


@dataclass(frozen=True)
class Evidence:
    """A line of source that the answer rests on."""

    says: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.says} ({self.path}:{self.line})"


@dataclass(frozen=True)
class Feed:
    """What one reader of one engine does with one pair.

    ``reader`` tells apart code paths of one engine (vLLM's two model runners). ``key`` is where the ids were read
    (None: nowhere, so the model's default holds), ``ids`` as read. ``states`` are the k of H[k] that reach the draft,
    in order; None when the source's form is not recognised. ``graph_states`` are those of captured CUDA graphs where
    they differ. ``lost`` are ids that no layer ever meets. ``refusal`` says why the engine does not start or fails at
    its first forward. ``origin`` is "source" or "table". ``reads`` are all keys that would be understood, ``used``
    tells whether this reader is the engine's default, ``fixed_states`` the number of states its head class insists on.
    """

    engine: str
    version: str
    reader: str
    key: tuple[str, ...] | None
    ids: tuple[int, ...] | None
    states: tuple[int, ...] | None
    origin: str
    evidence: tuple[Evidence, ...] = ()
    graph_states: tuple[int, ...] | None = None
    lost: tuple[int, ...] = ()
    refusal: str = ""
    used: bool = True
    reads: tuple[tuple[str, ...], ...] = ()
    ignored_options: tuple[str, ...] = ()
    fixed_states: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Engine, version and reader in a few words."""
        version = f" {self.version}" if self.version else ""
        return f"{self.engine}{version}" + (f" ({self.reader})" if self.reader else "")


def lookup(config: Mapping[str, object], key: tuple[str, ...]) -> object:
    """The value at a nested key of a config, or None."""
    value: object = config
    for part in key:
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def with_key(config: Mapping[str, object], key: tuple[str, ...], value: object) -> dict[str, object]:
    """A copy of a config with a nested key set."""
    copy = dict(config)
    if len(key) == 1:
        copy[key[0]] = value
    else:
        inner = copy.get(key[0])
        copy[key[0]] = with_key(inner if isinstance(inner, Mapping) else {}, key[1:], value)
    return copy


def without_ids(config: Mapping[str, object]) -> dict[str, object]:
    """A copy of a config without any layer ids."""
    copy = {name: value for name, value in config.items() if (name,) not in KEYS}
    for outer in {key[0] for key in KEYS if len(key) == 2}:
        inner = copy.get(outer)
        if isinstance(inner, Mapping):
            copy[outer] = {name: value for name, value in inner.items() if (outer, name) not in KEYS}
    return copy


def key_text(key: tuple[str, ...] | None) -> str:
    """A key as it is written in messages: ``eagle_config.eagle_aux_hidden_state_layer_ids``."""
    return ".".join(key) if key else "none"


def default_states(layers: int) -> tuple[int, ...]:
    """The states that every engine and trainer feeds when nothing is configured: H[2], H[N//2], H[N-3]."""
    return (2, layers // 2, layers - 3)
