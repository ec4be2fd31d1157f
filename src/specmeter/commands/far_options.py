"""Where a command's servers are: this machine, or the hosts of ``--on``, which ``cli`` puts into the arguments."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specmeter.bench.place import HERE, Place
from specmeter.control import find_link
from specmeter.engines import ServerSpec
from specmeter.errors import SpecmeterError
from specmeter.live.watch import Links, LinksHere
from specmeter.tune.flags import EngineFlags, engine_flags

if TYPE_CHECKING:
    from specmeter.hosts.place import There


@contextlib.contextmanager
def place_of(args: argparse.Namespace, several: bool = False) -> Iterator[Place]:
    """The place that ``--on`` names; its session ends with the block. Raises SpecmeterError (exit 5).

    ``several``: more than one host may be named, for a server that spans them.
    """
    hosts = list(getattr(args, "on", None) or ())
    if len(hosts) > 1 and not several:
        raise SpecmeterError(
            f"--on is given {len(hosts)} times, and `specmeter {args.command}` is at work on one host.",
            next_step="`specmeter profile` joins the hosts of a server that spans them.",
        )
    with _sessions(args) as places:
        if len(places) > 1:
            from specmeter.hosts.joined import Joined

            yield Joined(places)
        else:
            yield places[0] if places else HERE


@contextlib.contextmanager
def links_of(args: argparse.Namespace) -> Iterator[Links]:
    """The links that ``--on`` and ``--link`` name, for live views."""
    with _sessions(args) as places:
        if not places:
            yield LinksHere(find_link(args.link) if args.link else None)
            return
        from specmeter.hosts.live_links import FarLinks

        yield FarLinks(places, args.link)


@contextlib.contextmanager
def _sessions(args: argparse.Namespace) -> Iterator[list[There]]:
    """A session with each host of ``--on``, ended with the block."""
    names = list(getattr(args, "on", None) or ())
    places: list[There] = []
    if not names:
        yield places
        return
    from specmeter.hosts.address import parse
    from specmeter.hosts.client import signals_end_it
    from specmeter.hosts.place import There
    from specmeter.hosts.relay import Relay

    hosts = [parse(name) for name in names]
    with signals_end_it():
        try:
            for host in hosts:
                places.append(There(Relay(host, args.far_python)))
            yield places
        finally:
            for place in places:
                place.close()


def flags_at(place: Place, spec: ServerSpec) -> EngineFlags:
    """The flags of the engine that ``spec`` starts, as installed at that place. Raises SpecmeterError."""
    if place is HERE:
        return engine_flags(spec)
    from specmeter.hosts.place import There

    assert isinstance(place, There)
    return place.engine_flags(spec)
