"""vLLM: ``vllm serve`` or ``python -m vllm.entrypoints.openai.api_server``. The start fixes the most steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from specmeter.engines.base import Capability, Counters, Setting
from specmeter.engines.flags import Command, flag_value, whole_number, with_flag, without_flags
from specmeter.engines.prometheus import Metrics
from specmeter.errors import SpecmeterError

SPECULATIVE = ("--speculative-config", "-sc")
# What vLLM reads at each schedule from 0.24 on: [[first batch size, last, draft tokens], ...]
TABLE = "num_speculative_tokens_per_batch_size"
_ANY_BATCH = 1 << 20


class VllmEngine:
    """vLLM's V1 engine and its OpenAI server."""

    name = "vllm"

    def can(self, what: Capability) -> bool:
        """``switch``, where the version has the table by batch size (the recipe's knob says so)."""
        return what == "switch"

    def command_port(self, command: Command) -> int | None:
        """The value of ``--port``, if any; 0 asks for any port and states none."""
        port = whole_number(flag_value(command, "--port"))
        return port if port is not None and port > 0 else None

    def with_port(self, command: Command, port: int) -> Command:
        """Adds ``--port``, and ``--host`` if the command has none: vLLM listens on every interface by default."""
        hosted = command if flag_value(command, "--host") is not None else with_flag(command, "--host", "127.0.0.1")
        return with_flag(hosted, "--port", str(port))

    def with_setting(self, command: Command, setting: Setting) -> Command:
        """Replaces ``num_speculative_tokens`` in ``--speculative-config``; steps 0 removes the flag.

        Raises SpecmeterError for a tree, which vLLM does not draft from these settings, or without a config to change.
        """
        plain = without_speculative_config(command)
        if setting.steps == 0:
            return plain
        if setting.topk != 1:
            raise SpecmeterError(f"vLLM drafts chains only; top-k {setting.topk} cannot be set.")
        config = speculative_config(command)
        if config is None:
            raise SpecmeterError(
                "The vLLM command has no --speculative-config, so its step count cannot be changed.",
                next_step="Add --speculative-config with method, model and num_speculative_tokens, as JSON.",
            )
        config["num_speculative_tokens"] = setting.steps
        return (*plain, "--speculative-config", json.dumps(config))

    def switched(self, command: Command, settings: Sequence[Setting]) -> Command:
        """The largest step count, and a table by batch size that names all of them, which opens the table to a knob.

        Unturned it gives one request the largest. Each number is named because vLLM captures graphs (runner V2) for
        those that it finds there; under runner V1 a table turns full CUDA graphs into piecewise ones, by vLLM itself.
        """
        most = max(settings, key=lambda setting: setting.steps)
        if most.steps == 0:
            raise SpecmeterError("There is no step count to switch to.", "Plain decoding alone was asked for.")
        if any(setting.topk != 1 for setting in settings):
            raise SpecmeterError("vLLM drafts chains only: a tree cannot be switched to.")
        config = speculative_config(command)
        if config is not None and TABLE in config:
            raise SpecmeterError(f"The command has a {TABLE} of its own.", "Switching would take its place.")
        own = speculative_config(self.with_setting(command, most)) or {}
        steps = sorted({setting.steps for setting in settings}, reverse=True)
        rows = [[batch, batch, k] for batch, k in enumerate(steps, 1)]
        rows[-1][1] = _ANY_BATCH
        return (*without_speculative_config(command), "--speculative-config", json.dumps({**own, TABLE: rows}))

    def setting_of(self, command: Command) -> Setting | None:
        """Steps from ``num_speculative_tokens``; steps 0 without ``--speculative-config``."""
        config = speculative_config(command)
        if config is None:
            return Setting.of(0)
        steps = config.get("num_speculative_tokens")
        return Setting.of(steps) if isinstance(steps, int) else None

    def request_body(self, setting: Setting) -> dict[str, object]:
        """Empty: vLLM takes no speculative setting with a request."""
        return {}

    def counters(self, metrics: str, info: Mapping[str, object]) -> Counters:
        """From ``vllm:spec_decode_*`` (v1/spec_decode/metrics.py of vLLM)."""
        scrape = Metrics(metrics)
        return Counters(
            cycles=scrape.total("vllm:spec_decode_num_drafts"),
            drafted=scrape.total("vllm:spec_decode_num_draft_tokens"),
            accepted=scrape.total("vllm:spec_decode_num_accepted_tokens"),
            generated=scrape.total("vllm:generation_tokens"),
            per_position=scrape.by_position("vllm:spec_decode_num_accepted_tokens_per_pos"),
        )

    def info_path(self) -> str | None:
        """``/server_info`` exists in development mode only, so it is not relied on."""
        return None

    def default_start_timeout_s(self) -> float:
        """Fifteen minutes: compilation and graph capture of a large model take long."""
        return 900.0


def speculative_config(command: Command) -> dict[str, object] | None:
    """The JSON of ``--speculative-config`` with ``--speculative-config.KEY`` flags merged in, or None without any."""
    text = flag_value(command, *SPECULATIVE)
    config: dict[str, object] = {}
    if text is not None:
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise SpecmeterError("--speculative-config is not valid JSON.", str(error)) from None
        if not isinstance(parsed, dict):
            raise SpecmeterError("--speculative-config must be a JSON object.")
        config.update(parsed)
    for word in command:
        name = word.partition("=")[0]
        if name.startswith("--speculative-config."):
            value = flag_value(command, name) or ""
            try:
                config[name.partition(".")[2]] = json.loads(value)
            except ValueError:
                config[name.partition(".")[2]] = value
    return config or None


def without_speculative_config(command: Command) -> Command:
    """The same command without speculation."""
    return without_flags(command, SPECULATIVE, prefixes=("--speculative-config.", "--spec-"))
