"""Where a command's servers are: this machine, or the hosts of ``--on``, which ``cli`` puts into the arguments."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from specmeter.bench.place import HERE, Place
from specmeter.engines import ServerSpec
from specmeter.errors import SpecmeterError
from specmeter.tune.flags import EngineFlags, engine_flags


@contextlib.contextmanager
def place_of(args: argparse.Namespace) -> Iterator[Place]:
    """The place that ``--on`` names; its session ends with the block. Raises SpecmeterError (exit 5)."""
    hosts = list(getattr(args, "on", None) or ())
    if not hosts:
        yield HERE
        return
    from specmeter.hosts.address import parse
    from specmeter.hosts.place import There
    from specmeter.hosts.relay import Relay

    if len(hosts) > 1:
        raise SpecmeterError("More than one --on is not known to this command yet.")
    place = There(Relay(parse(hosts[0]), args.far_python))
    try:
        yield place
    finally:
        place.close()


def flags_at(place: Place, spec: ServerSpec) -> EngineFlags:
    """The flags of the engine that ``spec`` starts, as installed at that place. Raises SpecmeterError."""
    if place is HERE:
        return engine_flags(spec)
    from specmeter.hosts.place import There

    assert isinstance(place, There)
    return place.engine_flags(spec)
