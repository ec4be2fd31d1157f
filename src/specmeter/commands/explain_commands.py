"""The command lines that ``specmeter explain`` ends with: what to type to try an action on the server at hand."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from specmeter.commands.serve import packaged_head
from specmeter.eagle.model_store import model_directory
from specmeter.engines import ENGINE_NAMES, Setting, engine_named
from specmeter.engines.flags import flag_value
from specmeter.engines.vllm import speculative_config
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import Run

PLACE = "YOUR-SERVER-COMMAND"


@dataclass(frozen=True)
class ServerCommands:
    """Command lines for one server: ``engine`` by its name in ``specmeter.engines``, ``words`` its command if known."""

    engine: str
    words: tuple[str, ...] = ()

    @property
    def own(self) -> bool:
        """The embedded engine, started by specmeter itself."""
        return self.engine == "embedded" and not self.words

    def setting(self, steps: int, topk: int, width: int) -> str:
        """Measure with another setting; steps 0 is no speculation."""
        if self.own:
            if steps == 0:
                return "specmeter sweep --steps 1"
            tree = ["--topk", str(topk), "--draft-tokens", str(width)] if topk > 1 else []
            return shlex.join(["specmeter", "profile", "--steps", str(steps), *tree])
        setting = Setting.of(steps, topk, width if topk > 1 else None)
        if self.words and self.engine in ENGINE_NAMES:
            try:
                words = engine_named(self.engine).with_setting(self.words, setting)
            except SpecmeterError:
                pass
            else:
                # Without speculative flags there is no cycle to profile: the load alone tells its speed.
                return shlex.join(["specmeter", "profile" if steps else "bench", "--", *words])
        if self.engine == "vllm":
            return f"specmeter profile -- {PLACE} --speculative-config '{{..., \"num_speculative_tokens\": {steps}}}'"
        flags = [
            "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
            "--speculative-num-draft-tokens", str(width),
        ]  # fmt: skip
        return " ".join(["specmeter", "profile", "--", PLACE, *flags])

    def verify(self) -> str:
        """Another attention backend, or other threads on a CPU."""
        if self.own:
            return "specmeter profile --threads 1"
        return self._with({"sglang": ["--attention-backend", "fa3"], "vllm": ["--attention-backend", "FLASH_ATTN"]})

    def vocabulary(self) -> str:
        """A head with a smaller vocabulary; vLLM takes what the head's checkpoint has."""
        if self.own:
            return "specmeter train --out small-vocabulary --draft-vocab 4800"
        return "" if self.engine != "sglang" else self._with({"sglang": ["--speculative-token-map", "TOKENS-FILE"]})

    def collectives(self) -> str:
        """Another algorithm of NCCL's, by its variable."""
        return "" if self.own else f"NCCL_ALGO=Tree {self._with({})}"

    def host(self) -> str:
        """Scheduling beside the device's work; the embedded engine has nothing to overlap, SGLang does it by itself."""
        return "" if self.engine != "vllm" else self._with({"vllm": ["--async-scheduling"]})

    def wiring(self) -> str:
        """What the head is fed against what it was trained on."""
        target, draft = self._models()
        engine = {"embedded": "specmeter"}.get(self.engine, self.engine)
        known = ["--engine", engine] if engine in ("specmeter", "vllm", "sglang") else []
        return shlex.join(
            [
                "specmeter",
                "check",
                "--target",
                target or "TARGET-DIR",
                "--draft",
                draft or "DRAFT-DIR",
                *known,
                "--probe",
            ]
        )

    def _models(self) -> tuple[str | None, str | None]:
        """Target and draft as the server's command names them, or the embedded engine's own; None where not known."""
        if self.own:
            return str(model_directory()), str(packaged_head() or "") or None
        if self.engine == "vllm":
            after = self.words.index("serve") + 1 if "serve" in self.words else len(self.words)
            named = self.words[after] if after < len(self.words) and not self.words[after].startswith("-") else None
            with contextlib.suppress(SpecmeterError):
                draft = (speculative_config(self.words) or {}).get("model")
                return flag_value(self.words, "--model") or named, str(draft) if draft else None
        if self.engine == "sglang":
            target = flag_value(self.words, "--model-path", "--model")
            return target, flag_value(self.words, "--speculative-draft-model-path")
        return None, None

    def _with(self, flags: dict[str, list[str]]) -> str:
        words: Sequence[str] = self.words or (PLACE,)
        return shlex.join(["specmeter", "profile", "--", *words, *flags.get(self.engine, [])])


def commands_for(run: Run) -> ServerCommands:
    """From a saved run: its engine, and the server's command after ``--`` if the run was started with one."""
    engine = str((run.analysis.get("engine") or {}).get("name") or run.plan.get("engine") or "")
    typed = [str(word) for word in run.run.get("command") or []]
    words = typed[typed.index("--") + 1 :] if "--" in typed else []
    return ServerCommands("embedded" if engine == "specmeter" else engine, tuple(words))
