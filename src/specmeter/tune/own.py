"""The starting point: the setting that the user's command runs, said by it, by its engine's source, or left open."""

from __future__ import annotations

import re
from collections.abc import Mapping

from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.engines.embedded import STEPS, TOKENS, TOPK
from specmeter.engines.flags import flag_value, whole_number, without_flags
from specmeter.errors import SpecmeterError
from specmeter.tune.flags import EngineFlags
from specmeter.tune.space import AS_GIVEN, Candidate, adapts

EMBEDDED_STEPS = 2
"""``specmeter serve`` without ``--speculative-num-steps`` (commands/serve.py, DEFAULT_STEPS)."""
_NAMES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
# As vLLM prints its SpeculativeConfig.
_VLLM = re.compile(r"num_spec(?:ulative)?_tok(?:en)?s=(\d{1,4})\b")


def starting_point(spec: ServerSpec, flags: EngineFlags) -> Candidate:
    """The setting that the command has, with no knob touched.

    Where the command leaves the steps to SGLang it is what this release chooses for the model (read from its source);
    where that is not known, or the engine changes its steps by itself, it is the command as it stands.
    Raises SpecmeterError for numbers that no server runs.
    """
    if adapts(spec):
        return Candidate(AS_GIVEN, own=True)
    setting = stated(spec)
    if setting is None and flags.own_choice is not None and not _stated_in_part(spec):
        setting = Setting.of(*flags.own_choice)
    return Candidate(setting) if setting is not None else Candidate(AS_GIVEN, own=True)


def _stated_in_part(spec: ServerSpec) -> bool:
    return any(flag_value(spec.command, name) is not None for name in (STEPS, TOPK, TOKENS))


def stated(spec: ServerSpec) -> Setting | None:
    """The setting that the command of ``spec`` says, or None if it leaves the choice to the engine.

    Raises SpecmeterError for numbers that no server runs.
    """
    command = spec.command
    if spec.engine == "sglang" and flag_value(command, TOPK) == "1" and flag_value(command, STEPS) is not None:
        # SGLang itself adjusts a chain's draft tokens to steps + 1 (top-k 1), with a warning.
        command = without_flags(command, (TOKENS,))
    try:
        found = engine_named(spec.engine or "").setting_of(command)
    except SpecmeterError as error:
        raise SpecmeterError(
            "The command's speculative flags are no setting to start from.",
            f"{error.what} {error.why}".strip(),
            f"Correct them, or leave {STEPS}, {TOPK} and {TOKENS} out: the engine then chooses.",
        ) from None
    if found is None and spec.engine == "embedded" and flag_value(command, STEPS) is None:
        return Setting.of(0 if flag_value(command, "--draft") == "none" else EMBEDDED_STEPS)
    return found


def told(arguments: Mapping[str, str]) -> str:
    """The setting in what a server made of its arguments (bench.resolved), as a label; empty if it is not told."""
    steps, topk, tokens = (whole_number(arguments.get(name)) for name in _NAMES)
    if steps is None:
        found = _VLLM.search(arguments.get("speculative_config", ""))
        return Setting.of(int(found.group(1))).label if found else ""
    try:
        branches = topk if topk is not None else 1
        return Setting.of(steps, branches, tokens if branches > 1 else None).label
    except SpecmeterError:
        return ""


def needs_speculation(spec: ServerSpec) -> None:
    """Raise SpecmeterError, before anything starts, where no draft steps can be set on the command."""
    if spec.engine == "embedded" and flag_value(spec.command, "--draft") == "none":
        raise SpecmeterError(
            "The command has no draft head.", "--draft none serves plainly.", "Name one, or leave it out."
        )
    engine_named(spec.engine or "").with_setting(spec.command, Setting.of(1))
