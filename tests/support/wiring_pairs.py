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


def target_config(architecture: str, layers: int, hidden: int, vocab: int, **more: Any) -> dict[str, Any]:
    """A target's config with the public field names of its family."""
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


TARGETS: dict[str, dict[str, Any]] = {
    "llama": target_config("LlamaForCausalLM", 32, 4096, 128256, model_type="llama", num_attention_heads=32),
    "qwen2": target_config("Qwen2ForCausalLM", 28, 3584, 152064, model_type="qwen2", num_attention_heads=28),
    "qwen3": target_config("Qwen3ForCausalLM", 36, 4096, 151936, model_type="qwen3", num_attention_heads=32),
    "qwen3moe": target_config(
        "Qwen3MoeForCausalLM", 48, 2048, 151936, model_type="qwen3_moe", num_experts=128, moe_intermediate_size=768
    ),
    "deepseek": target_config(
        "DeepseekV3ForCausalLM", 61, 7168, 129280, model_type="deepseek_v3", kv_lora_rank=512, n_routed_experts=256
    ),
    "kimi": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": target_config("DeepseekV3ForCausalLM", 61, 7168, 163840, model_type="kimi_k2"),
    },
    "glm": target_config("Glm4MoeForCausalLM", 92, 5120, 151552, model_type="glm4_moe", n_routed_experts=160),
    "gptoss": target_config("GptOssForCausalLM", 36, 2880, 201088, model_type="gpt_oss", num_local_experts=128),
    "mistral": target_config("MistralForCausalLM", 32, 4096, 32768, model_type="mistral", num_attention_heads=32),
    "minimax": target_config("MiniMaxM2ForCausalLM", 62, 3072, 200064, model_type="minimax", num_local_experts=256),
}


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
        "rope_theta": text["rope_theta"],
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
