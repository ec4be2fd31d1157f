"""Model directories without weights, for SGLang's ``--load-format dummy``: a target and its EAGLE-3 head.

    python benchmarks/gpu_models.py FOLDER SHAPE...        writes FOLDER/SHAPE/target and FOLDER/SHAPE/head

A config is all that SGLang 0.5.16 reads with dummy weights and ``--skip-tokenizer-init``. Its draft loader
(models/llama_eagle3.py) needs no ``d2t`` table: without one, draft ids are target ids, here the first
``DRAFT_VOCAB``. Weights are drawn by SGLang with a fixed seed, so every start has the same ones; they are tiny
(+-0.001), every layer's are alike, and the text means nothing: times are real, texts and acceptance are not.

``copy_head`` makes the packaged head of SmolLM2 readable for SGLang, which takes state H[k] as id k - 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB, DRAFT_VOCAB = 128256, 32000
CONTEXT = 8192


@dataclass(frozen=True)
class Shape:
    """A transformer's sizes. ``experts`` 0 is dense; ``inner`` is the width of the MLP, or of one expert."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    experts: int = 0
    per_token: int = 0
    vocab: int = VOCAB

    @property
    def weights(self) -> int:
        """Parameters of the target, the embedding and the output layer included, norms left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.inner * max(1, self.experts) + self.hidden * self.experts
        return self.layers * (attention + mlp) + 2 * self.vocab * self.hidden

    @property
    def gigabytes(self) -> float:
        """Bytes of the target's weights in bfloat16, in 1e9 bytes."""
        return 2 * self.weights / 1e9


# Llama-3's shapes; "thin" mixtures have the depth and routing of the large ones (61 layers, 8 of 384 experts) with
# narrow layers, so that the first fits twice into one H200 and the second into four.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 2, 256, 512, 4, 2, head_dim=64, vocab=4096),
        Shape("8b", 32, 4096, 14336, 32, 8),
        Shape("moe", 61, 2048, 192, 16, 4, experts=384, per_token=8),
        Shape("70b", 80, 8192, 28672, 64, 8),
        Shape("moe200b", 61, 4096, 768, 32, 8, experts=384, per_token=8),
    )
}


def target_config(shape: Shape) -> dict[str, Any]:
    """config.json of the target: LlamaForCausalLM, or Qwen3MoeForCausalLM, whose SGLang class takes EAGLE-3."""
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.per_token,
        "moe_intermediate_size": shape.inner,
        "intermediate_size": 4 * shape.hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    dense = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": shape.inner}
    return {**_common(shape), "num_hidden_layers": shape.layers, **(mixture if shape.experts else dense)}


def head_config(shape: Shape) -> dict[str, Any]:
    """config.json of its EAGLE-3 head: one Llama layer as wide as the target, three captured states by default."""
    inner = 4 * shape.hidden if shape.experts else shape.inner
    return {
        **_common(shape),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "draft_vocab_size": min(DRAFT_VOCAB, shape.vocab),
    }


def _common(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_models(folder: Path, shape: Shape) -> tuple[Path, Path]:
    """Write FOLDER/NAME/target and FOLDER/NAME/head; their paths."""
    paths = []
    for part, config in (("target", target_config(shape)), ("head", head_config(shape))):
        path = folder / shape.name / part
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
        paths.append(path)
    return paths[0], paths[1]


def copy_head(source: Path, to: Path) -> Path:
    """The packaged head at ``to``, with the captured states in the key and the counting that SGLang's Llama reads."""
    shutil.copytree(source, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in config["specmeter_capture"]]}
    (to / "config.json").write_text(json.dumps(config))
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    args = parser.parse_args()
    for name in args.shapes:
        target, head = write_models(args.folder, SHAPES[name])
        print(f"{name}: {SHAPES[name].weights / 1e9:.1f} G weights, {SHAPES[name].gigabytes:.0f} GB: {target} {head}")


if __name__ == "__main__":
    main()
