"""The EAGLE-3 head in its training form: fp32 master weights, a forward of many rows and of many unrolled steps.

Row t of a sequence x holds the embedding of x[t+1] and the target's captured states at t, and predicts x[t+2]. At
unrolled step j the same row stands for position t+j: it holds the embedding of token t+1+j and the row's own output of
step j-1, and attends to the step-0 keys of rows up to t and to its own keys of steps 1..j. That is what a chain of
draft steps sees at run time: true states up to t, its own after it (training-time test, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specmeter.eagle.config import CAPTURE_KEY, read_config
from specmeter.eagle.training.target import BatchedTarget, causal_attention, rms_norm, rope_tables, rotate
from specmeter.errors import SpecmeterError

MOST_STEPS = 8
"""Most unrolled steps: the diagonal keys are padded to this many columns so that rows stay aligned."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head. ``capture`` lists k of the target states H[k] that feed it."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    capture: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @property
    def bytes(self) -> int:
        """Size of the bf16 checkpoint in bytes, with d2t (int64) and t2d (bool), without the file's header."""
        d, heads, kv = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        attention = 2 * d * (heads + 2 * kv) * self.head_dim + d * heads * self.head_dim
        matrices = d * d * len(self.capture) + attention + 3 * d * self.intermediate_size + self.draft_vocab_size * d
        return 2 * (matrices + 4 * d) + 8 * self.draft_vocab_size + self.vocab_size


def head_shape(target: BatchedTarget, capture: tuple[int, ...], draft_vocab: int, intermediate: int) -> HeadShape:
    """The shape of a head for ``target``; raises SpecmeterError for states or sizes that cannot be served."""
    config = target.config
    if (
        not capture
        or list(capture) != sorted(set(capture))
        or capture[0] < 1
        or capture[-1] >= config.num_hidden_layers
    ):
        raise SpecmeterError(
            f"Captured states {list(capture)} cannot be served.",
            f"They must ascend within 1..{config.num_hidden_layers - 1}: SGLang's Llama can capture no others.",
            "Name states such as --capture 3,16,29.",
        )
    if draft_vocab % 24 or not 0 < draft_vocab <= config.vocab_size:
        raise SpecmeterError(
            f"A draft vocabulary of {draft_vocab} does not suit.",
            f"It must be a multiple of 24 (tensor parallel 2, 3, 4 and 8) of at most {config.vocab_size}.",
            "Choose for example --draft-vocab 9216.",
        )
    return HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab,
        capture=capture,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
    )


class Head(nn.Module):
    """Weights under their checkpoint names, in fp32; ``step`` computes in ``dtype`` (bfloat16 as served)."""

    def __init__(self, shape: HeadShape, draft_ids: Tensor, dtype: torch.dtype) -> None:
        """``draft_ids`` [draft vocab]: the target's id of each draft token, ascending."""
        super().__init__()
        self.shape, self.dtype = shape, dtype
        d, inter, wide = shape.hidden_size, shape.intermediate_size, 2 * shape.hidden_size
        heads, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        sizes = {
            "fc.weight": (d, d * len(shape.capture)),
            "midlayer.self_attn.q_proj.weight": (heads, wide),
            "midlayer.self_attn.k_proj.weight": (kv, wide),
            "midlayer.self_attn.v_proj.weight": (kv, wide),
            "midlayer.self_attn.o_proj.weight": (d, heads),
            "midlayer.mlp.gate_proj.weight": (inter, d),
            "midlayer.mlp.up_proj.weight": (inter, d),
            "midlayer.mlp.down_proj.weight": (d, inter),
            "lm_head.weight": (shape.draft_vocab_size, d),
        }
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        weights = {name: torch.randn(size) * 0.02 for name, size in sizes.items()}
        weights.update({f"midlayer.{name}.weight": torch.ones(d) for name in norms})
        weights["norm.weight"] = torch.ones(d)
        # nn.ParameterDict forbids dots in keys, so the names are kept beside the parameters.
        self.names = sorted(weights)
        self.weights = nn.ParameterList([nn.Parameter(weights[name]) for name in self.names])
        self.register_buffer("draft_ids", draft_ids)
        self.draft_ids: Tensor
        cos, sin = rope_tables(shape.head_dim, shape.rope_theta, 4096 + MOST_STEPS, torch.device("cpu"), torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    @torch.no_grad()
    def start_from_target(self, target: BatchedTarget, states: Tensor) -> None:
        """Starts near the target: its output rows and final norm, and fc passing the top captured state at unit scale.

        ``states`` [.., hidden * captures] is a sample that sets the scales.
        """
        d = self.shape.hidden_size
        parts = states.reshape(-1, len(self.shape.capture), d).float()
        # The median row: the first token's state is hundreds of times larger than all others.
        scale = parts.pow(2).mean(-1).median(dim=0).values.sqrt().clamp(min=1e-6)
        named = dict(zip(self.names, self.weights, strict=True))
        fc = named["fc.weight"].view(d, -1, d)
        fc.mul_(0.5 / scale[None, :, None])
        fc[:, -1] += torch.eye(d, device=fc.device) / scale[-1]
        named["lm_head.weight"].copy_(target.lm_head[self.draft_ids].float())
        named["norm.weight"].copy_(target.norm.float())

    def cast(self) -> dict[str, Tensor]:
        """The weights by name in the compute type, differentiable; make it once an optimizer step."""
        return {name: p.to(self.dtype) for name, p in zip(self.names, self.weights, strict=True)}

    def fuse(self, weights: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """Captured states [B, S, hidden * captures] -> the hidden input of step 0 [B, S, hidden]."""
        return F.linear(states.to(self.dtype), weights["fc.weight"])

    def step(self, weights: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor, past: Past) -> Tensor:
        """One unrolled step. ``embedded`` [B, S, hidden] are the step's token embeddings, ``hidden`` its hidden input.

        Appends the step's keys and values to ``past`` and returns the output state before the final norm.
        """
        batch, length, _ = hidden.shape
        shape, depth = self.shape, len(past.keys)
        both = torch.cat(
            [self._norm(weights, "input_layernorm", embedded), self._norm(weights, "hidden_norm", hidden)], -1
        )
        cos = self.cos[depth : depth + length].to(self.dtype)
        sin = self.sin[depth : depth + length].to(self.dtype)

        def heads(name: str) -> Tensor:
            projected = F.linear(both, weights[f"midlayer.self_attn.{name}_proj.weight"])
            return projected.view(batch, length, -1, shape.head_dim).transpose(1, 2)

        q, k, v = rotate(heads("q"), cos, sin), rotate(heads("k"), cos, sin), heads("v")
        past.keys.append(k)
        past.values.append(v)
        attended = causal_attention(q, k, v) if depth == 0 else _unrolled_attention(q, past)
        attended = attended.transpose(1, 2).reshape(batch, length, -1)
        hidden = hidden + F.linear(attended, weights["midlayer.self_attn.o_proj.weight"])
        normed = self._norm(weights, "post_attention_layernorm", hidden)
        gate = F.silu(F.linear(normed, weights["midlayer.mlp.gate_proj.weight"]))
        up = F.linear(normed, weights["midlayer.mlp.up_proj.weight"])
        return hidden + F.linear(gate * up, weights["midlayer.mlp.down_proj.weight"])

    def final(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """The final norm, before lm_head."""
        return rms_norm(hidden, weights["norm.weight"], self.shape.rms_norm_eps)

    def _norm(self, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"midlayer.{name}.weight"], self.shape.rms_norm_eps)


class Past:
    """Keys and values [B, kv heads, S, d] of the steps so far; entry 0 is the causal context, the rest diagonal."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


def _unrolled_attention(q: Tensor, past: Past) -> Tensor:
    """Attention of step j >= 1: row t sees the step-0 keys of rows <= t and its own keys of steps 1..j.

    q is [B, heads, S, d]. Scores are explicit, [B, kv heads, group, S, S + MOST_STEPS]: at S <= 2048 they cost less
    than the vocabulary projection does, and need no kernel that a machine may lack.
    """
    batch, heads, length, size = q.shape
    kv_heads = past.keys[0].shape[1]
    grouped = (q * size**-0.5).reshape(batch, kv_heads, -1, length, size)
    main = grouped.flatten(2, 3) @ past.keys[0].transpose(-1, -2)
    main = main.view(batch, kv_heads, -1, length, length)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    main = main.masked_fill(future, float("-inf"))
    own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key in past.keys[1:]]
    pad = main.new_full((*main.shape[:-1], MOST_STEPS - len(own)), float("-inf"))
    weights = torch.softmax(torch.cat([main, *own, pad], dim=-1), dim=-1, dtype=torch.float32).to(q.dtype)
    mixed = weights[..., :length].flatten(2, 3) @ past.values[0]
    mixed = mixed.view(grouped.shape)
    for index, value in enumerate(past.values[1:]):
        mixed = mixed + weights[..., length + index, None] * value[:, :, None]
    return mixed.reshape(batch, heads, length, size)


def save_head(
    folder: Path, shape: HeadShape, named: Mapping[str, Tensor], draft_ids: Tensor, note: Mapping[str, Any]
) -> None:
    """Writes ``model.safetensors`` (bf16) and ``config.json`` into ``folder``, each by an atomic replace.

    ``note`` is kept in the config under ``specmeter_training``.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in named.items()}
    ids = draft_ids.cpu().long()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    partial = folder / ".model.safetensors.partial"
    save_file(tensors, partial)
    partial.replace(folder / "model.safetensors")
    text = json.dumps(head_config(shape, note), indent=1) + "\n"
    partial = folder / ".config.json.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / "config.json")


def head_config(shape: HeadShape, note: Mapping[str, Any]) -> dict[str, Any]:
    """The head's ``config.json``. No key that an engine reads states layer ids: to each they mean another state."""
    sizes = asdict(shape)
    capture = list(sizes.pop("capture"))
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **sizes,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        CAPTURE_KEY: capture,
        "specmeter_layer_ids": {
            "_note": "Per-engine ids of the same states. H[k] is the output of decoder layer k-1. "
            "Give them to the engine in the key it reads; it reads none of these.",
            "vllm": {"eagle_aux_hidden_state_layer_ids": capture},
            "sglang": {
                "eagle_config.eagle_aux_hidden_state_layer_ids": [k - 1 for k in capture],
                "eagle_config.use_aux_hidden_state": True,
            },
        },
        "specmeter_training": dict(note),
    }


def load_head(folder: Path, device: torch.device, dtype: torch.dtype) -> Head:
    """Reads a head in the usual checkpoint layout, whose config states the captured states under specmeter_capture.

    Raises SpecmeterError where that key is missing (the first head states none: pass a copy with the key added).
    """
    from safetensors.torch import load_file

    raw = read_config(folder)
    if not isinstance(raw.get(CAPTURE_KEY), list):
        raise SpecmeterError(
            f"The head in {folder} does not say which target states feed it.",
            f"Its config.json has no {CAPTURE_KEY!r} list.",
            f'Add "{CAPTURE_KEY}": [k, ...] where k is the output of decoder layer k-1.',
        )
    fields = {name: raw[name] for name in HeadShape.__dataclass_fields__ if name in raw}
    shape = HeadShape(**{**fields, "capture": tuple(raw[CAPTURE_KEY])})
    tensors = load_file(folder / "model.safetensors")
    head = Head(shape, tensors["d2t"] + torch.arange(len(tensors["d2t"])), dtype)
    with torch.no_grad():
        for name, parameter in zip(head.names, head.weights, strict=True):
            parameter.copy_(tensors[name].float())
    return head.to(device)
