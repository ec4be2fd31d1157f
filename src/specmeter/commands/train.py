"""``specmeter train``: trains an EAGLE-3 head for a target on data that the target writes itself."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from specmeter.control.signals import terminations_interrupt
from specmeter.errors import Exit, SpecmeterError, needs_extra


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train``."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the head, the corpus, logs and checkpoints")
    add("--minutes", type=float, default=10.0, help="time for the training loop")
    add("--generate-minutes", type=float, default=4.0, help="most time for writing the data")
    add("--tokens", type=int, default=20_000_000, help="answer tokens to write (fewer if the time ends first)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seed", type=int, default=0)
    add("--model", type=Path, metavar="DIR", help="target model directory (SmolLM2-135M-Instruct unless given)")
    add("--random-target", action="store_true", help="a target of random weights of SmolLM2's shape: a rehearsal")
    add("--init", type=Path, metavar="DIR", help="start from this head (its states and draft vocabulary are kept)")
    add("--compare", type=Path, metavar="DIR", help="evaluate this head beside the new one")
    add("--capture", default="3,16,29", help="k of the target states H[k] that feed the head")
    add("--draft-vocab", type=int, default=9216, help="draft vocabulary, a multiple of 24")
    add("--intermediate-size", type=int, default=2304)
    add("--steps", type=int, default=7, help="unrolled steps")
    add("--batch-tokens", type=int, help="padded tokens a training batch")
    add("--batch-rows", type=int, help="sequences generated at once")
    add("--learning-rate", type=float, default=1e-3)
    add("--target-temperature", type=float, default=1.0, help="temperature of the target's distribution in the loss")
    add("--max-steps", type=int, help="end after this many optimizer steps")
    add("--answer-limit", type=int, default=320, help="most tokens of an answer")
    add("--evaluate-tokens", type=int, default=256, help="new tokens for each evaluation prompt (0: leave it out)")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Generates (or reuses) the corpus, trains, evaluates, saves; returns the exit code."""
    try:
        import torch
    except ImportError:
        raise needs_extra("Training needs torch.", "The engine extra is not installed.", "engine") from None
    from specmeter.eagle.training.session import Request, train

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SpecmeterError("There is no CUDA device.", "torch sees none.", "Use --device cpu.", exit=Exit.ENVIRONMENT)
    if not 1 <= args.steps <= 8:
        raise SpecmeterError(f"--steps {args.steps} is out of range.", "1 to 8 unrolled steps are possible.")
    try:
        capture = tuple(int(k) for k in args.capture.split(","))
    except ValueError:
        raise SpecmeterError(f"--capture {args.capture!r} is not a list of numbers.", "", "Write 3,16,29.") from None
    model = args.model
    if model is None and not args.random_target:
        from specmeter.eagle.model_store import ensure_model

        model = ensure_model()
    on_gpu = args.device == "cuda"
    request = Request(
        out=args.out, model=model, device=args.device, seed=args.seed, minutes=args.minutes,
        generate_minutes=args.generate_minutes, tokens=args.tokens, init=args.init, compare=args.compare,
        capture=capture, draft_vocab=args.draft_vocab, intermediate_size=args.intermediate_size, steps=args.steps,
        batch_tokens=args.batch_tokens or (24576 if on_gpu else 1024),
        batch_rows=args.batch_rows or (2048 if on_gpu else 32), learning_rate=args.learning_rate,
        target_temperature=args.target_temperature, max_steps=args.max_steps, answer_limit=args.answer_limit,
        evaluate_tokens=args.evaluate_tokens, command=_command(sys.argv[1:]),
    )  # fmt: skip
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:7.1f} s] {line}", file=sys.stderr, flush=True)

    with terminations_interrupt():
        result = train(request, say)
    if args.json:
        print(json.dumps({"schema": "specmeter/train/1", "command": "train", "result": result, "warnings": []}))
    else:
        print(f"The head is in {args.out / 'head'}; the figures are in {args.out / 'result.json'}.")
    return int(Exit.DONE)


def _command(arguments: list[str]) -> str:
    """The command line as it is kept in the head's config: paths of this machine by their last part only."""
    shown = [Path(word).name if "/" in word else word for word in arguments]
    return shlex.join(["specmeter", *shown])
