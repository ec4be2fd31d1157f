"""SGLang: ``python -m sglang.launch_server`` or ``sglang serve``. Settings are fixed at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specmeter.engines.base import Capability, Counters, Setting
from specmeter.engines.embedded import STEPS, TOKENS, TOPK, sglang_style_setting
from specmeter.engines.flags import Command, flag_value, with_flag, without_flags
from specmeter.engines.prometheus import Metrics
from specmeter.errors import SpecmeterError


class SglangEngine:
    """SGLang's runtime and its HTTP server."""

    name = "sglang"

    def can(self, what: Capability) -> bool:
        """Nothing: see ``switched``."""
        return False

    def command_port(self, command: Command) -> int | None:
        """The value of ``--port``, if any."""
        value = flag_value(command, "--port")
        return int(value) if value is not None and value.isdigit() else None

    def with_port(self, command: Command, port: int) -> Command:
        """Adds ``--port``; SGLang listens on loopback by default."""
        return with_flag(command, "--port", str(port))

    def with_setting(self, command: Command, setting: Setting) -> Command:
        """Sets the three flags; steps 0 removes every ``--speculative-*`` flag."""
        if setting.steps == 0:
            return without_flags(command, (), prefixes=("--speculative-",))
        if flag_value(command, "--speculative-algorithm") is None:
            raise SpecmeterError(
                "The SGLang command has no --speculative-algorithm, so its step count cannot be changed.",
                next_step="Add --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD.",
            )
        plain = without_flags(command, (STEPS, TOPK, TOKENS))
        return (*plain, STEPS, str(setting.steps), TOPK, str(setting.topk), TOKENS, str(setting.draft_tokens))

    def switched(self, command: Command, settings: Sequence[Setting]) -> Command:
        """Never yet. Since 0.5.11 ``--speculative-adaptive`` builds the graphs of every candidate step count.

        ``AdaptiveStepSlot.current_steps`` (adaptive_spec_params.py) is the number that each scheduler process reads
        before a cycle (``activate_step_by_batch``). It would have to be set in all ranks before one and the same cycle,
        to a candidate only (any other raises in the engine), with the engine's own moving average kept out by
        ``warmup_batches``. Read, never run: so it is not offered.
        """
        raise SpecmeterError(
            "SGLang's step count is not switched in a running server.",
            "Its adaptive runtime could, but no way to steer it has been tried on a real one.",
            "Each setting gets starts of its own.",
        )

    def setting_of(self, command: Command) -> Setting | None:
        """What the flags say; steps 0 without an algorithm; None if SGLang chooses by itself."""
        if flag_value(command, "--speculative-algorithm") is None:
            return Setting.of(0)
        return sglang_style_setting(command)

    def request_body(self, setting: Setting) -> dict[str, object]:
        """Empty: SGLang takes no speculative setting with a request."""
        return {}

    def counters(self, metrics: str, info: Mapping[str, object]) -> Counters:
        """From ``sglang:*`` metrics (``--enable-metrics``), else the gauge of the info document."""
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
        )

    def info_path(self) -> str | None:
        """The old name, which every release answers to."""
        return "/get_server_info"

    def default_start_timeout_s(self) -> float:
        """Fifteen minutes: loading and graph capture of a large model take long."""
        return 900.0
