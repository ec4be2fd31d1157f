"""Makes pairs of target and draft head on disk: real config shapes, sparse tensors, one mutation at a time."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1}
Sizes = tuple[str, tuple[int, ...]]


def target_config(
    architecture: str, model_type: str, layers: int, hidden: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """A target's config with the public field names of its family; sizes as its best known checkpoint has them."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _heads(heads: int, kv_heads: int, head_dim: int | None, inner: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner, **more}
    return sizes if head_dim is None else {**sizes, "head_dim": head_dim}


def _latent(heads: int, experts: int, first: int, factor: float, **more: Any) -> dict[str, Any]:
    """Multi-head latent attention and experts, as DeepSeek and Kimi write them, with code of their own offered."""
    return {
        "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": first, "moe_layer_freq": 1,
        "rope_scaling": {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, "mscale": 1.0},
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, **more,
    }  # fmt: skip


_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_KIMI = target_config(
    "DeepseekV3ForCausalLM", "kimi_k2", 61, 7168, 163840, **_latent(64, 384, 1, 32.0, rope_theta=50000.0, **_FP8)
)
TARGETS: dict[str, dict[str, Any]] = {
    "llama": target_config(
        "LlamaForCausalLM", "llama", 32, 4096, 128256, **_heads(32, 8, None, 14336), eos_token_id=[2, 128008, 128009],
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    ),
    "mistral": target_config(
        "MistralForCausalLM", "mistral", 32, 4096, 32768, **_heads(32, 8, 128, 14336), sliding_window=None,
        rope_theta=1e6, max_position_embeddings=32768,
    ),
    "qwen2": target_config(
        "Qwen2ForCausalLM", "qwen2", 28, 3584, 152064, **_heads(28, 4, None, 18944), use_sliding_window=False,
        rope_theta=1e6,
    ),
    "qwen2moe": target_config(
        "Qwen2MoeForCausalLM", "qwen2_moe", 28, 3584, 151936, **_heads(28, 4, None, 18944), num_experts=64,
        moe_intermediate_size=2560, shared_expert_intermediate_size=20480, num_experts_per_tok=8, rope_theta=1e6,
    ),
    "qwen3": target_config(
        "Qwen3ForCausalLM", "qwen3", 36, 4096, 151936, **_heads(32, 8, 128, 12288), rope_theta=1e6,
        max_position_embeddings=40960,
    ),
    "qwen3moe": target_config(
        "Qwen3MoeForCausalLM", "qwen3_moe", 48, 2048, 151936, **_heads(32, 4, 128, 6144), num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
    ),
    "deepseek2": target_config(
        "DeepseekV2ForCausalLM", "deepseek_v2", 60, 5120, 102400, **_latent(128, 160, 1, 40.0), rope_theta=10000.0
    ),
    "deepseek": target_config(
        "DeepseekV3ForCausalLM", "deepseek_v3", 61, 7168, 129280, **_latent(128, 256, 3, 40.0), **_FP8,
        rope_theta=10000.0, num_nextn_predict_layers=1,
    ),
    "kimik2": _KIMI,
    "kimi": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        "text_config": _KIMI,
    },
    "glm": target_config(
        "Glm4MoeForCausalLM", "glm4_moe", 92, 5120, 151552, **_heads(96, 8, 128, 12288), n_routed_experts=160,
        partial_rotary_factor=0.5, num_nextn_predict_layers=1, first_k_dense_replace=3, use_qk_norm=True,
    ),
    "gptoss": target_config(
        "GptOssForCausalLM", "gpt_oss", 36, 2880, 201088, **_heads(64, 8, 64, 2880), num_local_experts=128,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18, rope_theta=150000.0,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        quantization_config={"quant_method": "mxfp4"},
    ),
    "minimax": target_config(
        "MiniMaxM2ForCausalLM", "minimax", 62, 3072, 200064, **_heads(48, 8, 128, 1536), num_local_experts=256,
        num_experts_per_tok=8, rotary_dim=64, rope_theta=5e6, use_mtp=True, num_mtp_modules=3, **_FP8,
    ),
}  # fmt: skip
# The spelling of newer configs: dtype, and everything of rope in one table.
_NEW = TARGETS["qwen3moe"]
_NEW["dtype"] = _NEW.pop("torch_dtype")
_NEW["rope_parameters"] = {"rope_type": "default", "rope_theta": _NEW.pop("rope_theta")}


@dataclass
class Made:
    """A pair in memory, to be changed by a mutation and then written."""

    target: dict[str, Any]
    draft: dict[str, Any]
    target_tensors: dict[str, Sizes]
    draft_tensors: dict[str, Sizes]
    d2t: list[int]
    t2d: list[int]
    files: dict[str, bytes] = field(default_factory=dict)
    """Further files of the draft's folder; one whose name starts with "target/" goes to the target's."""

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both folders below ``folder``; returns (target, draft)."""
        target, draft = folder / "target", folder / "draft"
        for path, config in ((target, self.target), (draft, self.draft)):
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(config))
        write_safetensors(target / "model.safetensors", self.target_tensors, {})
        values = {"d2t": struct.pack(f"<{len(self.d2t)}q", *self.d2t), "t2d": bytes(self.t2d)}
        sizes: dict[str, Sizes] = {"d2t": ("I64", (len(self.d2t),)), "t2d": ("BOOL", (len(self.t2d),))}
        tensors = dict(self.draft_tensors)
        tensors.update({name: size for name, size in sizes.items() if size[1][0]})
        write_safetensors(draft / "model.safetensors", tensors, {n: v for n, v in values.items() if v})
        for name, data in self.files.items():
            path = target / name.removeprefix("target/") if name.startswith("target/") else draft / name
            path.write_bytes(data)
        return target, draft


def make(family: str, draft_vocab: int = 1000, states: int = 3) -> Made:
    """A sound pair: an EAGLE-3 head of the usual Llama layout for a target of that family."""
    target = copy.deepcopy(TARGETS[family])
    text = target.get("text_config", target)
    hidden, vocab, heads, inner = text["hidden_size"], text["vocab_size"], 32, 2 * text["hidden_size"]
    head_dim = 128
    draft = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": text.get("rope_theta") or text["rope_parameters"]["rope_theta"],
        "max_position_embeddings": text["max_position_embeddings"],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rows, kv_rows, part = heads * head_dim, 8 * head_dim, "midlayer."
    tensors: dict[str, Sizes] = {
        "fc.weight": ("BF16", (hidden, states * hidden)),
        f"{part}input_layernorm.weight": ("BF16", (hidden,)),
        f"{part}hidden_norm.weight": ("BF16", (hidden,)),
        f"{part}post_attention_layernorm.weight": ("BF16", (hidden,)),
        f"{part}self_attn.q_proj.weight": ("BF16", (rows, 2 * hidden)),
        f"{part}self_attn.k_proj.weight": ("BF16", (kv_rows, 2 * hidden)),
        f"{part}self_attn.v_proj.weight": ("BF16", (kv_rows, 2 * hidden)),
        f"{part}self_attn.o_proj.weight": ("BF16", (hidden, rows)),
        f"{part}mlp.gate_proj.weight": ("BF16", (inner, hidden)),
        f"{part}mlp.up_proj.weight": ("BF16", (inner, hidden)),
        f"{part}mlp.down_proj.weight": ("BF16", (hidden, inner)),
        "norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (draft_vocab, hidden)),
    }
    # Every third token is in the draft vocabulary.
    d2t = [2 * index for index in range(draft_vocab)]
    t2d = [int(token % 3 == 0 and token < 3 * draft_vocab) for token in range(vocab)]
    target_tensors: dict[str, Sizes] = {
        "model.embed_tokens.weight": ("BF16", (vocab, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
    }
    return Made(target, draft, target_tensors, tensors, d2t, t2d)


def write_safetensors(path: Path, tensors: Mapping[str, Sizes], values: Mapping[str, bytes]) -> None:
    """A safetensors file whose data is a hole, except for tensors with given values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    starts: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        starts[name] = at
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        base = stream.tell()
        stream.truncate(base + at)
        for name, data in values.items():
            stream.seek(base + starts[name])
            stream.write(data)
