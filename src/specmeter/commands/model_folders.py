"""Which target and draft a server runs, as far as its command or the options of a run tell."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from specmeter.commands.serve import packaged_head
from specmeter.eagle.model_store import model_directory
from specmeter.engines.flags import flag_value
from specmeter.engines.vllm import speculative_config
from specmeter.errors import SpecmeterError


def embedded_models(model: object = None, draft: object = None) -> tuple[str, str | None]:
    """Target and draft of the embedded engine with these options: its own where none is named; no draft for ``none``.

    The head that comes along fits the model that comes along, and no other.
    """
    head = draft or (packaged_head() if model is None else None)
    return str(model or model_directory()), None if head in (None, "none") else str(head)


def models_of(engine: str, words: Sequence[str]) -> tuple[str | None, str | None]:
    """Target and draft as a server's command names them; None where not known."""
    words = tuple(words)
    if engine == "embedded":
        return embedded_models(flag_value(words, "--model"), flag_value(words, "--draft"))
    if engine == "vllm":
        after = words.index("serve") + 1 if "serve" in words else len(words)
        named = words[after] if after < len(words) and not words[after].startswith("-") else None
        with contextlib.suppress(SpecmeterError):
            config = (speculative_config(words) or {}).get("model")
            return flag_value(words, "--model") or named, str(config) if config else None
    if engine == "sglang":
        target = flag_value(words, "--model-path", "--model")
        return target, flag_value(words, "--speculative-draft-model-path")
    return None, None
