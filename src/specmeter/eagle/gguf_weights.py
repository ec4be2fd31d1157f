"""Llama weights of a GGUF file as a bfloat16 safetensors file, one tensor at a time.

The safetensors file is written as a stream, so that no more than one tensor's float32 values are held in memory.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import numpy.typing as npt

Bf16 = npt.NDArray[np.uint16]
ROWS_AT_ONCE = 4096

_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a Llama tensor; raises KeyError for a name that a Llama model does not have."""
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if found is None:
        raise KeyError(gguf_name)
    return f"model.layers.{found[1]}.{_INNER[found[2]]}.weight"


def to_bf16(values: npt.NDArray[np.float32]) -> Bf16:
    """float32 values rounded to bfloat16, ties to even, as raw 16-bit words of the same shape.

    A NaN would need its own case; trained weights hold none, and the caller's hash list would show one.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: Bf16 = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def unpermute(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of a q or k projection put back from llama.cpp's order (rotation pairs side by side) to Hugging Face's.

    Hugging Face rotates the first half of a head against the second half, so within each head the rows
    ``(pair, half)`` become ``(half, pair)``. Shape ``[heads * head_dim, hidden]`` stays.
    """
    pairs = weight.shape[0] // heads // 2
    return np.ascontiguousarray(weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2)).reshape(weight.shape)


def _tensor_bf16(tensor: Any, heads: int, kv_heads: int) -> Iterator[Bf16]:
    """The rows of one tensor in pieces, dequantized, in Hugging Face's row order."""
    head_count = {"attn_q": heads, "attn_k": kv_heads}.get(tensor.name.split(".")[-2])
    rows = tensor.data.shape[0] if head_count or tensor.data.ndim == 1 else ROWS_AT_ONCE
    for start in range(0, tensor.data.shape[0], rows):
        piece = to_bf16(gguf.dequantize(tensor.data[start : start + rows], tensor.tensor_type))
        yield piece if head_count is None else unpermute(piece, head_count)


def _header(tensors: list[Any]) -> bytes:
    """The safetensors header for these tensors in this order: length, JSON, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        end = offset + 2 * int(np.prod(shape))
        entries[hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_weights(reader: Any, target: Path, advance: Callable[[float], None]) -> None:
    """Write every tensor of ``reader`` (gguf.GGUFReader of a Llama model) to ``target`` as bfloat16 safetensors.

    ``advance`` is called with the share done, 0 to 1. Raises OSError when the disk cannot take the file, and KeyError
    for a tensor that a Llama model with tied embeddings does not have.
    """
    heads = int(reader.fields["llama.attention.head_count"].contents())
    kv_heads = int(reader.fields["llama.attention.head_count_kv"].contents())
    tensors = list(reader.tensors)
    total = sum(int(tensor.n_elements) for tensor in tensors)
    done = 0
    with target.open("xb") as out:
        out.write(_header(tensors))
        for tensor in tensors:
            for piece in _tensor_bf16(tensor, heads, kv_heads):
                _write_words(out, piece)
                done += piece.size
                advance(done / total)


def _write_words(out: IO[bytes], words: Bf16) -> None:
    out.write(words.astype("<u2", copy=False).data)
