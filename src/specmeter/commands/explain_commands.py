"""The command lines that ``specmeter explain`` ends with: the run's own setting again, with the one change to try."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specmeter.commands.attention_backends import FLAG
from specmeter.commands.model_folders import embedded_models, models_of
from specmeter.commands.recorded import Recorded, recorded
from specmeter.engines import ENGINE_NAMES, Setting, engine_named
from specmeter.engines.flags import flag_value, with_flag
from specmeter.engines.spec import read_server_file
from specmeter.errors import SpecmeterError
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.rundir import Run

PLACE = "YOUR-SERVER-COMMAND"
# What names a server other than by its command.
_NAMED = ("server", "url", "link")
_OF_EMBEDDED = ("model", "draft", "threads")


@dataclass(frozen=True)
class ServerCommands:
    """Command lines for one server: ``engine`` by its name in ``specmeter.engines``, ``words`` its command if known.

    ``run`` is the command line of the run, whose options every command here repeats; ``now`` the draft steps that run
    at present (None: as the server has them), ``cpus`` the processors of the run's machine, ``backends`` the attention
    backends that may be proposed.
    """

    engine: str
    words: tuple[str, ...] = ()
    run: Recorded = field(default_factory=Recorded)
    now: int | None = None
    cpus: int = 1
    backends: tuple[str, ...] = ()

    @property
    def own(self) -> bool:
        """The embedded engine, started by specmeter itself."""
        return self.engine == "embedded" and not self.words and not self._named

    def setting(self, steps: int, topk: int, width: int) -> str:
        """Measure with another setting; steps 0 is no speculation."""
        tree = {"topk": topk, "draft_tokens": width} if topk > 1 else {"topk": 1, "draft_tokens": None}
        if self.engine == "embedded":
            if steps == 0:
                changes = {"steps": str(self.now or 1), "topk": "1", "draft_tokens": ""}
                return self._typed("sweep", changes, self.words)
            return self._typed("profile", {"steps": steps, **tree}, self.words)
        if self.words:
            words = self._with_setting(Setting.of(steps, topk, width if topk > 1 else None))
            if words is not None:
                # Without speculative flags there is no cycle to profile: the load alone tells its speed.
                return self._typed("profile" if steps else "bench", self._plain(), words)
        elif self.run.options.get("server"):
            if steps == 0:
                return self._typed("compare", {})  # the server as it is and without speculation
            return self._typed("profile", {"steps": steps, **tree})
        if steps == 0:
            return self._typed("bench", self._plain(), (f"{PLACE}-WITHOUT-SPECULATION",))
        flags = [
            "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
            "--speculative-num-draft-tokens", str(width),
        ]  # fmt: skip
        if self.engine == "vllm":
            flags = ["--speculative-config", f'{{..., "num_speculative_tokens": {steps}}}']
        return self._typed("profile", self._plain(), (PLACE, *flags))

    def verify(self) -> str:
        """Another attention backend, or other threads on a CPU; empty where there is nothing to change."""
        if self.engine == "embedded":
            present = self.run.options.get("threads") if self.own else flag_value(self.words, "--threads")
            threads = 1 if str(present) != "1" else self.cpus
            if self._named or str(threads) == str(present):
                return ""
            if self.own:
                return self._typed("profile", {**self._at_present(), "threads": threads})
            return self._typed("profile", self._at_present(), with_flag(self.words, "--threads", str(threads)))
        present = flag_value(self._server(), FLAG)
        others = [name for name in self.backends if name != present]
        return self._with(FLAG, others[0]) if others else ""

    def vocabulary(self) -> str:
        """A head with a smaller vocabulary; vLLM takes what the head's checkpoint has."""
        if self.own:
            return self._typed(
                "train", {"out": "small-vocabulary", "draft_vocab": 4800, **self._model()}, drop=("steps", "seed")
            )
        return self._with("--speculative-token-map", "TOKENS-FILE") if self.engine == "sglang" else ""

    def collectives(self, nccl: bool = True) -> str:
        """Another algorithm of NCCL's, by its variable; where NCCL serves nothing (``nccl`` False), NCCL itself."""
        if self.engine == "embedded":
            return ""
        return f"NCCL_ALGO=Tree {self._with()}" if nccl else self._with("--disable-custom-all-reduce")

    def host(self) -> str:
        """Scheduling beside the device's work; the embedded engine has nothing to overlap, SGLang does it by itself."""
        if self.engine != "vllm" or "--async-scheduling" in self.words:
            return ""
        return self._with("--async-scheduling")

    def wiring(self) -> str:
        """What the head is fed against what it was trained on."""
        target, draft = self._models()
        changes: dict[str, Any] = {"target": target or "TARGET-DIR", "draft": draft or "DRAFT-DIR", "engine": None}
        engine = {"embedded": "specmeter"}.get(self.engine, self.engine)
        if engine in ("specmeter", "vllm", "sglang"):
            changes["engine"] = engine
        # Of the run's options, those that say which engine's source and how the numbers are made.
        own = Recorded(
            self.run.command,
            {k: v for k, v in self.run.options.items() if k in ("python", "threads")},
            self.run.hosts,
            self.run.far_python,
        )
        return shlex.join(own.again("check", {**changes, "probe": True}))

    def _models(self) -> tuple[str | None, str | None]:
        """Target and draft as the server's command names them, or the embedded engine's own; None where not known."""
        if self.engine == "embedded" and not self._named:
            if not self.words:
                return embedded_models(self.run.options.get("model"), self.run.options.get("draft"))
        elif self.engine == "embedded":
            return None, None
        return models_of(self.engine, self.words or self._of_file())

    @property
    def _named(self) -> bool:
        """The server is named by its address, its link or a file, not by its command."""
        return any(self.run.options.get(name) for name in _NAMED)

    def _model(self) -> dict[str, Any]:
        model = self.run.options.get("model")
        return {"model": model} if model else {}

    def _at_present(self) -> dict[str, Any]:
        return self._plain() if self.now is None else {"steps": self.now, "topk": 1, "draft_tokens": None}

    def _plain(self) -> dict[str, Any]:
        """No setting in the options: the server's own words have it."""
        return {"steps": None, "topk": 1, "draft_tokens": None}

    def _typed(
        self, command: str, changes: Mapping[str, Any], words: tuple[str, ...] = (), drop: tuple[str, ...] = ()
    ) -> str:
        """The run's options for ``command`` with ``changes``, and the server's words, which then name it alone."""
        if words and not self.words:
            drop = (*drop, *_NAMED)
        if words:
            drop = (*drop, *_OF_EMBEDDED)
        typed = self.run.again(command, changes, drop)
        place = " ".join([PLACE, shlex.join(words[1:])]).strip() if words[:1] == (PLACE,) else shlex.join(words)
        return shlex.join(typed) + (f" -- {place}" if words else "")

    def _with_setting(self, setting: Setting) -> tuple[str, ...] | None:
        """The server's words with ``setting``; None where its engine has no flags for it or they cannot be read."""
        with contextlib.suppress(SpecmeterError):
            if self.words and self.engine in ENGINE_NAMES:
                return engine_named(self.engine).with_setting(self.words, setting)
        return None

    def _server(self) -> tuple[str, ...]:
        """The command that starts the server, at the present steps; a place for it where it is not known."""
        if not self.words:
            return self._of_file() or (PLACE,)
        if self.now is None:
            return self.words
        with contextlib.suppress(SpecmeterError):
            there = engine_named(self.engine).setting_of(self.words) if self.engine in ENGINE_NAMES else None
            if there is not None and (there.steps, there.topk) == (self.now, 1):
                return self.words
        return self._with_setting(Setting.of(self.now)) or self.words

    def _of_file(self) -> tuple[str, ...]:
        """The command of the server file that the run named, its variables by ``env``; empty where there is none."""
        name = self.run.options.get("server")
        if not name:
            return ()
        try:
            spec = read_server_file(str(name))
        except SpecmeterError:
            return ()
        variables = [f"{key}={value}" for key, value in mask_env(spec.env).items()]
        return (*(["env", *variables] if variables else []), *mask_command(spec.command)) if spec.command else ()

    def _with(self, *flag: str) -> str:
        """The server at its present setting, with one more flag, or that flag's value in place of its own."""
        words = self._server()
        changed = (*words, *flag) if len(flag) < 2 or words == (PLACE,) else with_flag(words, flag[0], flag[1])
        return self._typed("profile", self._plain(), changed)


def commands_for(run: Run, now: int | None = None, backends: tuple[str, ...] = ()) -> ServerCommands:
    """From a saved run: its engine, its command line, and the server's command after ``--`` if it had one.

    ``backends`` are the attention backends that may be proposed (``attention_backends.proposable``).
    """
    line = recorded(run)
    cpus = int((run.run.get("machine") or {}).get("cpus") or 1)
    return ServerCommands(server_engine(run), line.words, line, now, cpus, backends)


def server_engine(run: Run) -> str:
    """A saved run's engine, by its name in ``specmeter.engines``; empty where it is not known."""
    name = str((run.analysis.get("engine") or {}).get("name") or run.plan.get("engine") or "")
    return "embedded" if name == "specmeter" else name
