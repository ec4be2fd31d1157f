"""What a patch does to one file: what is kept, what is refused and why."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specmeter.patch import block, disk, operate
from specmeter.patch.disk import Refused
from specmeter.patch.state import look

FILES = {"start.py": b"import sys\nsys.modules[__name__ + '.ran'] = True\n", "link": b"/nowhere"}
FACTS = {"id": "0badcafe", "link": "/nowhere"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "engine" / "__init__.py"
    path.parent.mkdir()
    path.write_bytes(b"version = 3\n")
    return path


def apply(path: Path) -> str:
    return operate.apply(str(path), FILES, FACTS)


def refusal(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x = 1",
        b"x = 1\r\ny = 2\r\n",
        b"\xef\xbb\xbfx = 1\n",
        b"# -*- coding: latin-1 -*-\nname = '\xe9'\n",
        b'"""Doc."""\nfrom __future__ import annotations\nif True:\n    def f(x):\n        return x  # end',
        b"x = 1\n\x0c\n",
        b"if x:\n\tpass\n\t",
    ],
    ids=["empty", "no newline", "crlf", "bom", "latin-1", "comment at the end", "form feed", "tab"],
)
def test_the_lines_fit_any_source_and_come_off_again(target: Path, data: bytes) -> None:
    target.write_bytes(data)
    assert apply(target) == "applied"
    assert target.read_bytes().startswith(data)
    assert operate.restore(str(target)) == "restored"
    assert target.read_bytes() == data
    assert [path.name for path in target.parent.iterdir()] == ["__init__.py"]


@pytest.mark.parametrize("data", [b"text = '''\n", b"x = (1,\n", b"def f(:\n", b"x = 1 \\", b"\x00"])
def test_a_file_that_is_no_python_is_refused_and_untouched(target: Path, data: bytes) -> None:
    target.write_bytes(data)
    assert "not valid for this Python" in refusal(lambda: apply(target)).why
    assert target.read_bytes() == data
    assert [path.name for path in target.parent.iterdir()] == ["__init__.py"]


def test_lines_that_would_become_part_of_what_is_before_them_are_refused() -> None:
    with pytest.raises(block.CodeError, match="part of what stands before"):
        block.check_addition(
            b"if x:\n    pass\n", b"if x:\n    pass\nelse:\n    pass\ntry:\n    pass\nfinally: pass\n", "f"
        )


def test_the_patched_module_runs_the_start_program_and_keeps_its_names(target: Path) -> None:
    code = "import engine, sys; print(sorted(n for n in vars(engine) if n[:2] != '__'), 'builtins.ran' in sys.modules)"
    env = {"PYTHONPATH": str(target.parent.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    apply(target)

    def outcome() -> str:
        return subprocess.run([sys.executable, "-Werror", "-c", code], env=env, capture_output=True, text=True).stdout

    assert outcome() == "['version'] True\n"
    (target.parent / ".specmeter-patch" / "__init__.py" / "start.py").unlink()
    assert outcome() == "['version'] False\n", "without its folder the lines do nothing"
    operate.restore(str(target))


def test_apply_twice_changes_nothing(target: Path) -> None:
    apply(target)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in target.parent.rglob("*")}
    assert operate.apply(str(target), {"start.py": b"other"}, {"id": "other"}) == "already"
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in target.parent.rglob("*")} == before


def test_a_hard_linked_file_keeps_its_other_name_unpatched_and_gets_its_inode_back(target: Path) -> None:
    # Installers link files from a cache that all environments share.
    cached = target.parent.parent / "cached.py"
    os.link(target, cached)
    inode = target.stat().st_ino
    apply(target)
    assert cached.read_bytes() == b"version = 3\n"
    operate.restore(str(target))
    assert (target.stat().st_ino, target.stat().st_nlink) == (inode, 2)


def test_a_symbolic_link_leads_to_the_real_file(target: Path, tmp_path: Path) -> None:
    named = tmp_path / "named.py"
    named.symlink_to(target)
    apply(named)
    assert named.is_symlink() and look(str(named)).path == str(target)
    operate.restore(str(named))
    assert named.is_symlink() and target.read_bytes() == b"version = 3\n"


def test_the_mode_is_kept_and_what_is_stored_is_private(target: Path) -> None:
    target.chmod(0o664)
    apply(target)
    assert target.stat().st_mode & 0o7777 == 0o664
    folder = target.parent / ".specmeter-patch"
    for path in [folder, *folder.rglob("*")]:
        if path.name != "original":
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_change_by_somebody_else_is_refused_with_the_difference(target: Path) -> None:
    apply(target)
    patched = target.read_bytes()
    target.write_bytes(b"version = 4\n" + patched.split(b"\n", 1)[1])
    refused = refusal(lambda: operate.restore(str(target)))
    assert "-version = 3" in refused.diff and "+version = 4" in refused.diff
    assert "+# >>> specmeter" not in refused.diff, "what is ours is no difference"
    assert "changed by somebody else" in refusal(lambda: apply(target)).what
    assert operate.restore(str(target), keep_changes=True) == "kept"
    assert target.read_bytes() == b"version = 4\n"
    assert [path.name for path in target.parent.iterdir()] == ["__init__.py"]


def test_a_file_that_an_upgrade_replaced_keeps_what_the_upgrade_brought(target: Path) -> None:
    apply(target)
    target.write_bytes(b"version = 5\n")
    refusal(lambda: operate.restore(str(target)))
    assert operate.restore(str(target), keep_changes=True) == "kept"
    assert target.read_bytes() == b"version = 5\n"
    assert [path.name for path in target.parent.iterdir()] == ["__init__.py"]


def test_a_file_that_was_removed(target: Path) -> None:
    apply(target)
    target.unlink()
    assert "is gone" in refusal(lambda: operate.restore(str(target))).what
    operate.restore(str(target), keep_changes=True)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(("make", "said"), [(os.mkdir, "A folder is in its place"), (os.mkfifo, "A pipe or a device")])
def test_what_is_no_file_is_refused_by_name(target: Path, make: Callable[[Path], None], said: str) -> None:
    apply(target)
    target.unlink()
    make(target)
    for call in (
        lambda: operate.restore(str(target)), lambda: operate.restore(str(target), keep_changes=True),
        lambda: apply(target),
    ):  # fmt: skip
        refused = refusal(call)
        assert str(target) in refused.what and said in refused.why and "Move it away" in refused.next
    assert said in operate.preview(str(target))["refused"]["why"]
    target.rename(target.parent / "away")
    assert operate.restore(str(target), keep_changes=True) == "kept", "as it was told to"
    assert [path.name for path in target.parent.iterdir()] == ["away"]


@pytest.mark.parametrize("harm", ["gone", "changed"])
def test_a_lost_backup_is_made_from_the_patched_file(target: Path, harm: str) -> None:
    before = target.stat()
    apply(target)
    backup = target.parent / ".specmeter-patch" / "__init__.py" / "original"
    backup.unlink()
    if harm == "changed":
        backup.write_bytes(b"something else\n")
    assert operate.restore(str(target)) == "restored"
    assert target.read_bytes() == b"version = 3\n"
    assert (target.stat().st_mtime_ns, target.stat().st_mode) == (before.st_mtime_ns, before.st_mode)


def test_lines_without_their_backup_are_reported_and_can_be_taken_out(target: Path) -> None:
    apply(target)
    copy = target.parent.parent / "copy" / "__init__.py"
    copy.parent.mkdir()
    copy.write_bytes(target.read_bytes())
    assert "holds the lines of a patch" in refusal(lambda: operate.restore(str(copy))).what
    assert "holds the lines of a patch" in refusal(lambda: apply(copy)).what
    operate.restore(str(copy), keep_changes=True)
    assert copy.read_bytes() == b"version = 3\n"
    assert list(copy.parent.iterdir()) == [copy]


def test_a_manifest_of_another_version_is_left_alone(target: Path) -> None:
    apply(target)
    manifest = target.parent / ".specmeter-patch" / "__init__.py" / "manifest.json"
    for text in ('{"format": 2}', "{", "[]"):
        manifest.write_text(text)
        assert "cannot be judged" in refusal(lambda: operate.restore(str(target))).what
        assert manifest.read_text() == text


def test_a_file_other_than_planned_is_refused(target: Path) -> None:
    refused = refusal(lambda: operate.apply(str(target), FILES, FACTS, expected="0" * 64))
    assert "not the file that was planned" in refused.what
    assert [path.name for path in target.parent.iterdir()] == ["__init__.py"]


def test_two_at_a_time(target: Path) -> None:
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "Another specmeter" in refusal(lambda: apply(target)).what
    finally:
        os.close(handle)
    assert apply(target) == "applied"


def in_child(user: int, code: Callable[[], object]) -> str:
    """Run ``code`` in a forked child as ``user``; what it printed or raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            text = str(code())
        except Refused as refused:
            text = f"{refused.what} {refused.why} {refused.next}"
        except BaseException as error:
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as file:
        return file.read()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user or to mount")


@needs_root
def test_another_users_file_is_explained(target: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    said = in_child(65534, lambda: apply(target))
    assert "Its folder belongs to root (uid 0) (mode 755), and you are" in said and "Run this as root" in said
    target.parent.chmod(0o777)
    assert "only root or that user can keep the owner" in in_child(65534, lambda: apply(target))
    assert [path.name for path in target.parent.iterdir()] == ["__init__.py"]


@needs_root
def test_root_keeps_the_owner_of_the_file(target: Path) -> None:
    os.chown(target, 65534, 12345)
    apply(target)
    assert (target.stat().st_uid, target.stat().st_gid) == (65534, 12345)
    operate.restore(str(target))
    assert (target.stat().st_uid, target.stat().st_gid) == (65534, 12345)


MOUNTED = """
import os, subprocess, sys
from specmeter.patch import operate
from specmeter.patch.disk import Refused
folder, options = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], check=True)
target = os.path.join(folder, "__init__.py")
open(target, "w").write("version = 3\\n")
if options == "ro":
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
before = sorted(os.listdir(folder))
try:
    print(operate.apply(target, {"start.py": b"x" * 30000}, {"id": "1"}))
except Refused as refused:
    print(refused.why)
assert sorted(os.listdir(folder)) == before and open(target).read() == "version = 3\\n"
if options == "full":
    operate.apply(target, {"start.py": b""}, {"id": "1"})
    try:
        open(os.path.join(folder, "filler"), "wb").write(b"x" * 100000)
    except OSError:
        pass
    print(operate.restore(target))
"""


@needs_root
@pytest.mark.parametrize("options, why", [("ro", "read-only"), ("full", "The disk or the quota is full")])
def test_read_only_and_full_file_systems(tmp_path: Path, options: str, why: str) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    source = str(Path(disk.__file__).parents[2])
    command = ["unshare", "-m", sys.executable, "-c", MOUNTED, str(folder), options]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert why in lines[0]
    if options == "full":
        assert lines[1] == "restored", "restoring must need no room"


def test_errors_are_explained(target: Path) -> None:
    assert "immutable" in disk.explain(str(target), OSError(errno.EPERM, "Operation not permitted")).why


@needs_root
def test_an_immutable_file_is_explained(target: Path) -> None:
    done = subprocess.run(["chattr", "+i", str(target)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this file system has no such flag: {done.stderr.strip()}")
    try:
        refused = refusal(lambda: apply(target))
        assert "immutable" in refused.why and "chattr -i" in refused.next
        assert target.read_bytes() == b"version = 3\n"
        assert [path.name for path in target.parent.iterdir()] == ["__init__.py"]
    finally:
        subprocess.run(["chattr", "-i", str(target)], check=True)
