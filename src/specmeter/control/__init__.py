"""The controller's side of a link: make one, launch a server with it, arm and disarm its processes.

``make_link`` -> ``launch_env`` -> start the server -> ``arm`` / ``disarm`` / ``mix`` / ``detach`` -> ``remove_link``.
"""

from specmeter.control.launch import interpreter_of, launch, launch_env, why_not_up
from specmeter.control.link import Link, find_link, make_link, open_link, remove_link
from specmeter.control.processes import (
    Ack,
    Process,
    arm,
    beat,
    detach,
    disarm,
    knob_states,
    mix,
    processes,
    turn,
    wait_for_processes,
)
from specmeter.control.sampling import Sampling

__all__ = [
    "Ack",
    "Link",
    "Process",
    "Sampling",
    "arm",
    "beat",
    "detach",
    "disarm",
    "find_link",
    "interpreter_of",
    "knob_states",
    "launch",
    "launch_env",
    "make_link",
    "mix",
    "open_link",
    "processes",
    "remove_link",
    "turn",
    "wait_for_processes",
    "why_not_up",
]
