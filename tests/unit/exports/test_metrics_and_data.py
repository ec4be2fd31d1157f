"""Metrics of saved runs by Prometheus' own parsers; tables for other tools."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_classic

import specmeter
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.exports.figures import Buckets, Figures, run_figures
from specmeter.exports.openmetrics import Collector, openmetrics_text
from tests.support.saved_runs import save_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("metrics") / "run", ranks=(0, 1))


def samples(text: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("server", "host")]
            found[(sample.name, *labels)] = sample.value
    return found


def classic(figures: list[Figures]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(lambda: figures))
    return generate_latest(registry).decode()


def test_the_openmetrics_file_holds_the_reports_values(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.txt"
    assert main(["export", str(saved), "--format", "openmetrics", "--out", str(out)]) == 0
    text = out.read_text()
    assert text.endswith("# EOF\n")
    found, report = samples(text), specmeter.load(saved).analysis
    count = found["specmeter_cycle_duration_seconds_count", "rank=0"]
    assert count == report["cycle"]["count"]
    mean = found["specmeter_cycle_duration_seconds_sum", "rank=0"] / count
    assert mean * 1e3 == pytest.approx(report["cycle"]["mean_ms"]["point"])
    for row in report["phases"]:
        total = found["specmeter_phase_duration_seconds_sum", f"phase={row['name']}", "rank=0"]
        assert total / count * 1e3 == pytest.approx(row["ms"])
    assert found["specmeter_accept_length_tokens", "rank=0"] == report["acceptance"]["length_tokens"]["point"]
    assert found["specmeter_break_even_tokens", "rank=0"] == pytest.approx(report["break_even_tokens"]["point"])
    kept = found["specmeter_accepted_drafts_total", "position=1", "rank=0"]
    drafted = found["specmeter_drafted_tokens_total", "position=1", "rank=0"]
    assert kept / drafted == pytest.approx(report["acceptance"]["positions"][0]["cumulative"])
    assert found["specmeter_cycle_duration_seconds_bucket", "le=0.025", "rank=1"] == count
    assert found["specmeter_cycle_duration_seconds_bucket", "le=0.01", "rank=1"] == 0


def test_a_cycle_is_of_one_kind(saved: Path) -> None:
    run = specmeter.load(saved)
    for figures in run_figures(run):
        mine = run.cycles["rank"] == figures.rank
        kind, drafted = run.cycles["kind"][mine].astype(str), run.cycles["drafted"][mine]
        assert figures.cycles["plain"] == np.count_nonzero((kind == "decode") & (drafted == 0)) > 0
        assert sum(figures.cycles.values()) == len(kind)


def test_what_is_not_known_has_no_sample() -> None:
    text = openmetrics_text([Figures("s", "h", -1)])
    names = {name for name, *_ in samples(text)}
    assert not any("seam" in n or "break_even" in n or "accept_length" in n or "overhead" in n for n in names)
    assert "NaN" not in text


def test_seams_overhead_and_armed_have_samples_when_known() -> None:
    figures = Figures("s", "h", 0, seam=Buckets().with_values([0.001, 0.02]), overhead_ratio=0.004, armed=True)
    found = samples(openmetrics_text([replace(figures, cycle_s=0.02).with_baseline(0.01, 0.5)]))
    assert found["specmeter_seam_duration_seconds_count", "rank=0"] == 2
    assert found["specmeter_probe_overhead_ratio", "rank=0"] == 0.004 and found["specmeter_armed", "rank=0"] == 1
    assert found["specmeter_break_even_tokens", "rank=0"] == 2


@pytest.mark.parametrize("name", ['a"b\n\\c', "<b>\x1b[31m\u202e", "é" * 300])
def test_hostile_labels_come_back_as_one_inert_label(name: str) -> None:
    figures = [Figures(name, name, 0, cycles={name: 3})]
    for families in (text_string_to_metric_families(openmetrics_text(figures)), parse_classic(classic(figures))):
        labels = [s.labels for f in families for s in f.samples if "server" in s.labels]
        values = [value for labelled in labels for value in labelled.values()]
        assert values and all(len(v) <= 120 and not {"\n", "\x1b", "\u202e"} & set(v) for v in values)


def test_promtool_finds_nothing_to_say(saved: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian: prometheus) is not installed")
    text = classic([f.with_baseline(None, 0.01) for f in run_figures(specmeter.load(saved))])
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


RULE_TEST = """
rule_files: [rules.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'specmeter_accept_length_tokens{server="s"}'
        values: '1.2x20'
      - series: 'specmeter_break_even_tokens{server="s"}'
        values: '1.6x20'
    alert_rule_test:
      - {eval_time: 9m, alertname: SpeculationLoses, exp_alerts: []}
      - eval_time: 11m
        alertname: SpeculationLoses
        exp_alerts:
          - exp_labels: {severity: warning, server: s}
            exp_annotations: {summary: "SUMMARY"}
"""


def test_the_alert_of_the_docs_fires_after_ten_minutes(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian: prometheus) is not installed")
    docs = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
    (rules,) = re.findall(r"```yaml\n(.*?)```", docs.read_text(encoding="utf-8"), re.S)
    summary = re.findall(r'summary: "\{\{ \$labels.server \}\}: (.*)"', rules)[0]
    (tmp_path / "rules.yml").write_text(rules)
    (tmp_path / "test.yml").write_text(RULE_TEST.replace("SUMMARY", f"s: {summary}"))
    done = subprocess.run([promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_end_in_base_units_and_counters_in_total(saved: Path) -> None:
    for family in text_string_to_metric_families(openmetrics_text(run_figures(specmeter.load(saved)))):
        assert family.name.startswith("specmeter_") and "milli" not in family.name and family.documentation
        if family.type == "counter":
            assert all(s.name.endswith("_total") for s in family.samples)
        else:
            assert family.name.rsplit("_", 1)[1] in ("seconds", "tokens", "ratio", "info", "armed")


def test_json_export_is_the_run(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert main(["export", str(saved), "--format", "json", "--out", str(out)]) == 0
    document, run = json.loads(out.read_text()), specmeter.load(saved)
    assert document["schema"] == "specmeter/export/1" and document["analysis"] == run.analysis
    assert document["tables"]["spans"]["self_ns"] == run.spans["self_ns"].tolist()
    assert set(document["tables"]) == {"cycles", "spans", "requests"} and out.stat().st_mode & 0o777 == 0o600


def test_parquet_export_names_its_schema(saved: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    out = tmp_path / "tables"
    assert main(["export", str(saved), "--format", "parquet", "--out", str(out)]) == 0
    table = parquet.read_table(out / "cycles.parquet")
    assert table.schema.metadata[b"specmeter.schema"] == b"specmeter/table/1"
    assert table.schema.metadata[b"specmeter.table"] == b"cycles"
    assert table["dur_ns"].to_pylist() == specmeter.load(saved).cycles["dur_ns"].tolist()


def test_metrics_of_a_directory_and_of_none(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(saved)]) == 0
    assert samples(capsys.readouterr().out)
    assert main(["metrics", str(tmp_path)]) == 2
    for option, value in (("--listen", "nowhere"), ("--listen", "127.0.0.1:99999"), ("--every", "0")):
        assert main(["metrics", option, value]) == 2
    assert main(["metrics", "--baseline", str(tmp_path)]) == 2


def test_a_run_cut_off_before_its_analysis_is_said(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", finish=False)
    (run / "analysis.json").unlink()
    with pytest.raises(SpecmeterError, match="no profile"):
        run_figures(specmeter.load(run))
