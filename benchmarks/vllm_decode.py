"""Decodes prompts with vLLM, prints a JSON line of seconds per request. decode_speed.py runs it with vLLM's Python."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """argv[1] is a JSON object: model, head (or null), steps, prompts (token ids), tokens, eager."""
    job = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    spec = {"method": "eagle3", "model": job["head"], "num_speculative_tokens": job["steps"]} if job["steps"] else None
    llm = LLM(
        job["model"], dtype="bfloat16", max_model_len=2048, max_num_seqs=1, enforce_eager=job["eager"],
        speculative_config=spec, disable_log_stats=True,
        gpu_memory_utilization=0.4,  # of the machine: only a check here
    )  # fmt: skip
    seconds = []
    llm.generate([{"prompt_token_ids": job["prompts"][0]}], SamplingParams(temperature=0, max_tokens=16))
    for prompt in job["prompts"]:
        # Twice, for one and for all tokens: the difference is decoding without the prompt's share.
        spent = []
        for count in (1, job["tokens"]):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            spent.append(time.perf_counter() - start)
        seconds.append(spent[1] - spent[0])
    print("SECONDS " + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
