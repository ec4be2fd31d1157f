"""Other work on this machine is seen."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

import pytest

from specmeter.bench.client import Call, Outcome
from specmeter.bench.machine import BUSY_CORES, busy_cores, busy_note, busy_warning
from specmeter.bench.sweeping import LEAST_DEALS, paced
from specmeter.commands import demo


def test_a_busy_process_is_seen_and_said() -> None:
    spinner = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    assert spinner.stdout is not None
    try:
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


@pytest.mark.parametrize(
    ("given", "busy", "threads", "requests"),
    [([], 2.0, 1, 3), ([], 0.9, 1, 6), ([], 0.1, None, 6), ([], None, None, 6), (["--threads", "2"], 2.0, 2, 3),
     (["--requests", "9"], 2.0, 1, 9), (["--url", "http://127.0.0.1:1"], 2.0, None, 6)],
)  # fmt: skip
def test_the_demo_takes_the_cores_that_are_free(
    given: list[str], busy: float | None, threads: int | None, requests: int
) -> None:
    parser = argparse.ArgumentParser()
    demo.prepare_parser(parser)
    args = parser.parse_args(given)
    said = demo.make_room(args, busy, 2)
    assert (args.threads, args.requests) == (threads, requests)
    changed = parser.parse_args(given) != args
    assert bool(said) == changed and all("cores busy" in line for line in said)


@pytest.mark.parametrize(("each_s", "passes"), [(40.0, 3), (10.0, 12), (500.0, LEAST_DEALS)])
def test_a_sweep_keeps_to_its_time(each_s: float, passes: int) -> None:
    clock = [0.0]

    def send(calls: Sequence[Call]) -> Sequence[Outcome]:
        clock[0] += each_s
        return []

    assert paced(send, [[]] * 12, 150.0, lambda: clock[0])[1] == passes
    assert paced(send, [[]] * 12, None, lambda: clock[0])[1] == 12
