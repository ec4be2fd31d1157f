"""Decodes one prompt for each line of standard input, with vLLM. vllm_steps.py runs it with vLLM's Python."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """argv[1] is a JSON object: model, speculative (config or null), prompts (token ids), tokens, eager.

    A line "INDEX TOKENS" is answered by "SECONDS x TOKENS [ids]", after "READY".
    """
    job = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"], dtype="bfloat16", max_model_len=2048, max_num_seqs=1, enforce_eager=job["eager"],
        speculative_config=job["speculative"], disable_log_stats=True, enable_prefix_caching=False,
        gpu_memory_utilization=0.4,  # of the machine: only a check here
    )  # fmt: skip
    print("READY", flush=True)
    for line in sys.stdin:
        index, count = (int(word) for word in line.split())
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": job["prompts"][index]}], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        print(f"SECONDS {seconds} TOKENS {json.dumps(list(answers[0].outputs[0].token_ids))}", flush=True)


if __name__ == "__main__":
    main()
