"""Every place of a document of every kind, one at a time, holds text that a terminal or a browser would act on."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import specmeter
from specmeter.analysis.deep_facts import deep_facts
from specmeter.analysis.diff import diff_runs
from specmeter.api.display import diff_html, run_html
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.reporters.html.markup import Section
from specmeter.reporters.html.page import render_page
from specmeter.reporters.inert import inert_lines
from specmeter.reporters.language import bar, heading, legend, make_table
from specmeter.reporters.terminal import VIEWS, render_analysis
from specmeter.trace.rundir import Run, load
from specmeter.trace.shape import check_document
from tests.support.cost_runs import Law, write_run
from tests.support.report_documents import check_result, compared, profile, tuned
from tests.support.saved_runs import save_run
from tests.unit.analysis.test_deep_facts import COST, INDEX, window
from tests.unit.bench.test_switching import confirmed
from tests.unit.reporters.test_device_view import made
from tests.unit.reporters.test_ranks_page import document as ranks_document
from tests.unit.reporters.test_terminal import BENCH

EVIL = "\x1b[31m\u202e\x9b1m<i>&\"'"
ACTS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
Document = dict[str, Any]
Make = Callable[[Path], Document]


def printed(*words: str) -> Make:
    """The document that a command on runs of known costs prints as JSON."""

    def make(folder: Path) -> Document:
        for number, steps in enumerate(([0, 3], [0, 2, 3])):
            write_run(folder / f"r{number}", Law(), steps, prompts=3, seed=number, kind="sweep", cycles=20)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            main([word.replace("@", str(folder / "r")) for word in words])
        found: Document = json.loads(out.getvalue())["result"]
        return found

    return make


def full_profile(folder: Path) -> Document:
    """A profile with ranks, collectives, device windows and deep windows: all sections that there are."""
    for name in ("ranks", "device"):
        (folder / name).mkdir()
    found = ranks_document.__wrapped__(folder / "ranks")  # type: ignore[attr-defined]
    device = made(folder / "device")
    [facts] = deep_facts([window(COST)], INDEX)
    own = profile(folder / "own")
    found.update({key: own[key] for key in ("acceptance", "baseline", "draft_steps", "refused", "cycle")})
    found.update(device=device["device"], verify_width=device["verify_width"], deep=[facts])
    for rank in found["collectives"]["ranks"]:
        rank["clock"] = found["rank_skew"]["clocks"][0]
    found["refused"] = [{"name": "kv.meta", "reason": "not there"}]
    found["beside"] = [{"name": "kv.load", "ms": 1.0, "percent": 1.0}]
    return dict(short(json.loads(json.dumps(found))))


def short(value: Any) -> Any:
    """With the first two of every list: the document is reported hundreds of times."""
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value[:2]] if isinstance(value, list) else value


def diffed(folder: Path) -> Document:
    a, b = save_run(folder / "a", command=["x", "--steps", "2"]), save_run(folder / "b", stretch=1.2, seed=1)
    return {"kind": "diff", **diff_runs(specmeter.load(a), specmeter.load(b))}


FIGURES = Path(__file__).parents[3] / "docs" / "figures" / "vllm-20780.toml"
SAMPLES: dict[str, Make] = {
    "profile": full_profile,
    "sweep": lambda _: confirmed(),
    "bench": lambda _: BENCH,
    "check": lambda _: {"kind": "check", **check_result()},
    "diff": diffed,
    "compare": lambda _: compared(),
    "explain": printed("explain", "@1", "--json", "--now", "2", "--what-if", "verify 27 % faster"),
    "figures": printed("explain", "--figures", str(FIGURES), "--json"),
    "gate": printed("gate", "@0", "--against", "@1", "--json"),
    "tune": lambda folder: load(tuned(folder / "tune", compared())).analysis,
}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every leaf of a document, whatever it is, and of many alike the first."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:1]):
            yield from places(inner, (*at, index))
    else:
        yield at


def put(document: Document, at: tuple[Any, ...], key: bool = False) -> None:
    """EVIL in place of a leaf, or of the name that it has."""
    inner: Any = document
    for step in at[:-1]:
        inner = inner[step]
    if key:
        items = [(EVIL if name == at[-1] else name, value) for name, value in inner.items()]
        inner.clear()
        inner.update(items)
    else:
        inner[at[-1]] = EVIL


Place = tuple[tuple[Any, ...], bool]


def all_places(document: Document) -> list[Place]:
    """The leaves, and the names of leaves (True): of one object the first, as all are free or all fixed."""
    leaves = list(places(document))
    named = {at[:-1]: at for at in reversed(leaves) if isinstance(at[-1], str)}
    return [*((at, False) for at in leaves), *((at, True) for at in named.values())]


def filled(document: Document, at: list[Place]) -> Document:
    """A copy with EVIL in these places; names come last, as a renamed leaf cannot be reached any more."""
    broken = copy.deepcopy(document)
    for place, key in sorted(at, key=lambda one: one[1]):
        put(broken, place, key)
    return broken


def shown(document: Document, width: int) -> tuple[bool, str]:
    """Whether there is a report of it, and what `specmeter report` prints: its error, where there is none."""
    try:
        check_document(Path("analysis.json"), document)
        return True, render_analysis(document, width)
    except SpecmeterError as error:
        return False, inert_lines(str(error))


class Filled:
    """A sample; the places that may hold text; and what the text report says of each document tried to find them."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.document = SAMPLES[kind](folder)
        self.texts: list[str] = []
        self.taken = self._taken(all_places(self.document))

    def _taken(self, at: list[Place]) -> list[Place]:
        """Those of the places that a report can be made with; together where they can, else by halves."""
        whole, text = shown(filled(self.document, at), 130)
        self.texts.append(text)
        if whole or len(at) == 1:
            return at if whole else []
        half = len(at) // 2
        return self._taken(at[:half]) + self._taken(at[half:])


@pytest.fixture(scope="module", params=list(SAMPLES))
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return Filled(request.param, tmp_path_factory.mktemp("filled"))


def test_there_is_a_sample_of_every_kind() -> None:
    assert set(SAMPLES) == set(VIEWS)


def test_no_place_of_a_document_reaches_the_terminal_as_it_is(sample: Filled) -> None:
    assert sample.document["kind"] == sample.kind and not ACTS.search(render_analysis(sample.document, 100))
    for text in sample.texts:
        assert not ACTS.search(text), text
    # It is seen, so the test tests something.
    assert len(sample.taken) >= 4 and sum(text.count("?[31m") for text in sample.texts) >= 4


def test_no_place_of_a_document_reaches_a_notebook_as_it_is(sample: Filled) -> None:
    if sample.kind not in ("profile", "sweep", "diff"):
        return
    reached = 0
    for at in all_places(sample.document):
        broken = filled(sample.document, [at])
        try:
            page = diff_html(broken) if sample.kind == "diff" else run_html(Run(sample.folder, {}, {}, broken, ""))
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        assert not ACTS.search(page) and "<i>" not in page and "&\"'" not in page, at
        reached += "&lt;i&gt;" in page
    assert reached >= 3


def test_no_place_of_a_document_reaches_the_page_as_it_is(sample: Filled) -> None:
    """All places together, as a page takes long: those that the text report takes, and of these what a page takes."""
    pytest.importorskip("vl_convert")
    sound = {"verdict": {"word": "x", "sentence": "x"}, **sample.document}
    whole = filled(sound, [(at, key) for at, key in sample.taken if not key and at != ("kind",)])
    whole["verdict"]["sentence"] = EVIL
    kept = parts_of_a_page(whole, sound, sample.folder, list(sound))
    page = page_of({key: (whole if key in kept else sound)[key] for key in sound}, sample.folder)
    assert not ACTS.search(page) and "<i>" not in page and "&\"'" not in page
    assert "verdict" in kept and page.count("&lt;i&gt;") >= 3


def parts_of_a_page(whole: Document, sound: Document, folder: Path, keys: list[str]) -> list[str]:
    """The keys whose filled parts a page can be made of."""
    with contextlib.suppress(SpecmeterError):
        page_of({key: (whole if key in keys else sound)[key] for key in sound}, folder)
        return keys
    half = len(keys) // 2
    parts = (keys[:half], keys[half:]) if half else ()
    return [key for part in parts for key in parts_of_a_page(whole, sound, folder, part)]


def page_of(document: Document, folder: Path) -> str:
    return render_page(Run(folder, {}, {}, document, ""))


def test_the_parts_of_every_report_make_text_inert_once() -> None:
    table = make_table([EVIL, "b"])
    table.add_row(EVIL, "?…")
    assert [str(column.header) for column in table.columns] == ["?[31m??1m<i>&\"'", "b"]
    assert [list(column.cells) for column in table.columns] == [["?[31m??1m<i>&\"'"], ["?…"]]
    assert heading(EVIL).plain == "\n?[31m??1m<i>&\"'"
    for text in (bar(EVIL, [(EVIL, 0.5)], 10, EVIL), legend([(EVIL, 0.5)])):
        assert not ACTS.search(text.plain)


def test_the_anchor_of_a_section_cannot_leave_its_attribute() -> None:
    assert Section("t", 'tune-"><i>.x').as_html().startswith('<section id="tune----i-.x">')
