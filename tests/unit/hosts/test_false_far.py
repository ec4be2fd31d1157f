"""A far side that is broken or hostile: one plain error, never a hang, a success, or a fault of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmeter import cli
from specmeter.bench.client import Call, Outcome
from specmeter.bench.prompts import Prompt
from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts import client, session
from specmeter.hosts import relay as relay_module
from specmeter.hosts.address import Host
from specmeter.hosts.address import parse as parse_host
from specmeter.hosts.driven import Driven
from specmeter.hosts.far_rings import pack, unpack
from specmeter.hosts.mirror import Mirror
from specmeter.hosts.place import There
from specmeter.hosts.relay import Relay
from specmeter.hosts.shapes import check_answer, check_event
from specmeter.reporters.inert import inert_lines
from specmeter.runtime import layout
from tests.support import false_far
from tests.support.children import until

FAR = str(Path(false_far.__file__))
HOSTILE = "a\x1b[2J\x1b]0;x\x07b\x9b31m\u202ec\rd"


def session_with(mode: str) -> Relay:
    """A session with ``false_far`` in that mode."""
    return Relay(Host("ssh://false", (sys.executable, "-S", "-E", FAR, mode), shell=False), "python3")


def asked(mode: str, op: str = "find") -> SpecmeterError:
    """What the second request ends with; it must end."""
    relay = session_with(mode)
    said: list[BaseException] = []

    def ask() -> None:
        try:
            There(relay).find_link("l") if op == "find" else relay.call(op)
        except BaseException as error:
            said.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    waits = asking.is_alive()
    relay.close()
    assert not waits, "it waits for ever"
    assert len(said) == 1 and isinstance(said[0], SpecmeterError), said
    assert "ssh://false" in said[0].what
    return said[0]


@pytest.mark.parametrize("mode", ["id null", "id text", "event list", "no name", "deep"])
def test_a_malformed_frame_ends_the_session(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    error = asked(mode)
    assert error.exit == Exit.SERVER_FAILED and "was lost" in error.what and "damaged" in error.why, error
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "mode, said",
    [
        ("no ok", "a malformed answer to 'find'"),
        ("ok text", "a malformed answer to 'find'"),
        ("error text", "an error without words"),
        ("link id", "a malformed answer to 'find'"),
        ("plan", "a plan of link l that cannot be used"),
        ("plan list", "a malformed answer to 'find'"),
    ],
)
def test_a_malformed_answer_is_named(mode: str, said: str) -> None:
    error = asked(mode)
    assert error.exit == Exit.SERVER_FAILED and f"The far side sent {said}" in error.what, error
    if mode == "link id":
        assert "'../../x'" in error.why


def test_an_address_made_of_a_port_is_refused() -> None:
    assert "1@evil.example:80/" in asked("port", "port").why


@pytest.mark.parametrize("mode, code", [("error 0", 4), ("error 6", 4), ("error 99", 4), ("error 3", 3)])
def test_no_error_becomes_success_or_a_fault_of_ours(mode: str, code: int) -> None:
    error = asked(mode)
    assert int(error.exit) == code and "w" in error.what and (error.why, error.next_step) == ("y", "n")


def test_a_far_side_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "GONE_S", 1.0)
    monkeypatch.setattr(relay_module, "BEAT_S", 0.1)
    error = asked("silent")
    assert error.exit == Exit.SERVER_FAILED and "was lost" in error.what


@pytest.mark.parametrize(
    "op, answer",
    [
        ("ping", {"perf_counter_ns": 10**30, "time_ns": 1}),
        ("drive", {"wall_s": float("nan"), "cpu_share": 0.5}),
        ("drive", {"wall_s": 1.0, "cpu_share": "x", "full_ns": 1}),
        ("drive", {"wall_s": 1.0, "cpu_share": 0.5, "full_ns": 1.5}),
        ("http", {"status": "abc", "headers": []}),
        ("http", {"status": 200, "headers": [["a"]]}),
        ("start", {"pid": 1, "secrets": [""]}),
        ("arm", {"silent": [True], "done": 1}),
        ("links", {"links": [{"link": "/etc", "path": "", "plan": {}, "document": {}}]}),
        ("facts", [1]),
    ],
)
def test_answers_of_other_kinds_are_refused(op: str, answer: Any) -> None:
    with pytest.raises(SpecmeterError, match="The far side sent a malformed answer"):
        check_answer(op, answer)


def outcome(**other: Any) -> dict[str, Any]:
    """An ``outcome`` event of one answer with two events."""
    right = {"event": "outcome", "drive": 1, "index": 0, "send_ns": 1, "end_ns": 9, "arrivals_ns": [3, 5]}
    return {**right, "status": 200, "problem": "", **other}


@pytest.fixture
def driven() -> Iterator[tuple[Driven, list[Outcome]]]:
    done: list[Outcome] = []
    prompt = Prompt("p", "chat", (("user", "text"),))
    yield Driven([Call("r", prompt, 4), Call("s", prompt, 4)], "completions", done.append), done


PIECES = [b'data: {"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}', b"data: [DONE]"]
RIGHT = zlib.compress(json.dumps([len(piece) for piece in PIECES]).encode() + b"\n" + b"".join(PIECES))


def test_a_right_outcome_is_taken(driven: tuple[Driven, list[Outcome]]) -> None:
    check_event(outcome())
    driven[0].take(outcome(), RIGHT)
    assert [(one.call.request_id, one.text, one.error) for one in driven[1]] == [("r", "a", "")]
    with pytest.raises(SpecmeterError, match="twice"):
        driven[0].take(outcome(), RIGHT)


@pytest.mark.parametrize(
    "message, payload",
    [
        (outcome(index=-1), RIGHT),
        (outcome(index=2), RIGHT),
        (outcome(index="0"), RIGHT),
        (outcome(send_ns=10**30), RIGHT),
        (outcome(arrivals_ns=[5, 3]), RIGHT),
        (outcome(arrivals_ns=[3]), RIGHT),
        (outcome(end_ns=0), RIGHT),
        (outcome(), b"xx"),
        (outcome(), RIGHT[:-4]),
        (outcome(), zlib.compress(b"[3, -3]\n")),
        (outcome(), zlib.compress(b"[9]\nabc")),
        (outcome(), zlib.compress(b"[" * 100_000)),
    ],
)
def test_wrong_outcomes_are_refused(
    driven: tuple[Driven, list[Outcome]], message: dict[str, Any], payload: bytes
) -> None:
    with pytest.raises(SpecmeterError, match="The far side sent") as refused:
        check_event(message)
        driven[0].take(message, payload)
    assert refused.value.exit == Exit.SERVER_FAILED and driven[1] == []


def header(capacity: int) -> bytes:
    """A ring's header."""
    sizes = (layout.MAGIC, layout.LAYOUT_VERSION, layout.RECORD_SIZE, capacity)
    return layout.HEADER.pack(*sizes, 7, 8, b"boot", b"host", -1, -1, b"\0" * 32, 1, 2)


RING = {"event": "ring", "link": "l", "name": "7-8"}


@pytest.mark.parametrize(
    "stated, capacity, fits",
    [(None, 1 << 20, True), (None, 1 << 21, False), (1 << 22, 1 << 22, True), (1 << 40, 1 << 25, False)],
)
def test_a_ring_is_as_long_as_its_link_allows_and_takes_no_room(
    tmp_path: Path, stated: int | None, capacity: int, fits: bool
) -> None:
    mirror = Mirror({**false_far.DESCRIBED, "document": {"capacity": stated}})
    try:
        if fits:
            mirror.take(RING, header(capacity))
            assert (mirror.folder / "7-8.ring").stat().st_blocks * 512 < 1 << 16
            with pytest.raises(SpecmeterError, match="once more"):
                mirror.take(RING, header(64))
        else:
            with pytest.raises(SpecmeterError, match="The far side sent a ring of"):
                mirror.take(RING, header(capacity))
            assert not (mirror.folder / "7-8.ring").exists()
    finally:
        mirror.close()


def test_a_copy_of_a_ring_has_its_holes_too(tmp_path: Path) -> None:
    from specmeter.trace.sparse import copy_sparse

    with (tmp_path / "ring").open("wb") as file:
        file.write(b"head")
        file.seek(1 << 23)
        file.write(b"record")
        file.truncate(1 << 24)
    copy_sparse(tmp_path / "ring", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "ring").read_bytes()
    assert (tmp_path / "copy").stat().st_blocks * 512 < 1 << 20


def test_records_that_are_none_are_refused() -> None:
    mirror = Mirror(false_far.DESCRIBED)
    records = {"event": "records", "link": "l", "name": "7-8", "lost": 0}
    try:
        with pytest.raises(SpecmeterError, match="before its ring"):
            mirror.take(records, pack(b"\0" * 32))
        mirror.take(RING, header(64))
        for payload in (b"garbage", zlib.compress(b"\0" * 31), pack(b"\0" * 64)[:-4]):
            with pytest.raises(SpecmeterError, match="damaged records"):
                mirror.take(records, payload)
    finally:
        mirror.close()


def test_a_few_packed_bytes_do_not_fill_the_memory() -> None:
    packed = zlib.compress(b"\0" * (1 << 24))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="longer"):
            unpack(packed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_an_event_without_its_fields_is_a_fault() -> None:
    relay = session_with("silent")
    there = There(relay)
    try:
        relay._hear({"event": "ring", "link": "l"}, header(64))
        with pytest.raises(SpecmeterError, match="The far side sent a malformed 'ring' event"):
            relay.check_fault()
    finally:
        there.close()


def test_the_first_fault_is_the_one_that_is_told() -> None:
    relay = session_with("silent")
    there = There(relay)
    try:
        there.mirror(false_far.DESCRIBED)
        relay._hear({"event": "ring", "link": "l", "name": "../../x"}, header(64))
        relay._hear({"event": "records", "link": "l", "name": "7-8", "lost": 0}, pack(b""))
        with pytest.raises(
            SpecmeterError, match=r"On ssh://false: The far side sent a process with the name '../../x'"
        ):
            relay.check_fault()
    finally:
        there.close()


# -- clients that do not begin, and what reaches the terminal ----------------------------------------------------------


def alive(mark: str) -> list[int]:
    """Processes with that word in their command line; zombies have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("command", [["status"], ["bench", "--url", "http://127.0.0.1:9"]])
def test_a_client_that_never_begins_is_ended(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (client, session, relay_module):
        monkeypatch.setattr(module, "START_S", 0.3)
    mark = f"{os.getpid()}.25"
    assert cli.main(["--on", f"sh -c 'sleep {mark}; true'", *command]) == 5
    assert "did not begin within 0.3 s" in capsys.readouterr().err
    until(lambda: not alive(mark), "the client's end")


@pytest.mark.parametrize("command", [["status"], ["bench", "--url", "http://127.0.0.1:9"]])
def test_noise_before_the_beginning_has_an_end(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    mark = f"{os.getpid()}.5"
    assert cli.main(["--on", f"sh -c 'yes {mark}'", *command]) == 5
    assert "printed 1 MiB and did not begin" in capsys.readouterr().err
    until(lambda: not alive(mark), "the client's end")


def kept(pid: int) -> list[int]:
    """The keepers that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"keeper.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


# A test run in the background may have these ignored, and what it starts too.
AS_EVER = (
    "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from specmeter.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_takes_the_client_along(number: int) -> None:
    mark = f"{os.getpid()}.{number}"
    words = [sys.executable, "-c", AS_EVER, "--on", f"sh -c 'sleep {mark}; true'", "status"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as child:
        try:
            until(lambda: alive(mark), "the client")
            os.kill(child.pid, number)
            assert child.wait(60) == 130
            until(lambda: not alive(mark), "the client's end")
        finally:
            child.kill()
            for pid in alive(mark):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("command", ["status", "bench --url http://127.0.0.1:9"])
def test_a_client_that_never_reads_does_not_outlive_a_kill(command: str) -> None:
    mark = f"{os.getpid()}.{len(command)}"
    soon = "from specmeter.hosts import client; client.ORPHAN_S = 0.3; " + AS_EVER
    words = [sys.executable, "-c", soon, "--on", f"sh -c 'sleep {mark}; true'", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            until(lambda: alive(mark) and kept(child.pid), "the client and its keeper")
            keepers = kept(child.pid)
            child.kill()
            child.wait(60)
            until(lambda: not alive(mark), "the client's end")
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in keepers), "the keeper's end")
        finally:
            child.kill()
            for pid in alive(mark):
                os.kill(pid, signal.SIGKILL)


def test_a_client_that_ends_takes_its_keeper_along(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--on", "sh -c 'exit 7'", "status"]) == 5
    assert kept(os.getpid()) == []


def test_no_word_of_an_error_commands_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise SpecmeterError(HOSTILE, HOSTILE + "\nsecond", HOSTILE, Exit.SERVER_FAILED)

    monkeypatch.setattr(cli, "run_on_hosts", fail)
    assert cli.main(["--on", "env", "status"]) == 4
    said = capsys.readouterr().err
    assert said == inert_lines(said) and "\x1b" not in said and "\u202e" not in said
    assert said.splitlines()[2] == "second" and said.endswith("\n") and len(said.splitlines()) == 4


def test_what_a_far_program_writes_to_standard_error_is_inert(capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.write(write, f"noise\n\0specmeter t start\n\x1b[31mred\x1b[0m {HOSTILE}\n".encode())
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        errors = session.Errors(stream, "t")
        errors.join(60)
    assert capsys.readouterr().err == "red a?[2J?]0;x?b?31m?c\nd\n"


@pytest.mark.parametrize("rest, code", [(b"end 3\n", 3), (b"end x\n", None), (b"end " + b"9" * 5000 + b"\n", None)])
def test_an_exit_code_is_one(rest: bytes, code: int | None) -> None:
    assert session._code(rest) == code


@pytest.mark.parametrize(
    "text, proposed",
    [
        ("ssh://root@127.0.0.1:47922", "`ssh -l root -p 47922 127.0.0.1`"),
        ("ssh://far", "`ssh far`"),
        ("ssh -p 22 far", "`ssh -p 22 far`"),
    ],
)
def test_the_proposed_login_is_the_one_that_failed(text: str, proposed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    error = session.unreachable(parse_host(text), "python3", 255, ["Host key verification failed."])
    assert proposed in error.next_step


def test_an_error_from_there_names_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["--on", "env XDG_RUNTIME_DIR=", "--far-python", sys.executable, "disarm", "--link", "no such"])
    said = capsys.readouterr().err
    assert code == 2 and "There is no link no such" in said and said.endswith("  on:   env XDG_RUNTIME_DIR=\n")
