"""What the trials of a journal belong to: another value of any of these makes them incomparable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from specmeter.bench.resolved import command_flags
from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.engines.flags import flag_value
from specmeter.engines.vllm import TABLE, speculative_config
from specmeter.trace.masking import mask_command, mask_env
from specmeter.tune.flags import program_of

if TYPE_CHECKING:
    from specmeter.tune.tuning import TunePlan

# What the search itself sets; everything else of these flags says which draft runs, and how.
_SEARCHED = (
    "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens", "speculative-config",
    "speculative-adaptive", "speculative-adaptive-config",
)  # fmt: skip
_ENGINES = ("NCCL_", "SGLANG_", "VLLM_")
_CONFIG_SEARCHED = ("num_speculative_tokens", TABLE)


def journal_facts(plan: TunePlan) -> dict[str, str]:
    """Name -> value of what a journal's trials belong to. Secrets are masked, so that a new key is no other work."""
    spec = plan.spec
    plain = engine_named(spec.engine or "").with_setting(spec.command, Setting.of(0))
    texts = json.dumps([prompt.as_messages() for prompt in plan.prompts])
    model = flag_value(spec.command, "--model", "--model-path")
    load = [hashlib.sha256(texts.encode()).hexdigest()[:16], plan.sending.max_tokens, plan.sending.temperature]
    return {
        "engine": spec.engine or "",
        "engine version": str(plan.flags.version),
        "model": model or " ".join(program_of(spec.command)[-1:]),
        "served model": plan.served_model or "",
        "command": json.dumps(mask_command(plain)),
        "draft": json.dumps(speculation(spec), sort_keys=True),
        "load": json.dumps([*load, plan.sending.seed, plan.blocks, plan.sending.ignore_eos]),
        "environment": json.dumps(mask_env({**plan.exported, **spec.env}), sort_keys=True),
        "host": plan.where,
        "starts": "one a setting" if plan.separate else "as the engine allows",
    }


def carried(exported: Mapping[str, str]) -> dict[str, str]:
    """Of the variables that a server inherits those that the files for use must name: other shells do not export them.

    What masking would change is a secret, and stays with the user's own shell.
    """
    masked = mask_env(exported)
    return {name: v for name, v in exported.items() if name.startswith(_ENGINES) and masked[name] == v}


def speculation(spec: ServerSpec) -> dict[str, str]:
    """The speculative words of a command without steps, top-k and draft tokens: algorithm, head, and all else.

    Empty for a command without speculation.
    """
    flags = {name.replace("_", "-"): value for name, value in command_flags(mask_command(spec.command)).items()}
    found = {
        name: value
        for name, value in flags.items()
        if name.startswith(("speculative-", "spec-")) and name.partition(".")[0] not in _SEARCHED
    }
    if spec.engine != "vllm":
        return found
    config = {k: v for k, v in (speculative_config(spec.command) or {}).items() if k not in _CONFIG_SEARCHED}
    texts = mask_env({k: v if isinstance(v, str) else json.dumps(v, sort_keys=True) for k, v in config.items()})
    return {**found, **{f"config.{name}": value for name, value in texts.items()}}
