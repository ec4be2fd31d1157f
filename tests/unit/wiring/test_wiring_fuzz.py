"""Whatever stands in the configs, the check answers or refuses; it never falls over."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.errors import SpecmeterError
from specmeter.wiring.check import check_pair, open_pair
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.locate import Engine
from tests.support.wiring_pairs import make

IDS = "eagle_aux_hidden_state_layer_ids"
KEYS = (
    IDS, "eagle_config", "dflash_config", "target_layer_ids", "specmeter_capture", "architectures", "hidden_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "rope_scaling",
    "rope_parameters", "rope_theta", "max_position_embeddings", "torch_dtype", "tie_word_embeddings", "eos_token_id",
    "num_aux_hidden_states", "target_hidden_size", "num_hidden_layers", "auto_map", "text_config", "fc_norm",
    "transformer_layer_config", "intermediate_size", "speculators_model_type", "bos_token_id", "norm_before_fc",
)  # fmt: skip
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([IDS, "factor", "x"]), inner),
    max_leaves=6,
)
CHANGES = st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=3)
ENGINES = [Engine("sglang", version, None) for version in ("0.5.9", "0.5.23")] + [Engine("vllm", "0.32.0", None)]


@settings(max_examples=150, deadline=None)
@given(target=CHANGES, draft=CHANGES, engine=st.sampled_from(ENGINES))
def test_any_config_gives_findings_or_a_refusal(target: dict[str, Any], draft: dict[str, Any], engine: Engine) -> None:
    made = make("llama", draft_vocab=8)
    made.t2d, made.d2t = [], []
    made.target.update(target)
    made.draft.update(draft)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = check_pair(open_pair(*made.write(Path(folder))), [engine], Settings(tp=2))
        except SpecmeterError as refusal:
            assert refusal.what
            return
    assert all(finding.id and finding.what for finding in result.findings)
    assert result.feeds
