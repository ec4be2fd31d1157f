"""A command's own lines, also where the report's library is not there, as on another host."""

from __future__ import annotations

from specmeter.reporters.inert import inert_lines


def show_lines(body: str) -> None:
    """Print them inert: as ``terminal.print_lines`` does, and whole where that cannot be imported."""
    try:
        from specmeter.reporters.terminal import print_lines
    except ModuleNotFoundError:
        print(inert_lines(body, most=1_000_000))
        return
    print_lines(body)
