"""What ``--on`` may name, and what the words of a command line mean."""

from __future__ import annotations

import io
import shlex
import shutil
import zipfile

import pytest

from specmeter.errors import SpecmeterError
from specmeter.hosts.address import parse
from specmeter.hosts.bundle import COMMANDS, bundle
from specmeter.hosts.dispatch import take_hosts

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")


@needs_ssh
@pytest.mark.parametrize(
    "text, tail",
    [
        ("ssh://box", ["--", "box"]),
        ("ssh://me@box", ["-l", "me", "--", "box"]),
        ("ssh://me@box.example:2222/", ["-l", "me", "-p", "2222", "--", "box.example"]),
        ("ssh://[fe80::1%eth0]:22", ["-p", "22", "--", "fe80::1%eth0"]),
    ],
)
def test_ssh_addresses(text: str, tail: list[str]) -> None:
    host = parse(text)
    assert list(host.prefix[-len(tail) :]) == tail
    assert "-oBatchMode=yes" in host.prefix, "it must never ask"


@needs_ssh
def test_words_over_ssh_are_one_quoted_string_and_others_stay_words() -> None:
    words = ["python3", "-c", "print('a b'); \n$(x)"]
    for text in ("ssh://box", "ssh -J jump box"):
        command = parse(text).command(words)
        assert shlex.split(command[-1]) == words
    assert parse("env A=1").command(words) == ["env", "A=1", *words]
    assert parse("env 'A=1 2'").prefix == ("env", "A=1 2")


@pytest.mark.parametrize("text", ["", "  ", "http://box", "'unclosed", "no-such-program-anywhere x"])
def test_what_names_no_host(text: str) -> None:
    with pytest.raises(SpecmeterError):
        parse(text)


def test_the_words_after_the_two_dashes_are_the_servers() -> None:
    line = ["--on", "a b", "run", "--on=c", "--link", "x", "--far-python", "/p", "--", "serve", "--on", "d"]
    assert take_hosts(line) == (["a b", "c"], "/p", ["run", "--link", "x", "--", "serve", "--on", "d"])
    assert take_hosts(["status"]) == ([], "python3", ["status"])
    with pytest.raises(SpecmeterError, match="--on needs a value"):
        take_hosts(["status", "--on"])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_bundle_is_small_and_holds_the_command(command: str) -> None:
    data = bundle(command)
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    assert f"specmeter/commands/{command}.py" in names and "specmeter/recipes/vllm.toml" in names
    assert "tomli/__init__.py" in names and not [name for name in names if "eagle" in name]
    assert len(data) < 330_000
