"""Checks of the head itself: its tensors against its config, and both against the target."""

from __future__ import annotations

from collections.abc import Iterator

from specmeter.wiring.findings import Finding, error, note, warning
from specmeter.wiring.head import EAGLE3, UNKNOWN, Head
from specmeter.wiring.shape import Shape

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
# Tensors that heads may have besides the standard ones, by how their plain name starts.
_OPTIONAL = (
    "d2t",
    "t2d",
    "embed_tokens.",
    "lm_head.",
    "fc_norm.",
    "input_norm.",
    "aux_norm_",
    "mask_hidden",
    "fc.bias",
)
_QUANTIZED = ("scale", "zero", "qweight", "g_idx", "input_global", "packed", "shape")
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def check_head(head: Head, target: Shape) -> list[Finding]:
    """Every finding about the head's own soundness."""
    if head.kind == UNKNOWN:
        return [
            warning(
                "head-kind",
                f"the draft ({head.shape.architecture or 'no architecture'}) is not recognised as an EAGLE head",
                "Only EAGLE and EAGLE-3 heads have a wiring to check.",
            )
        ]
    found = [*_sizes(head, target), *_dtypes(head, target)]
    if head.kind == EAGLE3 and head.tensors:
        found += [
            *_fc(head, target),
            *_attention(head),
            *_mlp(head),
            *_norms(head),
            *_names(head),
            *_norm_options(head),
        ]
    return found


def _sizes(head: Head, target: Shape) -> Iterator[Finding]:
    if head.target_hidden and target.hidden and head.target_hidden != target.hidden:
        yield error(
            "hidden-size",
            f"the head expects states of width {head.target_hidden}; the target's are {target.hidden} wide",
            "The head was made for another target.",
            "Use the head that belongs to this target.",
        )
    own = head.tensors.get("embed_tokens.weight")
    widths = head.shape.hidden, target.hidden
    if own is None and head.kind == EAGLE3 and head.tensors and None not in widths and widths[0] != widths[1]:
        yield error(
            "hidden-size",
            f"the head has hidden size {widths[0]} and no embed_tokens of its own; the target's are {widths[1]} wide",
            "A head without embeddings shares the target's, whose width it cannot take.",
            "Add the head's embed_tokens, or use the head of this target.",
        )
    heads, kv_heads = head.shape.heads, head.shape.kv_heads
    if heads and kv_heads and heads % kv_heads:
        yield error(
            "head-counts",
            f"{heads} attention heads cannot share {kv_heads} key/value heads",
            cure="Correct num_attention_heads or num_key_value_heads in the head's config.",
        )
    if head.checkpoint.pickles:
        names = ", ".join(head.checkpoint.pickles[:3])
        yield note("pickle-present", f"pickles lie beside the safetensors and were not opened: {names}")


def _fc(head: Head, target: Shape) -> Iterator[Finding]:
    fc = head.tensors.get("fc.weight")
    if fc is None:
        yield error("missing-tensor", "the head has no fc.weight", cure="Fetch or export the head again.")
        return
    width = target.hidden or head.target_hidden
    if len(fc.shape) != 2 or fc.shape[0] != head.shape.hidden:
        yield error(
            "fc-width",
            f"fc.weight is {list(fc.shape)}; its first size must be the head's hidden size {head.shape.hidden}",
            cure="Correct hidden_size in the head's config, or use the right head.",
        )
    elif head.states is None or head.states < 1:
        yield error(
            "fc-width",
            f"fc.weight takes {fc.shape[1]} inputs, no whole number of target states of width {width}",
            "The head was made for a target of another hidden size.",
            "Use the head that belongs to this target.",
        )


def _attention(head: Head) -> Iterator[Finding]:
    shape = head.shape
    if head.latent or not (shape.hidden and shape.heads and shape.kv_heads and shape.head_dim):
        return
    rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inputs = 2 * shape.hidden
    wanted = {
        "q_proj": (rows, inputs),
        "k_proj": (kv_rows, inputs),
        "v_proj": (kv_rows, inputs),
        "o_proj": (shape.hidden, rows),
    }
    for name, sizes in wanted.items():
        tensor = head.tensors.get(f"layers.0.self_attn.{name}.weight")
        if tensor is not None and tensor.dtype in _FLOATS and tensor.shape != sizes:
            yield error(
                "head-counts",
                f"{tensor.name} is {list(tensor.shape)}; the head's config asks for {list(sizes)}",
                f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} key/value heads, width {shape.hidden}.",
                "Correct num_attention_heads, num_key_value_heads or head_dim in the head's config.",
            )


def _mlp(head: Head) -> Iterator[Finding]:
    hidden, inner = head.shape.hidden, head.shape.intermediate
    if not hidden or not inner:
        return
    wanted = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for name, sizes in wanted.items():
        tensor = head.tensors.get(f"layers.0.mlp.{name}.weight")
        if tensor is not None and tensor.dtype in _FLOATS and tensor.shape != sizes:
            yield error(
                "intermediate-size",
                f"{tensor.name} is {list(tensor.shape)}; the head's config asks for {list(sizes)}",
                cure="Correct intermediate_size in the head's config.",
            )


def _norms(head: Head) -> Iterator[Finding]:
    names = ["norm.weight", *(f"layers.0.{norm}.weight" for norm in _NORMS)]
    for name in names:
        tensor = head.tensors.get(name)
        if tensor is not None and tensor.shape != (head.shape.hidden,):
            yield error(
                "norm-size", f"{tensor.name} is {list(tensor.shape)}; the head's hidden size is {head.shape.hidden}"
            )


def _names(head: Head) -> Iterator[Finding]:
    if head.checkpoint.missing:
        names = ", ".join(head.checkpoint.missing[:4])
        yield error("missing-tensor", f"the head's index lists tensors that no shard holds: {names}")
    layers = head.shape.layers or 1
    expected = {"norm.weight", "fc.weight"}
    for number in range(layers):
        part = f"layers.{number}."
        expected |= {f"{part}mlp.{name}.weight" for name in _MLP}
        expected |= {f"{part}post_attention_layernorm.weight"}
        expected |= {f"{part}self_attn.o_proj.weight"}
        if not head.latent:
            expected |= {f"{part}self_attn.{name}.weight" for name in _PROJECTIONS}
    expected |= {f"layers.0.{name}.weight" for name in _NORMS}
    present = set(head.tensors)
    quantized = any(any(mark in name for mark in _QUANTIZED) for name in present)
    missing = sorted(expected - present - {"fc.weight"})
    if missing and not quantized:
        yield error(
            "missing-tensor",
            f"the head lacks {', '.join(missing[:4])}" + (f" and {len(missing) - 4} more" if len(missing) > 4 else ""),
            "An engine would leave these at random or refuse to load.",
            "Fetch or export the head again.",
        )
    extra = sorted(name for name in present - expected if not _allowed(head, name, layers))
    if extra:
        yield warning(
            "extra-tensor",
            f"the head holds tensors that no EAGLE-3 class loads: {', '.join(extra[:4])}",
            "Engines drop them silently, or refuse.",
            "Check num_hidden_layers of the head's config, and that this is the head and not another checkpoint.",
        )


def _allowed(head: Head, name: str, layers: int) -> bool:
    if name.startswith(_OPTIONAL) or any(mark in name for mark in _QUANTIZED):
        return True
    if name.endswith(".bias"):
        return bool(head.config.get("attention_bias") or head.config.get("bias") or head.config.get("mlp_bias"))
    inside = any(name.startswith(f"layers.{number}.") for number in range(layers))
    return inside and (head.latent or name.endswith(("q_norm.weight", "k_norm.weight", "layernorm.weight")))


def _norm_options(head: Head) -> Iterator[Finding]:
    per_state = any(name.startswith(("fc_norm.", "aux_norm_")) for name in head.tensors)
    joint = "input_norm.weight" in head.tensors
    if per_state != bool(head.option("fc_norm") or head.option("use_aux_norm")):
        yield _norm_fault("fc_norm", per_state, "fc_norm")
    if joint != bool(head.option("norm_before_fc")):
        yield _norm_fault("norm_before_fc", joint, "input_norm")


def _norm_fault(option: str, has_tensors: bool, tensors: str) -> Finding:
    if has_tensors:
        return error(
            "norm-option",
            f"the head has {tensors} weights but its config does not set {option}",
            "Engines skip the norm, and the states reach fc unnormalised.",
            f"Set {option} to true in the head's config.",
        )
    return error(
        "norm-option",
        f"the head's config sets {option} but there are no {tensors} weights",
        "The norm would run with weights of one.",
        f"Remove {option}, or export the head with its norm.",
    )


def _dtypes(head: Head, target: Shape) -> Iterator[Finding]:
    kinds = {_FLOATS[t.dtype] for name, t in head.tensors.items() if t.dtype in _FLOATS and name not in ("d2t", "t2d")}
    if len(kinds) > 1:
        yield warning("dtype", f"the head mixes {' and '.join(sorted(kinds))}", cure="Export the head in one dtype.")
    stated = head.shape.dtype
    if stated and len(kinds) == 1 and stated not in kinds:
        yield warning(
            "dtype",
            f"the head's config says {stated}, its tensors are {next(iter(kinds))}",
            "The head runs in the target's dtype; the statement in the config is wrong.",
            f"Set torch_dtype to {next(iter(kinds))}.",
        )
    if target.dtype and len(kinds) == 1 and target.dtype not in kinds and target.dtype.startswith(("float", "bfloat")):
        yield warning(
            "dtype",
            f"the target is {target.dtype}, the head {next(iter(kinds))}",
            "Engines cast the head to the target's dtype; a head trained in a wider one loses precision.",
            f"Export the head in {target.dtype}.",
        )
