"""SGLang: ``python -m sglang.launch_server`` or ``sglang serve``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from specmeter.engines.base import Capability, Counters, Setting
from specmeter.engines.embedded import STEPS, TOKENS, TOPK, sglang_style_setting
from specmeter.engines.flags import Command, flag_value, whole_number, with_flag, without_flags
from specmeter.engines.prometheus import Metrics
from specmeter.errors import SpecmeterError

_ADAPTIVE, _ADAPTIVE_CONFIG = "--speculative-adaptive", "--speculative-adaptive-config"
# Those of the speculative flags that have no value.
_SWITCHES = (
    _ADAPTIVE,
    "--speculative-use-rejection-sampling",
    "--speculative-use-block-verification",
    "--speculative-dspark-align-verify-tokens-to-graph-tier",
)
_RANKS = ("--tp", "--tp-size", "--tensor-parallel-size", "--pp", "--pp-size", "--pipeline-parallel-size")
# Batches before SGLang looks at its own average for the first time: never.
_WARMUP = 1 << 60


class SglangEngine:
    """SGLang's runtime and its HTTP server."""

    name = "sglang"

    def can(self, what: Capability) -> bool:
        """``switch``, where the version has the adaptive runtime (the recipe's knob says so)."""
        return what == "switch"

    def command_port(self, command: Command) -> int | None:
        """The value of ``--port``, if any; 0 asks for any port and states none."""
        port = whole_number(flag_value(command, "--port"))
        return port if port is not None and port > 0 else None

    def with_port(self, command: Command, port: int) -> Command:
        """Adds ``--port``; SGLang listens on loopback by default."""
        return with_flag(command, "--port", str(port))

    def with_setting(self, command: Command, setting: Setting) -> Command:
        """Sets the three flags; steps 0 removes every ``--speculative-*`` flag."""
        if setting.steps == 0:
            return without_flags(command, (), prefixes=("--speculative-",), switches=_SWITCHES)
        if flag_value(command, "--speculative-algorithm") is None:
            raise SpecmeterError(
                "The SGLang command has no --speculative-algorithm, so its step count cannot be changed.",
                next_step="Add --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD.",
            )
        plain = without_flags(command, (STEPS, TOPK, TOKENS))
        return (*plain, STEPS, str(setting.steps), TOPK, str(setting.topk), TOKENS, str(setting.draft_tokens))

    def switched(self, command: Command, settings: Sequence[Setting]) -> Command:
        """``--speculative-adaptive`` with every step count as a candidate, whose graphs SGLang builds at the start.

        ``AdaptiveStepSlot.current_steps`` (adaptive_spec_params.py) is what the worker asks for before each decode
        cycle (``activate_step_by_batch``); unturned it is the largest. SGLang's own moving average, which would change
        it, never leaves its warm-up. Writes SGLang's adaptive config into the cache folder.
        """
        steps = sorted({setting.steps for setting in settings})
        most = max(settings, key=lambda setting: setting.steps)
        if most.steps == 0:
            raise SpecmeterError("There is no step count to switch to.", "Plain decoding alone was asked for.")
        if any(setting.topk != 1 for setting in settings):
            raise SpecmeterError("SGLang's adaptive runtime drafts chains only: a tree cannot be switched to.")
        if any(flag_value(command, flag) not in (None, "1") for flag in _RANKS):
            raise SpecmeterError(
                "Each of SGLang's ranks keeps a step count of its own.",
                "All would have to change before one and the same cycle; that is not done yet.",
            )
        if flag_value(command, _ADAPTIVE_CONFIG) is not None:
            raise SpecmeterError(f"The command has a {_ADAPTIVE_CONFIG} of its own.", "Switching would take its place.")
        plain = without_flags(self.with_setting(command, most), (), switches=(_ADAPTIVE,))
        return (*plain, _ADAPTIVE, _ADAPTIVE_CONFIG, str(_write_candidates(steps)))

    def setting_of(self, command: Command) -> Setting | None:
        """What the flags say; steps 0 without an algorithm; None if SGLang chooses by itself."""
        if flag_value(command, "--speculative-algorithm") is None:
            return Setting.of(0)
        return sglang_style_setting(command)

    def request_body(self, setting: Setting) -> dict[str, object]:
        """Empty: SGLang takes no speculative setting with a request."""
        return {}

    def counters(self, metrics: str, info: Mapping[str, object]) -> Counters:
        """From ``sglang:*`` metrics (``--enable-metrics``), else the gauge of the info document.

        The three counters rise together as a request finishes (metrics_collector.py, ``observe_one_finished_request``);
        ``spec_verify_calls`` is there from 0.5.16 on.
        """
        scrape = Metrics(metrics)
        length = scrape.mean("sglang:spec_accept_length")
        states = info.get("internal_states")
        if length is None and isinstance(states, list) and states and isinstance(states[0], dict):
            found = states[0].get("avg_spec_accept_length")
            length = float(found) if isinstance(found, int | float) and 0 <= found < 1e6 else None
        return Counters(
            cycles=scrape.total("sglang:spec_verify_calls"),
            generated=scrape.total("sglang:generation_tokens"),
            accept_length=length,
            finished=scrape.total("sglang:num_requests"),
        )

    def info_path(self) -> str | None:
        """The old name, which every release answers to."""
        return "/get_server_info"

    def default_start_timeout_s(self) -> float:
        """Fifteen minutes: loading and graph capture of a large model take long."""
        return 900.0


def _write_candidates(steps: Sequence[int]) -> Path:
    """SGLang's adaptive config with one slot for all batch sizes; same candidates, same file. Raises SpecmeterError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specmeter"
    path = cache / f"sglang-adaptive-{'-'.join(map(str, steps))}.json"
    document = json.dumps({"1": {"candidate_steps": list(steps), "warmup_batches": _WARMUP}})
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.touch(mode=0o600)
        new.write_text(document)
        new.replace(path)
    except OSError as error:
        raise SpecmeterError(
            f"SGLang's adaptive config {path} cannot be written.", f"{error.strerror}.",
            "Set XDG_CACHE_HOME to a folder that you can write to.",
        ) from error  # fmt: skip
    return path
