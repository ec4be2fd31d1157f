"""Broken and sound pairs: every fault is named, and sound pairs raise no alarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specmeter.errors import SpecmeterError
from specmeter.wiring.check import check_pair, open_pair
from specmeter.wiring.findings import Finding, Severity
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.locate import Engine
from tests.support.wiring_pairs import TARGETS, Made, make

TOP, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
Mutation = Callable[[Made], None]
V, S = "vllm==0.32.0", "sglang==0.5.16"


def findings(
    made: Made,
    folder: Path,
    engine: str = "",
    settings: Settings | None = None,
    served: int | None = None,
    told: tuple[int, ...] | None = None,
) -> list[Finding]:
    target, draft = made.write(folder)
    name, _, version = engine.partition("==")
    engines = [Engine(name, version, None)] if engine else []
    return list(check_pair(open_pair(target, draft), engines, settings or Settings(), served, told).findings)


def alarms(found: list[Finding]) -> list[str]:
    return [f"{f.severity.value} {f.id}: {f.what}" for f in found if f.severity is not Severity.NOTE]


# -- sound pairs


@pytest.mark.parametrize("family", sorted(TARGETS))
def test_no_alarm_on_a_sound_pair_with_default_layers(family: str, tmp_path: Path) -> None:
    # vLLM has no EAGLE-3 for these two.
    engine = "sglang==0.5.23" if family in ("glm", "qwen2moe") else ""
    assert alarms(findings(make(family), tmp_path, engine)) == []


def nested(made: Made, *ids: int) -> None:
    made.draft[NESTED] = {TOP: list(ids)}


SOUND: dict[str, tuple[str, str, Mutation, tuple[int, ...] | None]] = {
    "SGLang's Llama takes outputs": ("llama", "sglang==0.5.16", lambda m: nested(m, 2, 15, 27), (3, 16, 28)),
    "vLLM takes inputs": ("llama", "vllm==0.32.0", lambda m: m.draft.update({TOP: [3, 16, 28]}), (3, 16, 28)),
    "SGLang's DeepSeek takes inputs since 0.5.13": (
        "deepseek", "sglang==0.5.16", lambda m: nested(m, 3, 31, 59), (3, 31, 59)
    ),
    "and outputs before": ("deepseek", "sglang==0.5.12", lambda m: nested(m, 2, 30, 58), (3, 31, 59)),
    "a first id of 1 means outputs": ("kimi", "sglang==0.5.23", lambda m: nested(m, 1, 29, 57), (2, 30, 58)),
    "gpt-oss up to its last layer": ("gptoss", "sglang==0.5.23", lambda m: nested(m, 24, 30, 36), (24, 30, 36)),
    "SpecForge's default written out": ("qwen3", "sglang==0.5.10", lambda m: nested(m, 1, 17, 32), None),
    "five states": ("llama", "vllm==0.32.0", lambda m: five_states(m), (2, 8, 16, 24, 30)),
    "states stated by the head": (
        "llama", "vllm==0.32.0", lambda m: m.draft.update({TOP: [5, 9, 20], "specmeter_capture": [5, 9, 20]}), None
    ),
    "full draft vocabulary": ("llama", "", lambda m: full_vocabulary(m), None),
    "a head in the layout of the speculators library": ("qwen3", V, lambda m: speculators(m), None),
    "a head with latent attention": ("kimik2", "sglang==0.5.23", lambda m: latent(m), None),
    "norm before the residual in vLLM": (
        "llama", V, lambda m: m.draft.update(norm_before_residual=True), None
    ),
    "per-state norms": ("llama", "vllm==0.32.0", lambda m: per_state_norms(m), None),
}  # fmt: skip


def five_states(made: Made) -> None:
    made.draft.update({TOP: [2, 8, 16, 24, 30], "num_aux_hidden_states": 5})
    made.draft_tensors["fc.weight"] = ("BF16", (4096, 5 * 4096))


def full_vocabulary(made: Made) -> None:
    made.draft["draft_vocab_size"] = made.target["vocab_size"]
    made.draft_tensors["lm_head.weight"] = ("BF16", (made.target["vocab_size"], 4096))
    made.d2t, made.t2d = [], []


def speculators(made: Made) -> None:
    """The layer's config one level down, ``layers.0`` for ``midlayer``, ids on top, own embeddings."""
    layer = dict(made.draft)
    vocab, hidden = layer["vocab_size"], layer["hidden_size"]
    made.draft.clear()
    made.draft.update({
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "norm_before_residual": True,
        "draft_vocab_size": layer.pop("draft_vocab_size"), "target_hidden_size": None, "embed_requires_grad": False,
        "tie_word_embeddings": False, TOP: [2, 18, 33], "transformer_layer_config": layer, "torch_dtype": "bfloat16",
    })  # fmt: skip
    made.draft_tensors = {n.replace("midlayer.", "layers.0."): size for n, size in made.draft_tensors.items()}
    made.draft_tensors["embed_tokens.weight"] = ("BF16", (vocab, hidden))


def latent(made: Made) -> None:
    """Multi-head latent attention in the head's layer, as heads for Kimi K2 have it."""
    hidden, part = made.draft["hidden_size"], "midlayer.self_attn."
    made.draft.update(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    for name in ("q_proj", "k_proj", "v_proj"):
        del made.draft_tensors[f"{part}{name}.weight"]
    made.draft_tensors.update({
        f"{part}q_a_proj.weight": ("BF16", (1536, 2 * hidden)), f"{part}q_a_layernorm.weight": ("BF16", (1536,)),
        f"{part}q_b_proj.weight": ("BF16", (32 * 192, 1536)), f"{part}kv_a_layernorm.weight": ("BF16", (512,)),
        f"{part}kv_a_proj_with_mqa.weight": ("BF16", (576, 2 * hidden)),
        f"{part}kv_b_proj.weight": ("BF16", (32 * 256, 512)),
    })  # fmt: skip


def per_state_norms(made: Made) -> None:
    made.draft["fc_norm"] = True
    for index in range(3):
        made.draft_tensors[f"fc_norm.{index}.weight"] = ("BF16", (4096,))


@pytest.mark.parametrize("name", SOUND)
def test_no_alarm_on_a_sound_configured_pair(name: str, tmp_path: Path) -> None:
    family, engine, mutate, told = SOUND[name]
    made = make(family)
    mutate(made)
    assert alarms(findings(made, tmp_path, engine, told=told)) == []


# -- broken pairs: (family, engine, mutation, finding that must be named, trained states)


def sized(name: str, *shape: int) -> Mutation:
    return lambda made: made.draft_tensors.update({name: ("BF16", shape)})


def config(**values: object) -> Mutation:
    return lambda made: made.draft.update(values)


def without(*names: str) -> Mutation:
    def drop(made: Made) -> None:
        for name in names:
            del made.draft_tensors[name]

    return drop


def d2t(change: Callable[[list[int]], list[int]]) -> Mutation:
    def set_d2t(made: Made) -> None:
        made.d2t = change(made.d2t)

    return set_d2t


def t2d(change: Callable[[list[int]], list[int]]) -> Mutation:
    def set_t2d(made: Made) -> None:
        made.t2d = change(made.t2d)

    return set_t2d


def file(name: str, text: str) -> Mutation:
    return lambda made: made.files.update({name: text.encode()})


def both(*mutations: Mutation) -> Mutation:
    def apply(made: Made) -> None:
        for mutate in mutations:
            mutate(made)

    return apply


def no_head(made: Made) -> None:
    made.draft["architectures"] = ["LlamaForCausalLM"]
    made.draft_tensors.clear()
    made.d2t.clear()
    made.t2d.clear()


BROKEN: dict[str, tuple[str, str, Mutation, str, tuple[int, ...] | None]] = {
    "embedding by id 0 in vLLM": ("llama", V, config(**{TOP: [0, 15, 28]}), "embedding-fed", (1, 16, 29)),
    "embedding by id -1 in SGLang": ("llama", S, lambda m: nested(m, -1, 15, 28), "embedding-fed", None),
    "embedding in DeepSeek since 0.5.13": ("deepseek", S, lambda m: nested(m, 0, 30, 58), "embedding-fed", None),
    "outputs read as inputs": ("llama", V, config(**{TOP: [2, 15, 27]}), "wiring-shift", (3, 16, 28)),
    "inputs read as outputs": ("llama", S, lambda m: nested(m, 3, 16, 28), "wiring-shift", (3, 16, 28)),
    "Kimi: the change of 0.5.13": ("kimi", S, lambda m: nested(m, 2, 30, 58), "wiring-shift", (3, 31, 59)),
    "N=61: the input default through a setter that adds one": (
        "deepseek", "sglang==0.5.12", lambda m: nested(m, 2, 30, 58), "wiring-shift", (2, 30, 58)
    ),
    "nested key ignored by vLLM's runner V2": ("llama", V, lambda m: nested(m, 2, 15, 27), "ids-ignored", None),
    "top-level key ignored by SGLang": ("llama", S, config(**{TOP: [3, 16, 28]}), "ids-ignored", None),
    "two runners, two answers": ("llama", V, lambda m: nested(m, 3, 16, 28), "runners-disagree", None),
    "graphs keep the default": ("llama", "sglang==0.5.9", lambda m: nested(m, 2, 15, 27), "graph-layers", None),
    "id beyond the last layer": ("llama", V, config(**{TOP: [3, 16, 33]}), "ids-out-of-range", None),
    "id never captured": ("llama", "vllm==0.15.0", config(**{TOP: [3, 16, 32]}), "ids-never-captured", None),
    "negative id": ("llama", S, lambda m: nested(m, -3, 15, 27), "ids-out-of-range", None),
    "repeated id": ("llama", V, config(**{TOP: [3, 16, 16]}), "ids-duplicate", None),
    "descending ids": ("llama", V, config(**{TOP: [28, 16, 3]}), "ids-unsorted", None),
    "ids that are text": ("llama", V, config(**{TOP: "3,16,28"}), "ids-malformed", None),
    "two keys that disagree": (
        "llama", V, both(config(**{TOP: [3, 16, 28]}), lambda m: nested(m, 3, 16, 28)), "ids-conflict", None
    ),
    "engines disagree": ("llama", "", both(config(**{TOP: [5, 16, 28]})), "engines-disagree", None),
    "two ids for three states": ("llama", V, config(**{TOP: [3, 16]}), "state-count", None),
    "four states in fc, three fed": ("llama", V, sized("fc.weight", 4096, 4 * 4096), "state-count", None),
    "four nested ids, fc of three": ("llama", S, lambda m: nested(m, 1, 8, 15, 28), "state-count", None),
    "fc of no whole number of states": ("llama", "", sized("fc.weight", 4096, 10000), "fc-width", None),
    "fc with wrong outputs": ("llama", "", sized("fc.weight", 2048, 3 * 4096), "fc-width", None),
    "another target's hidden size": ("llama", "", config(target_hidden_size=5120), "hidden-size", None),
    "head narrower, without embeddings": ("llama", "", config(hidden_size=2048), "hidden-size", None),
    "head count": ("llama", "", config(num_attention_heads=40), "head-counts", None),
    "key/value heads": ("llama", "", config(num_key_value_heads=4), "head-counts", None),
    "heads that do not divide": ("llama", "", config(num_key_value_heads=5), "head-counts", None),
    "head_dim": ("qwen3", "", config(head_dim=64), "head-counts", None),
    "intermediate size": ("qwen2", "", config(intermediate_size=4096), "intermediate-size", None),
    "norm size": ("llama", "", sized("norm.weight", 2048), "norm-size", None),
    "vocab size": ("qwen3", "", config(vocab_size=152064), "vocab-size", None),
    "draft vocab size": ("llama", "", config(draft_vocab_size=2000), "draft-vocab", None),
    "lm_head rows": ("llama", "", sized("lm_head.weight", 999, 4096), "draft-vocab", None),
    "own embeddings of another vocabulary": (
        "llama", "", sized("embed_tokens.weight", 32000, 4096), "vocab-size", None
    ),
    "d2t shorter": ("llama", "", d2t(lambda v: v[:-1]), "d2t-length", None),
    "d2t outside the vocabulary": ("llama", "", d2t(lambda v: [*v[:-1], 200000]), "d2t-range", None),
    "d2t negative": ("llama", "", d2t(lambda v: [-1, *v[1:]]), "d2t-range", None),
    "d2t doubled": ("llama", "", d2t(lambda v: [*v[:-1], v[-2] - 1]), "d2t-duplicate", None),
    "d2t holds target ids": ("llama", "", d2t(lambda v: [3 * i for i in range(1000)]), "d2t-absolute", None),
    "no d2t": ("llama", "", both(d2t(lambda v: []), t2d(lambda v: [])), "d2t-missing", None),
    "t2d shifted by one": ("llama", "", t2d(lambda v: [0, *v[:-1]]), "t2d-mismatch", None),
    "t2d of another vocabulary": ("llama", "", t2d(lambda v: v[:32000]), "t2d-length", None),
    "t2d with one token more": ("llama", "", t2d(lambda v: [1, 1, *v[2:]]), "t2d-mismatch", None),
    "head in float32": (
        "llama", "", lambda m: m.draft_tensors.update({n: ("F32", s[1]) for n, s in m.draft_tensors.items()}), "dtype",
        None,
    ),
    "config states another dtype": ("llama", "", config(torch_dtype="float16"), "dtype", None),
    "missing projection": ("llama", "", without("midlayer.mlp.up_proj.weight"), "missing-tensor", None),
    "missing hidden_norm": ("llama", "", without("midlayer.hidden_norm.weight"), "missing-tensor", None),
    "no fc": ("llama", "", without("fc.weight"), "missing-tensor", None),
    "a second layer's tensors": ("llama", "", sized("layers.1.mlp.up_proj.weight", 8192, 4096), "extra-tensor", None),
    "unasked bias": ("llama", "", sized("midlayer.self_attn.q_proj.bias", 4096), "extra-tensor", None),
    "no lm_head": ("llama", "", without("lm_head.weight"), "lm-head", None),
    "tied with a draft vocabulary": ("llama", "", config(tie_word_embeddings=True), "lm-head-tied", None),
    "norm weights without the option": ("llama", V, sized("fc_norm.0.weight", 4096), "norm-option", None),
    "option without norm weights": ("llama", V, config(norm_before_fc=True), "norm-option", None),
    "option that SGLang ignores": ("llama", S, config(norm_before_residual=True), "option-ignored", None),
    "rope theta": ("llama", "", config(rope_theta=10000.0), "rope", None),
    "rope scaling without a factor": ("llama", "", config(rope_scaling={"rope_type": "yarn"}), "rope", None),
    "unknown rope type": ("llama", "", config(rope_scaling={"rope_type": "spiral", "factor": 4}), "rope", None),
    "short context": ("llama", "", config(max_position_embeddings=2048), "context-length", None),
    "another tokenizer": (
        "llama", "", both(file("tokenizer.json", "{}"), file("target/tokenizer.json", '{"a": 1}')), "tokenizer", None
    ),
    "another chat template": (
        "llama", "", both(file("chat_template.jinja", "a"), file("target/chat_template.jinja", "b")), "chat-template",
        None,
    ),
    "another end token": ("llama", "", config(eos_token_id=7), "special-tokens", None),
    "remote code": ("llama", "", config(auto_map={"AutoModel": "modeling_x.X"}), "remote-code", None),
    "Qwen2 MoE has no EAGLE-3 in vLLM": ("qwen2moe", V, lambda m: None, "engine-refuses", None),
    "a class the table does not know": (
        "llama", V, lambda m: m.target.update(architectures=["OlmoForCausalLM"]), "table-class", None
    ),
    "GLM-4 MoE has no EAGLE-3 in vLLM": ("glm", V, lambda m: None, "engine-refuses", None),
    "Kimi K2.5 before SGLang 0.5.10": ("kimi", "sglang==0.5.9", lambda m: None, "engine-refuses", None),
    "not a head at all": ("llama", "", lambda m: no_head(m), "head-kind", None),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_is_named(name: str, tmp_path: Path) -> None:
    family, engine, mutate, expected, told = BROKEN[name]
    made = make(family)
    mutate(made)
    found = findings(made, tmp_path, engine, told=told)
    named = [f for f in found if f.id == expected]
    assert named, f"wanted {expected}, got {[(f.id, f.what) for f in found]}"
    assert all(f.what for f in found)


COMBINED: dict[str, tuple[str, str, Mutation, set[str]]] = {
    "shift and map": (
        "llama", V, both(config(**{TOP: [0, 16, 28]}), d2t(lambda v: v[:-1])), {"embedding-fed", "d2t-length"}
    ),
    "vocabulary, dtype and context": (
        "qwen3", "", config(vocab_size=5000, torch_dtype="float16", max_position_embeddings=2048),
        {"vocab-size", "dtype", "context-length"},
    ),
    "ids and option": (
        "llama", S, both(lambda m: nested(m, 5, 5, 60), config(norm_before_fc=True)),
        {"ids-duplicate", "ids-out-of-range", "norm-option", "option-ignored"},
    ),
    "missing and extra": (
        "minimax", "", both(without("norm.weight"), sized("layers.3.x.weight", 4)), {"missing-tensor", "extra-tensor"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMBINED)
def test_several_faults_are_all_named(name: str, tmp_path: Path) -> None:
    family, engine, mutate, expected = COMBINED[name]
    made = make(family)
    mutate(made)
    assert expected <= {f.id for f in findings(made, tmp_path, engine)}


FLAGS: dict[str, tuple[Settings, str, str]] = {
    "EAGLE with an EAGLE-3 head": (Settings(algorithm="EAGLE"), S, "algorithm"),
    "too few draft tokens": (Settings("EAGLE3", steps=2, topk=1, draft_tokens=2), S, "tree-settings"),
    "more tokens than the tree has": (Settings("EAGLE3", steps=1, topk=4, draft_tokens=16), S, "tree-settings"),
    "a path that does not fit": (Settings("EAGLE3", steps=7, topk=4, draft_tokens=7), S, "tree-settings"),
    "no steps": (Settings("EAGLE3", steps=0), S, "tree-settings"),
    "a tree in vLLM": (Settings("EAGLE3", steps=3, topk=4), V, "tree-settings"),
    "draft TP in vLLM": (Settings(tp=8, draft_tp=1), V, "draft-tp"),
    "draft TP in SGLang": (Settings(tp=8, draft_tp=1), S, "draft-tp"),
    "draft vocabulary over 3 ranks": (Settings(tp=3), V, "draft-tp"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_checked_against_the_head(name: str, tmp_path: Path) -> None:
    settings, engine, expected = FLAGS[name]
    assert expected in {f.id for f in findings(make("llama"), tmp_path, engine, settings)}


def test_sound_flags_raise_no_alarm(tmp_path: Path) -> None:
    settings = Settings("EAGLE3", steps=3, topk=4, draft_tokens=16, tp=8)
    assert alarms(findings(make("llama"), tmp_path, S, settings)) == []


def test_served_context_beyond_the_head_is_an_error(tmp_path: Path) -> None:
    found = findings(make("llama"), tmp_path, S, served=200_000)
    assert [f.severity for f in found if f.id == "context-length"] == [Severity.ERROR]


def test_the_cure_is_the_exact_key_and_ids(tmp_path: Path) -> None:
    made = make("llama")
    made.draft[TOP] = [2, 15, 27]
    cure = next(f.cure for f in findings(made, tmp_path, V, told=(3, 16, 28)) if f.id == "wiring-shift")
    assert f"{TOP}: [3, 16, 28]" in cure
    made.draft.pop(TOP)
    cure = next(f.cure for f in findings(made, tmp_path / "s", S, told=(3, 16, 28)) if f.id == "wiring-shift")
    assert f"eagle_config.{TOP}: [2, 15, 27]" in cure


def test_the_embedding_is_put_down_to_a_convention_only_where_that_explains_it(tmp_path: Path) -> None:
    made = make("llama")
    made.draft[TOP] = [0, 15, 28]
    for number, (told, said) in enumerate((((1, 16, 29), "means its input"), ((3, 16, 29), "trained on H[3], H[16]"))):
        found = findings(made, tmp_path / str(number), V, told=told)
        assert said in next(f.cause for f in found if f.id == "embedding-fed")


def test_without_an_engine_named_a_wiring_fault_of_one_engine_is_no_error(tmp_path: Path) -> None:
    made = make("llama")
    made.draft[TOP] = [3, 16, 28]
    found = findings(made, tmp_path, told=(3, 16, 28))
    assert {f.id for f in found if f.engine.startswith("sglang") and f.severity is Severity.WARNING} >= {"ids-ignored"}
    assert not [f for f in found if f.severity is Severity.ERROR]


def test_a_config_whose_size_is_not_a_number_is_refused(tmp_path: Path) -> None:
    made = make("llama")
    made.draft["hidden_size"] = "4096"
    with pytest.raises(SpecmeterError, match="hidden_size"):
        findings(made, tmp_path)
