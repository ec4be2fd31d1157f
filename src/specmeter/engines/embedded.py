"""The embedded engine, ``specmeter serve``: settings travel with each request, no speculation included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specmeter.engines.base import Capability, Counters, Setting
from specmeter.engines.flags import Command, flag_value, whole_number, with_flag, without_flags
from specmeter.engines.prometheus import Metrics
from specmeter.errors import SpecmeterError

STEPS, TOPK, TOKENS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"


class EmbeddedEngine:
    """specmeter's own EAGLE-3 engine."""

    name = "embedded"

    def can(self, what: Capability) -> bool:
        """Takes settings per request, steps 0 included; nothing is switched for all requests at once."""
        return what in ("per_request", "no_spec")

    def command_port(self, command: Command) -> int | None:
        """The value of ``--port``, if any; 0 asks for any port and states none."""
        port = whole_number(flag_value(command, "--port"))
        return port if port is not None and port > 0 else None

    def with_port(self, command: Command, port: int) -> Command:
        """Adds ``--port``."""
        return with_flag(command, "--port", str(port))

    def with_setting(self, command: Command, setting: Setting) -> Command:
        """Sets the three flags; steps 0 serves plainly."""
        plain = without_flags(command, (STEPS, TOPK, TOKENS))
        if setting.steps == 0:
            return (*plain, STEPS, "0")
        return (*plain, STEPS, str(setting.steps), TOPK, str(setting.topk), TOKENS, str(setting.draft_tokens))

    def switched(self, command: Command, settings: Sequence[Setting]) -> Command:
        """Never: each request has its own setting, which is better."""
        raise SpecmeterError("The embedded engine takes its settings with each request; nothing is switched.")

    def setting_of(self, command: Command) -> Setting | None:
        """What the three flags say, or None if the steps are left to the default."""
        return sglang_style_setting(command)

    def request_body(self, setting: Setting) -> dict[str, object]:
        """The three fields under SGLang's names."""
        if setting.steps == 0:
            return {"speculative_num_steps": 0}
        return {
            "speculative_num_steps": setting.steps,
            "speculative_eagle_topk": setting.topk,
            "speculative_num_draft_tokens": setting.draft_tokens,
        }

    def counters(self, metrics: str, info: Mapping[str, object]) -> Counters:
        """From the server's ``specmeter_`` metrics."""
        scrape = Metrics(metrics)
        return Counters(
            cycles=scrape.total("specmeter_drafts"),
            drafted=scrape.total("specmeter_draft_tokens"),
            accepted=scrape.total("specmeter_accepted_tokens"),
            generated=scrape.total("specmeter_generated_tokens"),
            per_position=scrape.by_position("specmeter_accepted_per_position"),
        )

    def info_path(self) -> str | None:
        """No such document yet."""
        return None

    def default_start_timeout_s(self) -> float:
        """Two minutes: the model is loaded in seconds once it is fetched."""
        return 120.0


def sglang_style_setting(command: Command) -> Setting | None:
    """The setting in the flags that SGLang and the embedded engine share, or None if the steps are not stated."""
    words = [flag_value(command, flag) for flag in (STEPS, TOPK, TOKENS)]
    steps, topk, tokens = numbers = [whole_number(word) for word in words]
    if words[0] is None or any(w is not None and n is None for w, n in zip(words, numbers, strict=True)):
        return None
    return Setting.of(steps or 0, 1 if topk is None else topk, tokens)
