"""The quick index of a package agrees with the syntax tree, and its cache with the files."""

from __future__ import annotations

import ast
import os
import sysconfig
from pathlib import Path

import pytest

from specmeter.source import index, lexer
from specmeter.source.outline import outline, package_target
from specmeter.source.pyfile import SourceError, read

STDLIB = Path(sysconfig.get_path("stdlib"))


def _defined_in(path: Path) -> set[tuple[str, str, int]]:
    found = outline(read(str(path)))
    functions = {("function", item["qualname"], item["line"]) for item in found["functions"]}
    return functions | {("class", item["qualname"], item["line"]) for item in found["classes"]}


def test_definitions_are_those_of_the_syntax_tree() -> None:
    files = sorted(STDLIB.glob("*.py")) + sorted((STDLIB / "asyncio").glob("*.py"))
    assert len(files) > 100
    checked = 0
    for path in files:
        definitions, callees = lexer.scan(lexer.decode(path.read_bytes()))
        assert set(definitions) == _defined_in(path), path
        tree = ast.parse(path.read_bytes())
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert called <= set(callees), path
        checked += len(definitions)
    assert checked > 5000


def test_strings_and_branches_do_not_mislead() -> None:
    text = '''
class A:
    """
def not_one(): pass
    """
    def m(self): return """
x = 1
"""
    async def n(self):
        def inner(): pass
if True:
    def late(): pass
'''
    definitions, _ = lexer.scan(text)
    names = [(kind, name) for kind, name, _ in definitions]
    assert names == [
        ("class", "A"),
        ("function", "A.m"),
        ("function", "A.n"),
        ("function", "A.n.<locals>.inner"),
        ("function", "late"),
    ]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "engine"
    root.mkdir()
    for number in range(200):
        (root / f"mod{number}.py").write_text(f"def f{number}():\n    return g{number}()\n")
        os.utime(root / f"mod{number}.py", ns=(10**18, 10**18))
    return root


def test_only_changed_files_are_read_again(package: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first, count = index.build(str(package), cache)
    assert (len(first), count) == (200, 200)
    again, count = index.build(str(package), cache)
    assert (again, count) == (first, 0)
    changed = package / "mod7.py"
    changed.write_text("def changed():\n    pass\n")
    (package / "mod8.py").unlink()
    (package / "new.py").write_text("x = 1\n")
    third, count = index.build(str(package), cache)
    assert count == 2
    assert index.definitions(third["mod7.py"]) == [("function", "changed", 1)]
    assert "mod8.py" not in third and "new.py" in third
    assert oct(next(Path(cache).iterdir()).stat().st_mode)[-3:] == "600"


def test_same_size_and_a_time_close_to_the_cache_s_is_not_trusted(package: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    (package / "mod1.py").write_text("def aa():\n    pass\n")
    stamp = (package / "mod1.py").stat().st_mtime_ns
    index.build(str(package), cache)
    (package / "mod1.py").write_text("def bb():\n    pass\n")
    os.utime(package / "mod1.py", ns=(stamp, stamp))
    assert index.definitions(index.build(str(package), cache)[0]["mod1.py"]) == [("function", "bb", 1)]


@pytest.mark.parametrize("damage", [b"", b"\x00garbage", b"i\x01\x00\x00\x00"])
def test_a_damaged_cache_is_built_anew(package: Path, tmp_path: Path, damage: bytes) -> None:
    cache = tmp_path / "cache"
    whole, _ = index.build(str(package), str(cache))
    stored = next(cache.iterdir())
    stored.write_bytes(damage)
    assert index.build(str(package), str(cache)) == (whole, 200)
    assert index.build(str(package), str(cache)) == (whole, 0)


def test_a_cache_that_cannot_be_written_is_done_without(package: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert index.build(str(package), str(blocked / "cache"))[1] == 200


def test_search_of_a_package_is_exact(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (package / "quoted.py").write_text('"""f11( in a string"""\n# g11()\n')
    result = package_target({"target": str(package), "grep": r"^g?f?11$"}, [])
    assert [(item["file"], item["kind"], item["text"]) for item in result["matches"]] == [
        ("mod11.py", "function", "f11"),
        ("mod11.py", "call", "g11"),
    ]
    with pytest.raises(SourceError, match="regular expression"):
        package_target({"target": str(package), "grep": "("}, [])


def test_files_that_cannot_be_decoded_are_named(package: Path, tmp_path: Path) -> None:
    (package / "bad.py").write_bytes(b"x = '\xff'\n")
    found, _ = index.build(str(package), str(tmp_path / "cache"))
    assert "utf-8" in found["bad.py"][5]
