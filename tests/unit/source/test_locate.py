"""Which file an environment would import: found on disk, and never by importing."""

from __future__ import annotations

import json
import os
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from specmeter.recipes.asking import ask_far
from specmeter.source.locate import locate, package_folders
from specmeter.source.pyfile import SourceError, read

LOUD = "raise SystemExit('imported')\n"


def _package(root: Path, *names: str) -> Path:
    folder = root
    for name in names:
        folder = folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text(LOUD)
    return folder


def test_no_parent_package_is_run(tmp_path: Path) -> None:
    inner = _package(tmp_path, "loud", "louder")
    (inner / "mod.py").write_text(LOUD)
    assert locate("loud.louder.mod", [str(tmp_path)]).path == str(inner / "mod.py")
    assert locate("loud.louder", [str(tmp_path)]).is_package
    assert "loud" not in sys.modules


def test_first_entry_wins_and_packages_before_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thing.py").write_text(name)
    assert locate("thing", [str(tmp_path / "b"), str(tmp_path / "a")]).path == str(tmp_path / "b" / "thing.py")
    _package(tmp_path / "b", "thing")
    assert locate("thing", [str(tmp_path / "b")]).path == str(tmp_path / "b" / "thing" / "__init__.py")


def test_missing_module_names_how_far_and_what_is_near(tmp_path: Path) -> None:
    (_package(tmp_path, "engine", "worker") / "runner.py").write_text("")
    with pytest.raises(SourceError) as caught:
        locate("engine.worker.runnr", [str(tmp_path)])
    assert caught.value.reached == "engine.worker"
    assert caught.value.nearest == ("engine.worker.runner",)
    with pytest.raises(SourceError, match="not a package"):
        locate("engine.worker.runner.deep", [str(tmp_path)])
    with pytest.raises(SourceError, match="not in this environment"):
        locate("engin", [str(tmp_path)])


def test_namespace_package_over_two_entries(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "space").mkdir(parents=True)
        (tmp_path / name / "space" / f"in_{name}.py").write_text("")
    entries = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert locate("space.in_b", entries).path.endswith("/b/space/in_b.py")
    assert len(package_folders("space", entries)) == 2
    with pytest.raises(SourceError, match="namespace package"):
        locate("space", entries)


def test_byte_code_alone_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "gone.py"
    source.write_text("x = 1\n")
    py_compile.compile(str(source), cfile=str(tmp_path / "gone.pyc"))
    source.unlink()
    with pytest.raises(SourceError, match="only byte code"):
        locate("gone", [str(tmp_path)])


def test_module_in_a_zip(tmp_path: Path) -> None:
    archive = tmp_path / "lib.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("zipped/__init__.py", "")
        writer.writestr("zipped/mod.py", "def f():\n    return 1\n")
    found = locate("zipped.mod", [str(archive)])
    assert found.zipped
    assert read(found.path).lines() == ["def f():", "    return 1"]


def test_editable_install_by_a_finder(tmp_path: Path) -> None:
    site, tree = tmp_path / "site", tmp_path / "tree"
    site.mkdir(), tree.mkdir()
    (_package(tree, "edited") / "mod.py").write_text("")
    mapping = f"MAPPING: dict[str, str] = {{'edited': {str(tree / 'edited')!r}}}\nraise SystemExit\n"
    (site / "__editable___edited_1_0_finder.py").write_text(mapping)
    assert locate("edited.mod", [str(site)]).path == str(tree / "edited" / "mod.py")


def test_built_in_and_compiled_modules_are_refused() -> None:
    with pytest.raises(SourceError, match="built into"):
        locate("sys", sys.path)
    compiled = next(name for name in ("_json", "_datetime", "_struct") if name not in sys.builtin_module_names)
    with pytest.raises(SourceError, match="compiled extension"):
        locate(compiled, sys.path)


@pytest.mark.parametrize("name", ["", "a..b", "a-b", ".a", "a/b"])
def test_what_is_no_module_name(name: str) -> None:
    with pytest.raises(SourceError, match="not a dotted module name"):
        locate(name, sys.path)


def test_bom_crlf_and_coding_line(tmp_path: Path) -> None:
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbfdef f():\r\n    pass\r\n")
    file = read(str(tmp_path / "bom.py"))
    assert (file.encoding(), file.newline(), file.lines()) == ("utf-8-sig", "CRLF", ["def f():", "    pass"])
    assert file.tree().body[0].lineno == 1
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    file = read(str(tmp_path / "latin.py"))
    assert file.encoding() == "iso-8859-1"
    assert file.lines()[1] == "name = 'é'"


def test_unreadable_and_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        read(str(tmp_path / "none.py"))
    with pytest.raises(SourceError, match="Is a directory"):
        read(str(tmp_path))
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(SourceError, match="line 1"):
        read(str(tmp_path / "broken.py")).tree()
    (tmp_path / "wrong.py").write_bytes(b"# coding: no-such-codec\n")
    with pytest.raises(SourceError, match="no-such-codec"):
        read(str(tmp_path / "wrong.py")).encoding()
    (tmp_path / "null.py").write_bytes(b"x = 1\0\n")
    with pytest.raises(SourceError, match="null"):
        read(str(tmp_path / "null.py")).tree()


@pytest.mark.parametrize("safe", ["", "1"])
def test_python_with_a_safe_path_finds_the_first_folder_of_its_pythonpath(tmp_path: Path, safe: str) -> None:
    """PYTHONSAFEPATH keeps a script's folder off the search path, so nothing of it may be taken off."""
    (tmp_path / "first_of_all.py").write_text("x = 1\n")
    env = {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": str(tmp_path)}
    found = ask_far(Path(sys.executable), {"op": "locate", "module": "first_of_all"}, env)
    assert str(tmp_path / "first_of_all.py") in json.dumps(found)
