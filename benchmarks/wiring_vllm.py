"""Wiring on the real engine: vLLM with a head wired right, one layer off, and with the embedding in; and without it.

    python benchmarks/wiring_vllm.py --vllm PYTHON --head DIR [--states 3,16,28] [--arm NAME] [--out FILE]

Before each start ``specmeter check --probe`` predicts the accept length from the files and vLLM's source. Then vLLM
(eager, bfloat16, batch 1, greedy, 3 draft steps) answers the probe's own prompts, and its counters give the accept
length. Run one arm a call (--arm) on a shared machine; --out collects them, and the table is printed from all there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 3
NEW_TOKENS = 96
LANES = 8
PROMPTS = Path(__file__).resolve().parents[1] / "src/specmeter/wiring/probe_prompts.json"
ARMS = ("baseline", "right", "one-off", "embedding")

SERVE = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.loads(sys.argv[1])
speculative = job["head"] and {"method": "eagle3", "model": job["head"], "num_speculative_tokens": job["steps"]}
llm = LLM(model=job["target"], dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=1,
          speculative_config=speculative, disable_log_stats=False)
params = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"])
llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
def counters():
    wanted = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    return {m.name: m.value for m in llm.get_metrics() if m.name in wanted}
before, rates, tokens = counters(), [], 0
for prompt in job["prompts"]:
    start = time.perf_counter()
    made = len(llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)
    rates.append(made / (time.perf_counter() - start))
    tokens += made
after = counters()
drafts = after.get("vllm:spec_decode_num_drafts", 0) - before.get("vllm:spec_decode_num_drafts", 0)
key = "vllm:spec_decode_num_accepted_tokens"
accepted = after.get(key, 0) - before.get(key, 0)
print("RESULT " + json.dumps({"rates": rates, "tokens": tokens, "drafts": drafts, "accepted": accepted}))
"""


def wired(head: Path, states: list[int], folder: Path) -> Path:
    """A copy of the head whose ids make vLLM feed ``states``."""
    copy = folder / "head"
    shutil.copytree(head, copy)
    path = copy / "config.json"
    path.chmod(0o600)
    config = json.loads(path.read_text())
    config["eagle_aux_hidden_state_layer_ids"] = states
    path.write_text(json.dumps(config))
    return copy


def predict(target: Path, head: Path, python: str, trained: list[int]) -> dict[str, Any]:
    """What the check says about the wiring that this vLLM will use."""
    words = ["check", "--target", str(target), "--draft", str(head), "--engine", "vllm", "--python", python]
    words += ["--trained", ",".join(map(str, trained)), "--probe", "--threads", "1", "--json"]
    done = subprocess.run([sys.executable, "-m", "specmeter", *words], capture_output=True, text=True, check=False)
    result = json.loads(done.stdout)["result"]
    used = next(feed for feed in result["feeds"] if feed["used_by_default"])
    return {
        "states": used["states"],
        "accept_length": result["numbers"]["probes"][0]["base"]["accept_length_tokens"],
        "errors": [finding["id"] for finding in result["findings"] if finding["severity"] == "error"],
    }


def serve(target: Path, head: Path | None, python: str) -> dict[str, Any]:
    """Start vLLM in its own interpreter and measure."""
    job = {
        "target": str(target),
        "head": None if head is None else str(head),
        "steps": STEPS,
        "new_tokens": NEW_TOKENS,
        "prompts": json.loads(PROMPTS.read_text())[:LANES],
    }
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        # A file and not -c: vLLM's child processes import the main module again.
        script.write("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in SERVE.splitlines()))
        script.flush()
        done = subprocess.run(
            [python, script.name, json.dumps(job)], capture_output=True, text=True, env=env, check=False
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def run_arm(arm: str, args: argparse.Namespace, target: Path, trained: list[int]) -> dict[str, Any]:
    """Predict, start, measure one arm."""
    if arm == "baseline":
        return {"measured": serve(target, None, args.vllm)}
    states = {"right": trained, "one-off": [k - 1 for k in trained], "embedding": [0, *trained[1:]]}[arm]
    with tempfile.TemporaryDirectory() as folder:
        head = wired(args.head, states, Path(folder))
        predicted = predict(target, head, args.vllm, trained)
        return {"predicted": predicted, "measured": serve(target, head, args.vllm)}


def table(results: dict[str, Any]) -> str:
    """The comparison, one row an arm."""
    names = ("AL predicted", "AL measured", "error", "tok/s")
    rows = [f"{'arm':<10} {'states':<14} {names[0]:>12} {names[1]:>11} {names[2]:>7} {names[3]:>6}  check's errors"]
    for arm in ARMS:
        if arm not in results:
            continue
        measured, predicted = results[arm]["measured"], results[arm].get("predicted")
        rate = sorted(measured["rates"])[len(measured["rates"]) // 2]
        if predicted is None:
            rows.append(f"{arm:<10} {'':<14} {'':>12} {'1.00':>11} {'':>7} {rate:6.1f}")
            continue
        length = 1 + measured["accepted"] / measured["drafts"]
        off = predicted["accept_length"] / length - 1
        wanted, found = predicted["accept_length"], ", ".join(predicted["errors"]) or "none"
        lengths = f"{wanted:12.2f} {length:11.2f} {100 * off:+6.1f}%"
        rows.append(f"{arm:<10} {predicted['states']!s:<14} {lengths} {rate:6.1f}  {found}")
    return "\n".join(rows)


def main() -> None:
    """Run the arms asked for and print the table of all results in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, help="a Python with vLLM")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--states", default="3,16,28", help="states that the head was trained on")
    parser.add_argument("--arm", choices=ARMS, action="append")
    parser.add_argument("--out", type=Path, default=Path("wiring_vllm.json"))
    args = parser.parse_args()
    from specmeter.eagle.model_store import ensure_model

    target, trained = ensure_model(), [int(part) for part in args.states.split(",")]
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for arm in args.arm or ARMS:
        results[arm] = run_arm(arm, args, target, trained)
        args.out.write_text(json.dumps(results))
    print(table(results))


if __name__ == "__main__":
    main()
