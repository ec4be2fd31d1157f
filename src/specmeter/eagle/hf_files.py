"""The small files of a Hugging Face style model directory, made from a GGUF file's metadata.

The tokenizer is built from the GGUF's vocabulary and merges with the pre-tokenizer that ``tokenizer.ggml.pre`` names.
For ``smollm`` that is: digits apart, one by one, then the GPT-2 byte level split. (transformers' own GGUF reader leaves
the digits together, which gives other ids for texts with numbers.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specmeter.errors import Exit, SpecmeterError

# gguf.TokenType.CONTROL: a token that text never spells out, such as <|im_end|>.
CONTROL_TOKEN = 3


def write_config_files(reader: Any, directory: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json and tokenizer_config.json into ``directory``.

    ``reader`` is a gguf.GGUFReader of a Llama model. Raises SpecmeterError (exit 5) for a tokenizer other than smollm.
    """
    fields = {name: field.contents() for name, field in reader.fields.items()}
    documents = {
        "config.json": _config(fields),
        "generation_config.json": _generation_config(fields),
        "tokenizer.json": _tokenizer(fields),
        "tokenizer_config.json": _tokenizer_config(fields),
    }
    for name, document in documents.items():
        with (directory / name).open("x", encoding="utf-8") as out:
            json.dump(document, out, ensure_ascii=False, indent=None if name == "tokenizer.json" else 2)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps float32: six digits give back the 1e-05 that the model was published with.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 1 / 24,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{short}_token_id": int(fields[f"tokenizer.ggml.{name}_token_id"]) for short, name in names.items()}


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {"_from_model_config": True, **_special_ids(fields)}


def _control_tokens(fields: dict[str, Any]) -> list[tuple[int, str]]:
    kinds = fields["tokenizer.ggml.token_type"]
    return [(i, text) for i, text in enumerate(fields["tokenizer.ggml.tokens"]) if kinds[i] == CONTROL_TOKEN]


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    pre = fields["tokenizer.ggml.pre"]
    if fields["tokenizer.ggml.model"] != "gpt2" or pre != "smollm":
        raise SpecmeterError(
            f"The model file's tokenizer ({pre}) is not one that specmeter can build.",
            "Only the smollm tokenizer (byte level BPE, digits apart) is known.",
            "Use `--model DIR` with a directory that has a tokenizer.json.",
            Exit.ENVIRONMENT,
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **_SPECIAL} for i, text in _control_tokens(fields)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            # The vocabulary lacks 21 of the 256 bytes (those no UTF-8 text or training text has); they give no token.
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": list(fields["tokenizer.ggml.merges"]),
        },
    }


_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    ids = _special_ids(fields)
    control = _control_tokens(fields)
    return {
        # The class that loads tokenizer.json as it stands; a GPT-2 class would put its own pre-tokenizer in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): {"content": text, **_SPECIAL} for i, text in control},
        "additional_special_tokens": [text for i, text in control if i in ids.values()],
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
