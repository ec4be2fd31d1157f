"""How well accept lengths of step counts that were not run follow from those that were. No timing: any machine will do.

    python benchmarks/acceptance_model.py --out acceptance.jsonl --prompts 16

The embedded engine writes the same greedy texts at 1 to 6 draft steps; the model sees the step counts of --fit only and
predicts the others. Errors are in percent of the accept length measured over the same prompts. What is in --out already
is not run again; --report only prints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import specmeter.eagle
from specmeter.analysis.acceptance_lengths import Lengths
from specmeter.analysis.costmodel_data import Sample
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.bench.prompts import load_prompts

STEPS = (6, 4, 2, 1, 3, 5)
# {(prompt, steps): accepted drafts of every cycle}
Runs = dict[tuple[int, int], list[int]]


def main() -> None:
    """Runs what is missing and prints a line a choice of --fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--fit", nargs="+", default=["6", "2,5", "2,6", "1,3,6", "3,6"])
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    runs = read(options.out)
    if not options.report:
        generate(options, runs)
    prompts = sorted({p for p, _ in runs if all((p, k) in runs for k in STEPS)})
    cycles = {k: [a for p in prompts for a in runs[p, k]] for k in sorted(STEPS)}
    truth = {k: 1 + float(np.mean(accepted)) for k, accepted in cycles.items()}
    print(f"{len(prompts)} prompts; measured: " + ", ".join(f"{k} steps {v:.3f}" for k, v in truth.items()))
    for text in options.fit:
        seen = [int(k) for k in text.split(",")]
        lengths = Lengths(Evidence(tuple(sample(k, cycles[k]) for k in seen), seen[0]), None, Assumed())
        errors = {k: 100 * (lengths.at(k).tokens / truth[k] - 1) for k in truth if k not in seen}
        shown = ", ".join(f"{k}{' (beyond)' if k > max(seen) else ''} {e:+.1f} %" for k, e in errors.items())
        print(f"seen {text}: {shown}")


def read(path: Path) -> Runs:
    """What --out holds."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["p"], row["k"]): row["acc"] for row in map(json.loads, lines)}


def generate(options: argparse.Namespace, runs: Runs) -> None:
    """Every prompt at every step count, appended to --out as it ends."""
    from tokenizers import Tokenizer

    from specmeter.eagle.engine import Engine, Sampling, SpecSettings
    from specmeter.eagle.model_store import ensure_model

    model = ensure_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    engine = Engine.load(model, Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1")
    for index, prompt in enumerate(load_prompts(None).sample(options.prompts, options.seed)):
        text = f"<|im_start|>user\n{prompt.messages[-1][1]}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:400]
        for k in (k for k in STEPS if (index, k) not in runs):
            cycles = list(engine.generate(ids, Sampling(max_tokens=options.tokens, ignore_eos=True), SpecSettings(k)))
            runs[index, k] = [cycle.accepted for cycle in cycles[1:]]
            with options.out.open("a") as log:
                log.write(json.dumps({"p": index, "k": k, "acc": runs[index, k]}) + "\n")


def sample(steps: int, accepted: list[int]) -> Sample:
    """Cycles without times: accepted counts are all that is asked here."""
    kept = np.array([[sum(a >= j for a in accepted) for j in range(steps + 1)]], float)
    none, nothing, count = np.zeros(1), np.zeros((1, 0)), np.full(1, float(len(accepted)))
    return Sample(
        f"k={steps}", steps, 1, steps + 1.0, 1.0, ("all",), (),
        count, none, nothing, nothing, none, none, nothing, kept,
    )  # fmt: skip


if __name__ == "__main__":
    main()
