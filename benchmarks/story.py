"""The story of the design on this machine, step by step, each a command of specmeter: what docs/story.md prints.

Run it with the interpreter that has specmeter, and with a vLLM for CPUs beside it. Every step's output is kept in a
file of its own under --out; a step whose file says that it ended is not run again, so an interrupted run goes on where
it stopped. MODEL, HEAD, HEAD_WRONG and HEAD_EMBEDDING lie under --out; PYTHON and SITE stand for the vLLM's paths.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import specmeter.eagle
from specmeter.eagle.model_store import ensure_model

HEADS = Path(specmeter.eagle.__file__).parent / "heads"
KEY = "eagle_aux_hidden_state_layer_ids"  # what vLLM reads
LOAD = "--requests 8 --max-tokens 64"

# HEAD is right; HEAD_WRONG gets the embedding output first and the other states a place late; HEAD_EMBEDDING gets the
# embedding output in place of the first state alone.
SERVER = """\
[server.{name}]
command = ["PYTHON", "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--enforce-eager",
  "--max-model-len", "2048", "--max-num-seqs", "4", "--gpu-memory-utilization", "0.4",
  "--speculative-config", '{{"method": "eagle3", "model": "{head}", "num_speculative_tokens": 5}}']
env = {{ VLLM_CPU_KVCACHE_SPACE = "1", HF_HUB_OFFLINE = "1" }}
"""
SERVERS = {"wrong": "HEAD_WRONG", "embedding": "HEAD_EMBEDDING", "fixed": "HEAD"}


@dataclass(frozen=True)
class Step:
    """One command: its name, its words in the story's generic paths, and the exit codes that belong to the story."""

    name: str
    words: str
    ends: tuple[int, ...] = (0,)


STEPS = (
    Step("01-wrong-5", f"profile --server servers.toml:wrong --steps 5 {LOAD} --out runs/wrong-5"),
    Step(
        "02-wrong-10",
        f"profile --server servers.toml:wrong --steps 10 --baseline runs/wrong-5 {LOAD} --out runs/wrong-10",
    ),
    Step("03-source-guess", "source --python PYTHON vllm.v1.spec_decode.eagle"),
    Step("04-source-where", "source --python PYTHON vllm.v1.spec_decode --package --grep 'Proposer[.]propose$'"),
    Step(
        "05-source-lines",
        "source --python PYTHON vllm.v1.spec_decode.llm_base_proposer --grep 'Proposer[.]propose$' --lines 753:764",
    ),
    Step("06-plan", "plan --python PYTHON --runner mrv1"),
    Step("07-check-wrong", "check --target MODEL --draft HEAD_WRONG --engine vllm --python PYTHON", (1,)),
    Step("08-check-fixed", "check --target MODEL --draft HEAD --engine vllm --python PYTHON"),
    Step("09-fixed-10", f"profile --server servers.toml:fixed --steps 10 {LOAD} --out runs/fixed-10"),
    Step("10-diff", "diff runs/wrong-10 runs/fixed-10"),
    Step("11-explain", "explain runs/fixed-10 --what-if 'verify 27 % faster'"),
    Step(
        "12-sweep",
        "sweep --server servers.toml:fixed --steps 1-5,10 --starts 0 --requests 6 --max-tokens 64 --out runs/sweep",
    ),
    Step("13-knee", "explain runs/sweep"),
    Step(
        "14-compare",
        "compare --server servers.toml:fixed --arm baseline --arm k=4 --starts 3 --blocks 3 --requests 4"
        " --max-tokens 64 --out runs/compare",
    ),
    Step(
        "15-embedding-10",
        f"profile --server servers.toml:embedding --steps 10 --baseline runs/wrong-5 {LOAD} --out runs/embedding-10",
    ),
    Step(
        "16-fixed-5",
        f"profile --server servers.toml:fixed --steps 5 --baseline runs/fixed-10 {LOAD} --out runs/fixed-5",
    ),
    Step("17-explain-two", "explain runs/fixed-5 runs/fixed-10 --now 10"),
    Step("18-figures", "explain --figures figures/story.toml"),
)


def main() -> int:
    """Run the steps that have not ended yet; 1 as soon as one ends otherwise than the story says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of outputs and runs")
    parser.add_argument("--vllm", required=True, help="the Python that has vLLM")
    parser.add_argument("--only", help="a step's name, run (again) alone")
    parser.add_argument("--check", type=Path, help="hold this page against the kept outputs; run nothing")
    args = parser.parse_args()
    if args.check:
        return check(args.check.read_text(), args.out)
    paths = prepare(args.out.resolve(), args.vllm)
    for step in STEPS:
        if args.only and step.name != args.only:
            continue
        if args.only is None and ended(args.out / f"{step.name}.json", step):
            print(f"{step.name}: kept", flush=True)
        elif not run(step, args.out.resolve(), paths):
            return 1
    return 0


def prepare(out: Path, python: str) -> dict[str, str]:
    """The two heads and the file of servers; the generic words with what stands for them on this machine."""
    shipped = sorted(HEADS.glob("*/config.json"))[-1].parent
    trained = json.loads((shipped / "config.json").read_text())["specmeter_capture"]
    fed = {"HEAD": trained, "HEAD_WRONG": [0, *trained[:-1]], "HEAD_EMBEDDING": [0, *trained[1:]]}
    for name, ids in fed.items():
        if not (out / name).exists():
            shutil.copytree(shipped, out / name)
        config = json.loads((shipped / "config.json").read_text())
        config[KEY] = ids
        (out / name / "config.json").write_text(json.dumps(config, indent=1))
    (out / "runs").mkdir(mode=0o700, exist_ok=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    if not (out / "MODEL").exists():
        (out / "MODEL").symlink_to(ensure_model())
    (out / "figures").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parents[1] / "docs" / "figures" / "story.toml", out / "figures")
    paths = {"SITE": site.stdout.strip(), "PYTHON": python}
    servers = "\n".join(SERVER.format(name=name, head=head) for name, head in SERVERS.items())
    (out / "servers.toml").write_text(specific(servers, paths))
    return paths


def check(page: str, out: Path) -> int:
    """1 if a printed line is not in the kept output of its command, in order; a block without a command goes on with
    any step's output. Lines "..." stand for lines left out.
    """
    kept = {path.read_text().split("\n", 1)[0]: path.read_text().splitlines() for path in out.glob("*.txt")}
    everything = [line for lines in kept.values() for line in lines]
    missing = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if language:
            continue
        left = iter(everything)
        for line in block.splitlines():
            if line.startswith("$ "):
                left = iter(kept.get(line, []))
            if line != "..." and line not in left:
                missing.append(line)
    print("\n".join(missing) or "every printed line is in the kept outputs")
    return 1 if missing else 0


def specific(text: str, paths: dict[str, str]) -> str:
    """The text with this machine's paths."""
    for word, path in paths.items():
        text = text.replace(word, path)
    return text


def generic(text: str, paths: dict[str, str]) -> str:
    """The text without this machine's paths; the longest path goes first, since one may lie inside another."""
    for word, path in sorted(paths.items(), key=lambda pair: -len(pair[1])):
        text = text.replace(path, word)
    return text


def ended(fact: Path, step: Step) -> bool:
    """Whether this very command ended before as the story says."""
    if not fact.exists():
        return False
    found = json.loads(fact.read_text())
    return bool(found["words"] == step.words and found["rc"] in step.ends)


def run(step: Step, out: Path, paths: dict[str, str]) -> bool:
    """Run one step, keep its output and facts; whether it ended as the story says."""
    words = [specific(word, paths) for word in shlex.split(step.words)]
    if "--out" in words:
        shutil.rmtree(out / words[words.index("--out") + 1], ignore_errors=True)
    print(f"{step.name}: specmeter {step.words}", flush=True)
    begin, load = time.time(), os.getloadavg()
    env = {**os.environ, "COLUMNS": "110"}
    found = subprocess.run(
        [sys.executable, "-m", "specmeter", *words], cwd=out, env=env, capture_output=True, text=True
    )
    (out / f"{step.name}.txt").write_text(f"$ specmeter {step.words}\n{generic(found.stdout, paths)}")
    (out / f"{step.name}.err").write_text(generic(found.stderr, paths))
    facts = {
        "words": step.words, "rc": found.returncode, "began": time.strftime("%F %H:%M", time.localtime(begin)),
        "seconds": round(time.time() - begin, 1), "load_before": load, "load_after": os.getloadavg(),
    }  # fmt: skip
    (out / f"{step.name}.json").write_text(json.dumps(facts))
    if found.returncode not in step.ends:
        print(f"{step.name}: exit {found.returncode}\n{found.stderr[-2000:]}", file=sys.stderr)
    return found.returncode in step.ends


if __name__ == "__main__":
    sys.exit(main())
