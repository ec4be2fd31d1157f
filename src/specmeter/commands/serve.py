"""``specmeter serve``: the embedded EAGLE-3 engine behind an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from specmeter.errors import SpecmeterError, needs_extra

DEFAULT_STEPS = 2
# Tokens; the engine keeps a table and a cache for every position, and no model it runs was trained for as many.
MAX_CONTEXT = 1 << 21


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``serve``."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Llama-family model directory (default: fetched)")
    parser.add_argument(
        "--draft", metavar="DIR|none", help="an EAGLE-3 head, or none (default: the one that comes along)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default: 8000)")
    parser.add_argument(
        "--speculative-num-steps",
        type=int,
        metavar="N",
        help=f"draft steps a cycle; 0: no speculation (default: {DEFAULT_STEPS}, or 0 without a draft head)",
    )
    parser.add_argument(
        "--speculative-eagle-topk", type=int, default=1, metavar="N", help="branches a step; 1: a chain (default: 1)"
    )
    parser.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="tokens verified a cycle, root too (default: steps + 1 for a chain, else the whole tree, at most 64)",
    )
    parser.add_argument(
        "--speculative-draft-p-min",
        type=float,
        default=0.0,
        metavar="P",
        help="draft a further step only while the draft's own probability of its path is at least P (default: 0)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float16", "bfloat16", "float32"),
        help="of the weights; auto: the fastest here, by a short timing",
    )
    parser.add_argument(
        "--draft-dtype",
        default="same",
        choices=("same", "int8"),
        help="of the draft's output layer; int8 reads half the bytes and changes guesses, never the output",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda", "auto"),
        help="where the model runs; auto: on the GPU if there is one (default: cpu)",
    )
    parser.add_argument(
        "--huge-pages",
        default="auto",
        choices=("auto", "off"),
        help="weights in huge pages, which read faster; auto: where the kernel does so (default: auto)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: all cores)")
    parser.add_argument(
        "--max-context",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of prompt and answer together (default: 4096)",
    )
    parser.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="waiting requests before 503 (default: 64)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    started = time.monotonic()
    try:
        from specmeter.eagle.server import ServeOptions, serve
        from specmeter.eagle.settings import SpecSettings
    except ImportError as error:
        raise needs_extra("The embedded engine's packages are not installed.", str(error), "engine") from error
    _check_counts(args)
    draft_dir = _draft_dir(args)
    steps = args.speculative_num_steps
    if steps is None:
        steps = 0 if draft_dir is None else DEFAULT_STEPS
    spec = SpecSettings(
        steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens, args.speculative_draft_p_min
    )
    if steps and draft_dir is None:
        raise SpecmeterError(f"{steps} draft steps need a draft head.", "There is none.", "Name one with --draft DIR.")
    options = ServeOptions(
        model_dir=_model_dir(args.model),
        draft_dir=draft_dir,
        spec=spec,
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        draft_int8=args.draft_dtype == "int8",
        device=args.device,
        huge_pages=args.huge_pages == "auto",
        threads=args.threads,
        max_context=args.max_context,
        max_queue=args.max_queue,
    )

    def announce(url: str, memory: str) -> None:
        said = f"{steps} draft steps" if steps else "no speculation"
        said += f"; {memory}" if memory else ""
        print(f"specmeter serve: ready at {url} after {time.monotonic() - started:.1f} s ({said})", flush=True)

    return int(serve(options, announce))


def _check_counts(args: argparse.Namespace) -> None:
    for name, low, high in (("threads", 1, 1024), ("max_context", 2, MAX_CONTEXT), ("max_queue", 0, 1_000_000)):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            why = f"It must be from {low} to {high:,}."
            raise SpecmeterError(f"--{name.replace('_', '-')} is {value}.", why, "Give another, or leave it out.")


def _model_dir(given: Path | None) -> Path:
    from specmeter.commands.fetch import ProgressLine
    from specmeter.eagle.model_store import ensure_model

    if given is None:
        return ensure_model(progress=ProgressLine())
    if not (given / "config.json").is_file():
        why = "It has no config.json." if given.is_dir() else "There is no such directory."
        raise SpecmeterError(f"{given} is not a model directory.", why, "Name one with --model, or leave it out.")
    return given.resolve()


def _draft_dir(args: argparse.Namespace) -> Path | None:
    if args.draft == "none":
        return None
    if args.draft is not None:
        return _named_head(Path(args.draft))
    # The head that comes along fits the model that comes along, and no other.
    return packaged_head() if args.model is None else None


def _named_head(given: Path) -> Path:
    if not (given / "config.json").exists():
        why = "It has no config.json." if given.is_dir() else "There is no such directory."
        raise SpecmeterError(
            f"{given} is not the directory of a draft head.", why, "Name one with --draft, or serve with --draft none."
        )
    return given


def packaged_head() -> Path | None:
    """The directory of the head in the package, or None in a build without one."""
    import specmeter.eagle

    heads = sorted((Path(specmeter.eagle.__file__).parent / "heads").glob("*/config.json"))
    return heads[-1].parent if heads else None
