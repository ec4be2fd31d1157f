"""Secrets of a server's command line and environment stay out of its saved log and of the causes that are printed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from specmeter.cli import main
from specmeter.engines.process import ServerProcess
from specmeter.trace.masking import mask_file, mask_text, secrets_of

KEY = "sk-SECRETkey999"
ECHO = """
import os, sys
print("key", sys.argv[-1])
print("x" * 195 + os.environ["MY_TOKEN"])
sys.exit("bad " + sys.argv[-1])
"""


def test_secrets_are_the_values_and_not_the_names() -> None:
    command = ["vllm", "serve", "m", "--api-key", "short-key", "--hf-overrides", "{}", "--token=abcd", f"x={KEY}"]
    command += [
        "http://me:pa55word@host/",
        "https://lonetoken@host",
        "http://root@host",
        "http://u:pw@host",
        "--header",
        "Authorization: Bearer abc.def",
        "--key",
        "k",
    ]
    env = {"HF_TOKEN": "hf-value-1", "DEBUG_KEY": "1", "HOME": "/root", "URL": "http://u:secretpw@h"}
    found = secrets_of(command, env)
    assert set(found) == {"short-key", "abcd", KEY, "pa55word", "lonetoken", "abc.def", "hf-value-1", "secretpw"}
    assert [len(value) for value in found] == sorted(map(len, found), reverse=True)
    assert mask_text("a short-key b abcd", found) == "a *** b ***"


def test_the_log_and_the_cause_hold_no_secret(tmp_path: Path) -> None:
    log, env = tmp_path / "server.log", {**os.environ, "MY_TOKEN": "tokenvalue-77"}
    process = ServerProcess([sys.executable, "-c", ECHO, "--api-key", KEY], env, log)
    while process.poll() is None:
        pass
    before = str(process.failure("It ended."))
    process.stop()
    after, text = str(process.failure("It ended.")), log.read_text()
    for shown in (before, after, text):
        assert "SECRET" not in shown and "token" not in shown and "bad " in shown
    assert f"bad {'*' * len(KEY)}" in text and log.stat().st_mode & 0o777 == 0o600


def test_a_profile_that_fails_leaves_no_key_in_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = [sys.executable, "-m", "specmeter", "serve", "--api-key", KEY]
    assert main(["profile", "--out", str(tmp_path / "run"), "--", *server]) == 4
    shown = capsys.readouterr()
    assert "unknown arguments: --api-key ***" in shown.err and "SECRET" not in shown.out + shown.err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) >= 2 and not any(b"SECRET" in path.read_bytes() for path in files)


def test_a_missing_or_empty_log_is_left_alone(tmp_path: Path) -> None:
    mask_file(tmp_path / "none", ["abc"])
    (tmp_path / "empty").touch()
    mask_file(tmp_path / "empty", ["abc"])
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
