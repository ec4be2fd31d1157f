"""Small random models in the real checkpoint layouts, for tests that need many prompts in little time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, DRAFT_VOCAB, HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 24, 18, 32, 48, 4, 2, 8, 3
CAPTURE = [0, 1, 3]
# Random weights give distributions of one token; a small final norm flattens them without changing their order.
SOFTEN = 0.15


def write_target(folder: Path, family: str = "llama", vocab: int = VOCAB, seed: int = 0) -> Path:
    """A random target of ``family`` with ``LAYERS`` layers."""
    draw = _Draw(seed)
    weights = {
        "model.embed_tokens.weight": draw(vocab, HIDDEN, scale=1.0),
        "model.norm.weight": SOFTEN * draw.norm(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= _layer(draw, prefix, HIDDEN)
        weights[f"{prefix}.input_layernorm.weight"] = draw.norm(HIDDEN)
        if family == "qwen2":
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                weights[f"{prefix}.self_attn.{name}_proj.bias"] = draw(heads * HEAD_DIM, scale=0.3)
        if family == "qwen3":
            weights[f"{prefix}.self_attn.q_norm.weight"] = draw.norm(HEAD_DIM)
            weights[f"{prefix}.self_attn.k_norm.weight"] = draw.norm(HEAD_DIM)
    config = _config(vocab) | {"model_type": family, "num_hidden_layers": LAYERS, "tie_word_embeddings": True}
    return _write(folder, config, weights)


def write_head(folder: Path, vocab: int = VOCAB, draft_vocab: int = DRAFT_VOCAB, seed: int = 1) -> Path:
    """An EAGLE-3 head for ``write_target``'s model over some of its tokens.

    It is random but for a leaning to the last state's own token, which the target leans to as well (its embedding is
    tied), so that drafts of several steps are accepted now and then.
    """
    draw = _Draw(seed)
    ids = torch.randperm(vocab, generator=draw.generator)[:draft_vocab].sort().values
    embedding = _Draw(0)(vocab, HIDDEN, scale=1.0)
    last_state = torch.cat([torch.zeros(HIDDEN, (len(CAPTURE) - 1) * HIDDEN), torch.eye(HIDDEN)], dim=1)
    weights = {
        "fc.weight": last_state + draw(HIDDEN, len(CAPTURE) * HIDDEN, scale=0.02),
        "midlayer.input_layernorm.weight": draw.norm(HIDDEN),
        "midlayer.hidden_norm.weight": draw.norm(HIDDEN),
        "norm.weight": SOFTEN * draw.norm(HIDDEN),
        "lm_head.weight": embedding[ids] + draw(draft_vocab, HIDDEN, scale=0.1),
        **_layer(draw, "midlayer", 2 * HIDDEN),
    }
    weights["d2t"] = ids - torch.arange(draft_vocab)
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    config = _config(vocab) | {
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "specmeter_capture": CAPTURE,
    }
    return _write(folder, config, weights)


class _Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 0.25) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale

    def norm(self, size: int) -> Tensor:
        return 1.0 + self(size, scale=0.2)


def _layer(draw: _Draw, prefix: str, inputs: int) -> dict[str, Tensor]:
    return {
        f"{prefix}.self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, inputs),
        f"{prefix}.self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, inputs),
        f"{prefix}.self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, inputs),
        f"{prefix}.self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.post_attention_layernorm.weight": draw.norm(HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": draw(WIDE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": draw(WIDE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": draw(HIDDEN, WIDE),
    }


def _config(vocab: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
    }


def _write(folder: Path, config: dict[str, object], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
