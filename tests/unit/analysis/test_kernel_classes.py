"""Names that SGLang, vLLM, PyTorch, cuBLAS, FlashInfer and NCCL give their kernels, and lm_head by its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmeter.analysis.kernel_classes import (
    ATTENTION,
    CLASSES,
    GEMM,
    LM_HEAD,
    SAMPLING,
    classes_of,
    default_patterns,
    mark_lm_head,
    read_patterns,
)
from specmeter.errors import SpecmeterError

NAMES = {
    "attention": [
        "_fwd_grouped_kernel_stage1",
        "_fwd_kernel_stage2",
        "_fwd_kernel",
        "fused_recurrent_gated_delta_rule_update_fwd_kernel",
        "_sparse_mla_fwd_kernel",
        "kernel_unified_attention_3d",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collective>>>",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>",
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u>",
        "void vllm::paged_attention_v2_kernel<half>",
        "fmhaSm90aKernel_QkvBfloat16",
        "void pytorch_flash::flash_fwd_splitkv_combine_kernel<>",
        "void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
    ],
    "dense_gemm": [
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, float>",
        "ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x5_tn",
        "void dot_kernel<float, 128, 0, cublasDotParams<>>",
        "Cijk_Alik_Bljk_BBS_BH_MT32x32x64",
        "quantized::linear_dynamic_fp16",
        "aten::mm",
    ],
    "experts": [
        "fused_moe_kernel",
        "_router_gemv_kernel",
        "void moe_align_block_size_kernel<int>",
        "void topkGatingSoftmax<float, 4, 128>",
        "void vllm::moe::topkGatingSoftmax<4, 128, 4>",
        "void moe_sum_reduce_kernel",
        "void grouped_topk_fused_kernel<float>",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<int>>>",
    ],
    "collectives": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<>",
        "multimem_all_reduce_kernel",
        "ncclDevKernel_AllGather_RING_LL",
        "two_shot_all_reduce_kernel",
    ],
    "rope_kv": [
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheEnhancedKernel",
        "void vllm::reshape_and_cache_flash_kernel",
        "store_kvcache",
        "alloc_extend_kernel",
        "get_last_loc_kernel",
        "update_trtllm_mha_graph_metadata_kernel",
        "set_mla_kv_buffer_kernel",
        "create_flashinfer_kv_indices_triton",
        "assign_req_to_token_pool",
        "get_num_kv_splits_triton",
        "void vllm::rotary_embedding_kernel<c10::BFloat16>",
        "assign_draft_cache_locs_page_size_1",
    ],
    "sampling": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
        "void (anonymous namespace)::cunn_SoftMaxForward<4, float>",
        "void at::native::sbtopk::gatherTopK<float, unsigned, 2>",
        "VerifyTreeGreedy",
        "_build_chain_tree_kernel",
        "_combine_sampled_and_draft_tokens_kernel",
        "void build_tree_efficient(long*)",
        "void TreeSpeculativeSamplingTargetOnly<512>",
        "rejection_greedy_sample_kernel",
        "at::native::radixSortKVInPlace",
        "create_extend_after_decode_spec_info_eagle",
    ],
    "norm_elementwise": [
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>",
        "_layer_norm_fwd_kernel",
        "_gemma_fused_add_rmsnorm_kernel",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>>",
        "act_and_mul_kernel",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<>",
        "triton_poi_fused_add_mul_0",
        "void at::native::index_elementwise_kernel<128, 4>",
        "void at::native::vectorized_gather_kernel<16, long>",
    ],
    "copy": ["Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)"],
    "probe": ["_stamp_kernel"],
    "other": ["kernel_nobody_knows"],
}  # fmt: skip


@pytest.mark.parametrize(("wanted", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernels_class_follows_from_its_name(wanted: str, name: str) -> None:
    assert CLASSES[int(classes_of([name])[0])] == wanted


@given(st.lists(st.text(max_size=60), max_size=20))
def test_every_name_has_exactly_one_class(names: list[str]) -> None:
    found = classes_of(names)
    assert len(found) == len(names) and all(0 <= kind < len(CLASSES) for kind in found.tolist())


def test_the_first_pattern_in_the_file_wins() -> None:
    rules = default_patterns().rules
    name = "void cutlass::device_kernel<flash::FlashAttnFwdSm90>"
    hits = [kind for kind, pattern in rules if pattern.search(name)]
    assert hits[0] == ATTENTION and GEMM in hits


def test_a_users_patterns_go_before_ours(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('schema = 1\n[[class]]\nname = "attention"\npatterns = ["^nvjet_mine"]\n')
    patterns = read_patterns(mine)
    assert patterns.classify("nvjet_mine_64") == ATTENTION
    assert patterns.classify("nvjet_tst_64") == GEMM


@pytest.mark.parametrize(
    "text",
    [
        "not toml [",
        "schema = 2",
        'schema = 1\n[[class]]\nname = "nonsense"\npatterns = ["a"]',
        'schema = 1\n[[class]]\nname = "copy"\npatterns = ["("]',
        'schema = 1\n[[class]]\nname = "copy"\npatterns = [""]',
        'schema = 1\n[[class]]\nname = "copy"\npatterns = "a"',
        "schema = 1\nclass = 3",
    ],
)
def test_a_broken_file_is_one_plain_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(SpecmeterError):
        read_patterns(file)


def forward(*kinds: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([k for k, _ in kinds]), np.array([d for _, d in kinds])


LAYER = ((GEMM, 10), (ATTENTION, 8), (GEMM, 8), (GEMM, 20), (GEMM, 12))


def marked(kinds: np.ndarray, dur: np.ndarray, head: bool = False, name: str = "nvjet") -> list[int]:
    names = [name]
    one = np.zeros(len(kinds), np.int64)
    out = mark_lm_head(kinds, names, one, dur, one, np.full(len(kinds), head))
    return np.flatnonzero(out == LM_HEAD).tolist()


def test_lm_head_is_the_last_large_gemm_of_a_forward() -> None:
    assert marked(*forward(*LAYER, *LAYER, (GEMM, 60))) == [10]
    # Without one the last GEMM is the down projection: as long as the others.
    assert marked(*forward(*LAYER, *LAYER)) == []


def test_each_step_of_a_draft_graph_has_its_own() -> None:
    step = (*LAYER, (GEMM, 40), (SAMPLING, 3))
    assert marked(*forward(*step, *step, *step)) == [5, 12, 19]


def test_in_an_lm_heads_own_point_every_gemm_is_one() -> None:
    assert marked(*forward((GEMM, 5)), head=True) == [0]


def test_a_reduction_behind_it_belongs_to_it_and_is_no_lm_head_itself() -> None:
    kinds, dur = forward(*LAYER, (GEMM, 60), (GEMM, 90))
    names = ["nvjet", "cublasLt::splitKreduce_kernel"]
    name = np.array([0] * 6 + [1])
    zero = np.zeros(len(kinds), np.int64)
    out = mark_lm_head(kinds, names, name, dur, zero, np.zeros(len(kinds), bool))
    assert np.flatnonzero(out == LM_HEAD).tolist() == [5, 6]
