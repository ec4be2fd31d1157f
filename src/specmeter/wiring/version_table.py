"""What released engines feed, by version: the fall-back for ``--engine NAME==VERSION`` without the engine's source.

Every row was read from the released wheels, and a test derives the same answers from them where they are at hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specmeter.errors import SpecmeterError
from specmeter.wiring.feed import NESTED, TOP, Feed, default_states, lookup
from specmeter.wiring.shape import Shape

Version = tuple[int, ...]

# The oldest and newest releases that the rows were read from; beyond them the answer comes with a warning.
OLDEST = {"sglang": "0.4.6.post5", "vllm": "0.10.2"}
NEWEST = {"sglang": "0.5.23", "vllm": "0.33.0"}
_DEEPSEEK = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
)
_GPT_OSS = "GptOssForCausalLM"
_NEVER: Version = (1000,)
# The first release whose class supports EAGLE-3; the table knows no other classes.
_SINCE: dict[str, dict[str, Version]] = {
    "sglang": {
        "LlamaForCausalLM": (0,),
        "MistralForCausalLM": (0,),
        "Mistral3ForConditionalGeneration": _NEVER,
        "Qwen2MoeForCausalLM": (0, 5, 2),
        "Qwen3NextForCausalLM": (0, 5, 9),
        "DeepseekV2ForCausalLM": (0, 5, 4, 2),
        "DeepseekV3ForCausalLM": (0, 5, 4, 2),
        "KimiK25ForConditionalGeneration": (0, 5, 10),
        "Qwen2ForCausalLM": (0, 5, 2),
        "Qwen3ForCausalLM": (0, 4, 9),
        "Qwen3MoeForCausalLM": (0, 4, 9),
        "GptOssForCausalLM": (0, 5),
        "Glm4MoeForCausalLM": (0, 5, 5),
        "MiniMaxM2ForCausalLM": (0, 5, 5, 1),
    },
    "vllm": {
        "LlamaForCausalLM": (0,),
        "MistralForCausalLM": (0,),
        "Mistral3ForConditionalGeneration": (0, 16),
        "Qwen2ForCausalLM": (0,),
        "Qwen2MoeForCausalLM": _NEVER,
        "Qwen3ForCausalLM": (0,),
        "Qwen3NextForCausalLM": (0, 24),
        "DeepseekV2ForCausalLM": (0, 18),
        "DeepseekV3ForCausalLM": (0, 18),
        "KimiK25ForConditionalGeneration": (0, 18),
        "MiniMaxM2ForCausalLM": (0, 20),
        "Qwen3MoeForCausalLM": (0, 11, 1),
        "GptOssForCausalLM": (0, 11),
        "Glm4MoeForCausalLM": _NEVER,
    },
}
_DFLASH = ("dflash_config", "target_layer_ids")
_V2_ARCHITECTURES: tuple[tuple[Version, tuple[str, ...]], ...] = (
    ((0, 25), ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM")),
    (
        (0, 24),
        (
            "Qwen3ForCausalLM",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "DeepseekV2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "GraniteMoeForCausalLM",
        ),
    ),
    ((0, 23), ("Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")),
    ((0, 22), ("Qwen3ForCausalLM",)),
)


def parse_version(text: str) -> Version:
    """The numbers of a version, ``0.4.9.post6`` as (0, 4, 9, 6). Raises SpecmeterError when there are none."""
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*(?!\d)", text)
    if numbers is None:
        raise SpecmeterError(
            f"{text[:40]!r} is not a version", "A version begins with a number.", "Write it as --engine sglang==0.5.16."
        )
    post = re.search(r"post(\d{1,9})", text)
    return tuple(int(part) for part in numbers.group().split(".")) + ((int(post.group(1)),) if post else ())


def table_knows(engine: str, architecture: str) -> bool:
    """Whether the rows were read for this target class; for another one the table's answer is that of most classes."""
    return architecture in _SINCE[engine]


def from_table(
    engine: str, version: str, target: Shape, config: Mapping[str, object], has_triton: bool = True
) -> list[Feed]:
    """What the released ``engine`` of that version feeds for the pair."""
    number = parse_version(version)
    feeds = _sglang(version, number, target, config)
    if engine == "vllm":
        feeds = _vllm(version, number, target, config, has_triton)
    return feeds


def _ids(config: Mapping[str, object], key: tuple[str, ...]) -> tuple[int, ...] | None:
    value = lookup(config, key)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    return None


# -- SGLang


def _sglang(version: str, number: Version, target: Shape, config: Mapping[str, object]) -> list[Feed]:
    layers = target.layers or 0
    reads = (NESTED,) if number >= (0, 4, 9) else ()
    ids = _ids(config, NESTED) if reads else None
    default = default_states(layers)
    states = default
    if ids is not None:
        shift = 1 if _sglang_adds_one(target.architecture, number, ids, layers) else 0
        states = tuple(sorted({item + shift for item in ids}))
    refusal = _unsupported("sglang", number, target.architecture)
    last = layers if target.architecture == _GPT_OSS and number >= (0, 5, 17) else layers - 1
    kept = tuple(k for k in states if 0 <= k <= last)
    feed = Feed(
        engine="sglang",
        version=version,
        reader="",
        key=NESTED if ids is not None else None,
        ids=ids,
        states=None if refusal else kept,
        origin="table",
        graph_states=default if number < (0, 5, 11) and kept != default else None,
        lost=tuple(k for k in states if k not in kept),
        refusal=refusal,
        reads=reads,
        ignored_options=_sglang_ignores(number),
        fixed_states=3 if number < (0, 5, 12) else None,
    )
    return [feed]


def _unsupported(engine: str, number: Version, architecture: str) -> str:
    since = _SINCE[engine].get(architecture, (0,))
    return "" if number >= since else f"{engine} of this version has no EAGLE-3 for {architecture}"


def _sglang_adds_one(architecture: str, number: Version, ids: tuple[int, ...], layers: int) -> bool:
    if architecture in _DEEPSEEK or architecture == "Glm4MoeLiteForCausalLM":
        return number < (0, 5, 13) or ids[:1] == (1,)
    if architecture == _GPT_OSS and number >= (0, 5, 17):
        return not ids or max(ids) != layers
    return True


def _sglang_ignores(number: Version) -> tuple[str, ...]:
    if number >= (0, 5, 17):
        return ("norm_before_residual",)
    if number >= (0, 5, 12):
        return ("norm_before_residual", "norm_before_fc")
    return ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")


# -- vLLM


def _vllm(version: str, number: Version, target: Shape, config: Mapping[str, object], has_triton: bool) -> list[Feed]:
    first = _vllm_v1_keys(number)
    feeds = [_vllm_feed(version, number, "model runner V1", first, target, config)]
    if number >= (0, 17):
        second: tuple[tuple[str, ...], ...] = (TOP, _DFLASH) if number >= (0, 24) else (TOP,)
        if number >= (0, 28):
            second = (*second, ("eagle_config", "layer_ids"))
        feeds.append(_vllm_feed(version, number, "model runner V2", second, target, config))
    newer = has_triton and (number >= (0, 29) or target.architecture in _v2_architectures(number))
    return [_with_use(feed, (feed.reader == "model runner V2") == (newer and len(feeds) == 2)) for feed in feeds]


def _v2_architectures(number: Version) -> tuple[str, ...]:
    return next((names for since, names in _V2_ARCHITECTURES if number >= since), ())


def _with_use(feed: Feed, used: bool) -> Feed:
    return Feed(**{**feed.__dict__, "used": used})


def _vllm_v1_keys(number: Version) -> tuple[tuple[str, ...], ...]:
    if number < (0, 11, 1):
        return ()
    if number < (0, 20):
        return (TOP,)
    return (TOP, _DFLASH) if number < (0, 22) else (TOP, _DFLASH, NESTED)


def _vllm_feed(
    version: str,
    number: Version,
    reader: str,
    keys: tuple[tuple[str, ...], ...],
    target: Shape,
    config: Mapping[str, object],
) -> Feed:
    layers = target.layers or 0
    key = next((key for key in keys if _ids(config, key)), None)
    ids = _ids(config, key) if key else None
    chosen = default_states(layers) if ids is None else ids
    if key == _DFLASH and number >= (0, 22):
        chosen = tuple(item + 1 for item in chosen)
    before_layer = number < (0, 18) or target.architecture in _DEEPSEEK
    last = layers - 1 if before_layer and number < (0, 25) else layers
    kept = tuple(sorted({k for k in chosen if 0 <= k <= last}))
    refusal = _unsupported("vllm", number, target.architecture)
    if not refusal and before_layer and 0 in kept:
        refusal = "the embedding output is added to a residual that does not exist yet (None)"
    return Feed(
        engine="vllm",
        version=version,
        reader=reader,
        key=key,
        ids=ids,
        states=None if refusal.startswith("vllm") else kept,
        origin="table",
        lost=tuple(k for k in dict.fromkeys(chosen) if k not in kept),
        refusal=refusal,
        reads=keys,
        ignored_options=_vllm_ignores(number),
        fixed_states=3 if number < (0, 22) else None,
    )


def _vllm_ignores(number: Version) -> tuple[str, ...]:
    if number >= (0, 22):
        return ("use_aux_norm",)
    if number >= (0, 18):
        return ("fc_norm", "use_aux_norm", "norm_output")
    return ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")
