"""How well accept lengths of step counts that were not run follow from those that were. No timing: any machine will do.

    python benchmarks/acceptance_model.py --out acceptance.jsonl --prompts 16

The embedded engine writes the same greedy texts at 1 to 6 draft steps; the model sees the step counts of --fit only and
predicts the others. Errors are in percent of the accept length measured over the same prompts. Trees (--trees, as
steps/top-k/tokens) are predicted from the draft's ranks where the longest chain failed, and run as well. What is in
--out already is not run again; --report only prints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import specmeter.eagle
from specmeter.analysis.acceptance_lengths import Lengths
from specmeter.analysis.acceptance_model import conditional_acceptance
from specmeter.analysis.costmodel_data import RANKS, Sample
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.analysis.tree_model import rank_acceptance, tree_length
from specmeter.bench.prompts import load_prompts
from specmeter.eagle.engine import Engine, Sampling, SpecSettings
from specmeter.eagle.sampling import Sampler
from specmeter.eagle.worker import Sequence

STEPS = (6, 4, 2, 1, 3, 5)
TREES = "2/4/6,3/2/6,3/4/8,3/4/16,4/4/12,5/8/32"
# {(prompt, setting): accepted drafts of every cycle}; a setting is a step count, or a tree such as 3/4/8
Runs = dict[tuple[int, str], list[int]]
# {prompt: accepted drafts and the draft's rank of the target's token, of the failed cycles of the longest chain}
Ranks = dict[int, list[tuple[int, int]]]


def main() -> None:
    """Runs what is missing and prints a line a choice of --fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--fit", nargs="+", default=["6", "2,5", "2,6", "1,3,6", "3,6"])
    parser.add_argument("--trees", default=TREES)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    runs, ranks = read(options.out)
    if not options.report:
        generate(options, runs, ranks)
    prompts = sorted({p for p, _ in runs if all((p, str(k)) in runs for k in STEPS)})
    cycles = {k: [a for p in prompts for a in runs[p, str(k)]] for k in sorted(STEPS)}
    truth = {k: 1 + float(np.mean(accepted)) for k, accepted in cycles.items()}
    print(f"{len(prompts)} prompts; measured: " + ", ".join(f"{k} steps {v:.3f}" for k, v in truth.items()))
    for text in options.fit:
        seen = [int(k) for k in text.split(",")]
        lengths = Lengths(Evidence(tuple(sample(k, cycles[k]) for k in seen), seen[0]), None, Assumed())
        errors = {k: 100 * (lengths.at(k).tokens / truth[k] - 1) for k in truth if k not in seen}
        shown = ", ".join(f"{k}{' (beyond)' if k > max(seen) else ''} {e:+.1f} %" for k, e in errors.items())
        print(f"seen {text}: {shown}")
    report_trees(options.trees.split(","), runs, ranks, prompts, cycles[max(STEPS)])


def report_trees(trees: list[str], runs: Runs, ranks: Ranks, prompts: list[int], chain: list[int]) -> None:
    """Each tree as predicted from the longest chain's failures, with its range, and as measured."""
    missed = np.zeros((max(STEPS), RANKS))
    for accepted, rank in (pair for p in prompts for pair in ranks.get(p, [])):
        missed[accepted, 0] += 1
        if 2 <= rank <= RANKS:
            missed[accepted, rank - 1] += 1
    kept = [sum(a >= j for a in chain) for j in range(max(STEPS) + 1)]
    accept = rank_acceptance(conditional_acceptance(kept), missed)
    shares = missed[:, 1:4].sum(0) / missed[:, 0].sum()
    print(f"{missed[:, 0].sum():.0f} failures; right token second, third, fourth: {np.round(shares, 3)}")
    for tree in trees:
        measured = [a for p in prompts for a in runs.get((p, tree), [])]
        if measured:
            found, truth = tree_length(accept, *(int(n) for n in tree.split("/"))), 1 + float(np.mean(measured))
            error, ends = 100 * (found.tokens / truth - 1), f"[{found.low:.3f}, {found.high:.3f}]"
            print(f"tree {tree}: predicted {found.tokens:.3f} {ends}, measured {truth:.3f}, error {error:+.1f} %")


def read(path: Path) -> tuple[Runs, Ranks]:
    """What --out holds."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    runs = {(row["p"], str(row["k"])): row["acc"] for row in rows}
    return runs, {row["p"]: [tuple(pair) for pair in row["missed"]] for row in rows if "missed" in row}


def generate(options: argparse.Namespace, runs: Runs, ranks: Ranks) -> None:
    """Every prompt at every setting, appended to --out as it ends."""
    from tokenizers import Tokenizer

    from specmeter.eagle.model_store import ensure_model

    model = ensure_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    engine = Engine.load(model, Path(specmeter.eagle.__file__).parent / "heads" / "smollm2-135m-v1")
    for index, prompt in enumerate(load_prompts(None).sample(options.prompts, options.seed)):
        text = f"<|im_start|>user\n{prompt.messages[-1][1]}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:400]
        sampling = Sampling(max_tokens=options.tokens, ignore_eos=True)
        wanted = [*(str(k) for k in STEPS), *options.trees.split(",")]
        for name in (name for name in wanted if (index, name) not in runs):
            accepted, missed = decode(engine, ids, sampling, SpecSettings(*(int(n) for n in name.split("/"))))
            runs[index, name] = accepted
            row = {"p": index, "k": name, "acc": accepted}
            if name == str(max(STEPS)):
                ranks[index] = row["missed"] = missed
            with options.out.open("a") as log:
                log.write(json.dumps(row) + "\n")


def decode(engine: Engine, ids: list[int], sampling: Sampling, spec: SpecSettings) -> tuple[list[int], list[Any]]:
    """One answer: accepted drafts of every cycle, and of the failed ones of a chain the draft's rank beside."""
    sequence = Sequence(list(ids), sampling, spec, Sampler(sampling), sampling.max_tokens)
    cycle, accepted, missed = engine.worker.prefill(sequence), [], []
    while cycle.finish is None:
        cycle = engine.worker.cycle(sequence)
        accepted.append(cycle.accepted)
        missed += [(cycle.accepted, rank) for rank in sequence.missed_rank]
    return accepted, missed


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
