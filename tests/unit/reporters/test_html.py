"""The page without a browser: what goes into it, from which tables, and that names cannot become markup."""

from __future__ import annotations

import base64
import builtins
import hashlib
import html
import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmeter
from specmeter.analysis.profile import analyse
from specmeter.errors import Exit, SpecmeterError
from specmeter.reporters.html import page, write_page
from specmeter.reporters.html.acceptance_charts import groups_by_kind, groups_by_length, kind_of
from specmeter.reporters.html.compare_section import ratio_chart
from specmeter.reporters.html.facts import cycles_by_rank, histogram, phase_times
from specmeter.reporters.html.markup import table, text
from specmeter.reporters.html.profile_section import key_figures
from specmeter.reporters.html.repeat_section import repeat_section
from specmeter.reporters.html.speed_charts import speed_chart
from specmeter.reporters.html.sweep_section import sweep_figures
from specmeter.reporters.html.timeline import baseline_parts, pick_samples, timeline_charts
from specmeter.reporters.html.tune_section import read_trials
from specmeter.runtime import layout
from specmeter.trace.masking import MASK
from specmeter.trace.rundir import RunWriter
from specmeter.trace.tables import read_windows, write_table
from tests.support.report_documents import MS, compared, profile, record, save, sweep
from tests.support.saved_runs import recording, save_run

pytest.importorskip("vl_convert", reason="vl-convert is not installed (extra: html)")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> specmeter.Run:
    folder = tmp_path_factory.mktemp("run")
    trace, requests = record(folder / "rings", ranks=(0, 1))
    command = ("specmeter", "profile", "--api-key", "sekrit", "--token=hush")
    writer = save(folder / "run", trace, requests, analyse(trace, requests), command)
    return specmeter.load(writer.path)


def without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith(("pyarrow", "vl_convert")):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)


def test_text_is_inert_and_escaped() -> None:
    assert text("<b>\x1b\u202e&\"'") == "&lt;b&gt;??&amp;&quot;&#x27;"
    assert len(html.unescape(text("x" * 9000))) == 2000
    made = table(("<a>", "b"), [("<i>", "\x00")], "<c>")
    assert "<i>" not in made and "<a>" not in made and "\x00" not in made


def test_the_page_is_one_file_with_one_allowed_script(run: specmeter.Run, tmp_path: Path) -> None:
    path = write_page(run, tmp_path / "page.html")
    whole = path.read_text()
    assert path.stat().st_mode & 0o077 == 0 and not list(tmp_path.glob(".*"))
    script = re.findall(r"<script>(.*?)</script>", whole, re.S)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert len(script) == 1 and f"script-src 'sha256-{digest}'" in whole and "default-src 'none'" in whole
    assert not re.search(r"""(src|href)=["'](?!#)""", whole) and "@import" not in whole and "url(http" not in whole
    identities = re.findall(r'\bid="([^"]+)"', whole)
    assert len(identities) == len(set(identities))
    assert "sekrit" not in whole and "hush" not in whole and MASK in whole
    kinds, count = run.analysis["cycle"]["kinds"], run.analysis["cycle"]["count"]
    assert kinds["decode"] > count and f"those of the baseline included: {kinds['decode']} decode" in whole
    assert f"Times are over the {count} decode cycles of the profiled setting" in whole


def test_much_time_left_out_as_stalls_stands_above_the_key_figures(tmp_path: Path) -> None:
    for percent, above in ((34.2, True), (19.0, False)):
        stalled = {"cycles": 12, "percent_of_time": percent, "limit_ms": 80.0}
        document, swept = profile(tmp_path / "p"), sweep(tmp_path / "s")
        document["cycle"]["stalled"] = swept["arms"][1]["stalled"] = stalled
        for head in (key_figures(document), sweep_figures(swept)):
            assert ("left out of the times as stalls" in head.partition("card")[0]) == above


def test_tables_give_the_chosen_cycles_with_and_without_pyarrow(
    run: specmeter.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = cycles_by_rank(run, None)
    assert [r.rank.rank for r in ranks] == [0, 1]
    lead, phases = ranks[0], phase_times(run, ranks[0])
    assert int(lead.chosen.sum()) == run.analysis["cycle"]["count"] == 4 * 28
    assert {name: float(v.mean()) for name, v in phases.items()} == pytest.approx(
        {row["name"]: row["ms"] for row in run.analysis["phases"]}
    )
    # One rank of two: the other's spans are not added in.
    assert float(sum(v.mean() for v in phases.values())) == pytest.approx(16 * 0.85)
    assert dict(baseline_parts(run)) == pytest.approx({"verify.forward": 6, "accept.sample": 1, "wait.sync": 0.5})
    t0 = int(lead.table["t0_ns"][40])
    columns = ("rank", "point", "t0_ns")
    window = read_windows(run.path, [(t0, t0 + 16 * MS)], columns)
    trace, requests = record(tmp_path / "rings", ranks=(0, 1))
    without_pyarrow(monkeypatch)
    plain = save(tmp_path / "npz", trace, requests, run.analysis)
    assert (plain.path / "spans.npz").exists()
    plain_run = specmeter.load(plain.path)
    again = cycles_by_rank(plain_run, None)[0]
    assert again.chosen.tolist() == lead.chosen.tolist()
    assert phase_times(plain_run, again)["verify"].tolist() == phases["verify"].tolist()
    other = read_windows(plain.path, [(t0, t0 + 16 * MS)], columns)
    assert sorted(other["t0_ns"].tolist()) == sorted(window["t0_ns"].tolist()) and len(window["t0_ns"]) > 4
    with pytest.raises(SpecmeterError, match="charts need vl-convert") as caught:
        write_page(specmeter.load(plain.path), tmp_path / "page.html")
    assert caught.value.exit == Exit.ENVIRONMENT and not (tmp_path / "page.html").exists()


def test_samples_are_quick_usual_slow_and_distinct(run: specmeter.Run) -> None:
    lead = cycles_by_rank(run, None)[0]
    lead.table["dur_ns"] = lead.table["dur_ns"].copy()
    slow = int(np.flatnonzero(lead.chosen)[17])
    lead.table["dur_ns"][slow] = 99 * MS
    samples = pick_samples(lead)
    assert len({s.cycle for s in samples}) == len(samples) >= 4
    assert next(s for s in samples if s.name.startswith("slowest")).cycle == slow
    assert all(lead.chosen[s.cycle] for s in samples)
    lead.chosen[:] = False
    assert pick_samples(lead) == []


def test_groups_by_kind_and_length(run: specmeter.Run) -> None:
    lead = cycles_by_rank(run, None)[0]
    kinds = {g.name: g for g in groups_by_kind(lead)}
    assert set(kinds) == {"chat", "code"} and kinds["chat"].requests == 2 and kinds["chat"].cycles == 2 * 28
    whole = sum(g.length.point * g.cycles for g in kinds.values()) / sum(g.cycles for g in kinds.values())
    assert whole == pytest.approx(run.analysis["acceptance"]["length_tokens"]["point"])
    assert [g.name for g in groups_by_length(run, lead)] == ["16-31", "32-63", "64-127"]
    names = ("code-3", "a_b_12", "7", "", "plain")
    assert [kind_of(name) for name in names] == ["code", "a_b", "prompt", "(none)", "plain"]


def test_device_spans_and_work_beside_have_lanes_of_their_own(run: specmeter.Run, tmp_path: Path) -> None:
    spans = dict(run.spans)
    spans["clock"] = spans["clock"].copy()
    spans["clock"][spans["point"] == "verify.forward"] = "device"
    spans["inside"] = spans["inside"] & (spans["point"] != "wait.sync")
    copied = specmeter.load(shutil.copytree(run.path, tmp_path / "copy"))
    write_table(copied.path, "spans", spans)
    charts = timeline_charts(copied, cycles_by_rank(copied, None))
    assert charts
    for lane in ("rank 0, host", "rank 0, device", "rank 1, device", "rank 1, host, beside"):
        assert f">{lane}<" in charts[0][1]
    # The cycle's own frame is no bar: it would cover everything in it.
    assert 'aria-label="cycle' not in charts[0][1]


def test_device_spans_of_a_ring_are_lanes_on_the_hosts_clock(tmp_path: Path) -> None:
    # As the runtime writes device spans: 3 ms each, 20 us after each call of verify. Synthetic, for no GPU is here.
    rows = recording(prompts=1, cycles=10)[0]
    verify = [row for row in rows if row[3] == 2]
    began = verify[0][0] - 777
    device = [
        (r[0] + 20_000 - began, r[0] + 20_000 - began + 3 * MS, r[2], 2, layout.KIND_DEVICE_SPAN, 0, 0) for r in verify
    ]
    saved = specmeter.load(save_run(tmp_path / "run", prompts=1, cycles=10, extra=device, ranks=(0,)))
    charts = timeline_charts(saved, cycles_by_rank(saved, None))
    assert charts
    for _name, svg in charts:
        assert ">rank 0, device<" in svg and ">rank 0, host<" in svg
        # The fastest launch bounds the offset, so the lane stands early by its 20 us: at the call.
        (said,) = re.findall(r'aria-label="(verify\.forward, rank 0, device[^"]*)"', svg)
        assert said.endswith("0.000 to 3.000 ms, 3.000 ms")


def test_histogram_keeps_every_value_in_sight() -> None:
    values = np.concatenate([np.linspace(10, 11, 1000), [500.0]])
    found = histogram(values)
    assert found.high < 12 and found.counts.sum() + found.outside == len(values) and found.outside < 12
    same = histogram(np.full(5, 3.0))
    assert same.low < 3 < same.high and same.counts.sum() == 5


def test_a_damaged_journal_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    assert read_trials(path) == []
    path.write_bytes(b"no database")
    assert read_trials(path) == []
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, kind TEXT, data TEXT)")
        sound = {"flags": {}, "env": {}, "setting": {"label": "k=1"}, "level": 1, "cause": "", "stopped": False}
        huge, endless = ({**sound, "logs": [value, value]} for value in (1e9, 1e308))
        hostile = ("[" * 100_000, json.dumps(huge), json.dumps(endless).replace("308", "999"))
        for data in ("{", "[]", '{"level": 1}', *hostile):
            database.execute("INSERT INTO events (kind, data) VALUES ('trial', ?)", (data,))
    assert read_trials(path) == []


def test_ends_that_tell_nothing_are_no_interval_in_a_chart_either(tmp_path: Path) -> None:
    swept, proof = sweep(tmp_path / "s"), compared()
    arm, pair = swept["arms"][1], proof["pairs"][0]
    for interval in (arm["tokens_per_s"], pair["ratio"]):
        interval.update(low=None, high=None, n=1)
    drawn = {"sweep": speed_chart(swept), "compare": ratio_chart(proof)}
    for name, said in (("sweep", arm["setting"]), ("compare", pair["arm"])):
        [label] = re.findall(rf'aria-label="({re.escape(said)}: (?:measured|x) [^"]*)"', drawn[name])
        assert "no interval that tells anything: 1 " in label and "[" not in label, label


def test_no_cycle_point_of_any_name_is_a_part_of_the_baseline_step(run: specmeter.Run, tmp_path: Path) -> None:
    copied = specmeter.load(shutil.copytree(run.path, tmp_path / "copy"))
    spans = dict(copied.spans)
    spans["point"] = np.where(spans["point"] == "cycle", "cycle.core", spans["point"])
    write_table(copied.path, "spans", spans)
    plan = json.loads((copied.path / "plan.json").read_text())
    for point in plan["points"]:
        point["name"] = point["name"].replace("cycle", "cycle.core")
    plan.pop("value_ids", None)
    (copied.path / "plan.json").write_text(json.dumps(plan))
    assert set(dict(baseline_parts(specmeter.load(copied.path)))) == {"verify.forward", "accept.sample", "wait.sync"}


def test_facts_of_the_run_are_masked_again(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", ["specmeter"])
    saved = specmeter.load(writer.path)
    saved.run.update(
        command=["serve", "--api-key", "sekrit"],
        env={"HF_TOKEN": "sekrit", "HOME": "/h"},
        server={"password": "sekrit", "url": "http://u:sekrit@h/"},
        engine_command=["vllm", "--token=sekrit"],
    )
    made = repeat_section(saved).as_html()
    assert "sekrit" not in made and "HF_TOKEN" in made and "/h" in made


def test_a_finished_run_is_kept_whatever_drawing_does(run: specmeter.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.save_page(run.path) == run.path / "report.html"
    assert page.save_page(run.path / "nowhere") is None
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    assert page.save_page(run.path) is None
