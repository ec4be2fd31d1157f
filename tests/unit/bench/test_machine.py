"""Other work on this machine is seen."""

from __future__ import annotations

import subprocess
import sys

from specmeter.bench.machine import BUSY_CORES, busy_cores, busy_note, busy_warning


def test_a_busy_process_is_seen_and_said() -> None:
    spinner = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        assert spinner.stdout is not None
        spinner.stdout.readline()
        busy = busy_cores()
        assert busy is not None and busy > BUSY_CORES
        said = busy_warning() or ""
        assert "busy" in said and "cores of this machine" in said
    finally:
        spinner.kill()
        spinner.wait()
        spinner.stdout.close()


def test_fewer_threads_are_proposed_only_where_nobody_chose_them() -> None:
    assert "demo --threads 1" in busy_note("busy", "embedded", ["specmeter", "serve"])
    assert busy_note("busy", "embedded", ["specmeter", "serve", "--threads", "1"]) == "note: busy"
    assert busy_note("busy", "vllm", ["vllm", "serve", "M"]) == "note: busy"
