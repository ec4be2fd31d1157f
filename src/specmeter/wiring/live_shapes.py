"""Shapes in a running process against the head's tensors: sizes, shards, settings."""

from __future__ import annotations

from collections.abc import Iterator

from specmeter.wiring.check import Result
from specmeter.wiring.findings import Finding, error, note, warning
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.live import Seen

# Engines pad a vocabulary to a multiple of this before they divide it among ranks.
PADDING = 64


def sharding(seen: Seen) -> int | None:
    """Ranks that share the draft's attention: 1 when it is whole in the process, None when that could not be read."""
    heads, total = seen.number("heads"), seen.number("heads_total")
    if not heads or total is None:
        return 1 if heads and not seen.world else None
    return total // heads


def check_shapes(seen: Seen, result: Result, settings: Settings, engine: str) -> list[Finding]:
    """Findings about one process: whether it loaded this head, how it is divided, and its draft settings."""
    return [
        *_whole_model(seen, result, engine),
        *_fc(seen, result, engine),
        *_vocabulary(seen, result, engine),
        *_shards(seen, settings, engine),
        *_settings(seen, settings, engine),
    ]


def _other(seen: Seen, what: str, engine: str) -> Finding:
    return error(
        "live-shape",
        f"{seen.name}: {what}",
        "The server has loaded another head or another target than these files.",
        "Compare --target and --draft with the server's command line.",
        engine,
    )


def _whole_model(seen: Seen, result: Result, engine: str) -> Iterator[Finding]:
    layers, wanted = seen.number("target_layers"), result.pair.target.layers
    if layers is not None and layers != wanted:
        yield _other(seen, f"the target in it has {layers} layers, the one in the folder {wanted}", engine)
    total = seen.number("heads_total") or (seen.number("heads") if sharding(seen) == 1 else None)
    stated = result.pair.head.shape.heads
    if total is not None and stated is not None and total != stated:
        yield _other(seen, f"the draft in it has {total} attention heads, the one in the folder {stated}", engine)


def _fc(seen: Seen, result: Result, engine: str) -> Iterator[Finding]:
    fc = result.pair.head.tensors.get("fc.weight")
    hidden = result.pair.target.hidden
    shape, ids, fed = seen.get("fc"), seen.get("captured"), seen.get("fed")
    inputs = seen.number("fc_inputs") or (shape[1] if shape is not None and len(shape) == 2 else None)
    if inputs is not None and fc is not None and len(fc.shape) == 2 and inputs != fc.shape[1]:
        yield _other(seen, f"fc in it takes {inputs} inputs, the one in the folder {fc.shape[1]}", engine)
    width = inputs or (fc.shape[1] if fc is not None and len(fc.shape) == 2 else None)
    given = fed[1] if fed is not None and len(fed) == 2 else len(ids) * hidden if ids and hidden else None
    if width is not None and given is not None and width != given:
        yield error(
            "live-fc-width",
            f"{seen.name}: the captured states are {given} wide together, fc takes {width}",
            "The number of states does not fit the head: drafts fail or are wrong.",
            "Name as many layers as fc takes states.",
            engine,
        )


def _vocabulary(seen: Seen, result: Result, engine: str) -> Iterator[Finding]:
    head = result.pair.head
    table, wanted = seen.get("d2t"), head.tensors.get("d2t")
    if table and wanted is not None and table[0] != wanted.shape[0]:
        yield _other(seen, f"the vocabulary map in it has {table[0]} entries, d2t {wanted.shape[0]}", engine)
    shape, lm_head = seen.get("lm_head"), head.tensors.get("lm_head.weight")
    rows = seen.number("lm_head_rows") or (shape[0] if shape is not None and len(shape) == 2 else None)
    if rows is None or lm_head is None:
        return
    full, ranks = lm_head.shape[0], max(1, round(lm_head.shape[0] / rows))
    if not full <= rows * ranks < full + PADDING * ranks:
        yield _other(seen, f"lm_head holds {rows} rows in it, the one in the folder {full}", engine)


def _shards(seen: Seen, settings: Settings, engine: str) -> Iterator[Finding]:
    over = sharding(seen)
    if over is None:
        return
    world = seen.number("target_tp") or seen.world or 1
    if world > 1 or over > 1:
        how = f"is divided over {over} ranks" if over > 1 else "is whole on every rank"
        yield note("live-sharded", f"{seen.name}: the draft {how}; the target's tensor parallel size is {world}")
    asked = settings.draft_tp or seen.number("draft_tp")
    if asked and asked != over:
        told = "--draft-tp" if settings.draft_tp else "the engine's own setting"
        yield error(
            "live-draft-tp",
            f"{seen.name}: a draft tensor parallel size of {asked} ({told}) is not in force: it runs over {over}",
            "The engine ignores the setting for this method.",
            "Plan with the size that is in force.",
            engine,
        )


def _settings(seen: Seen, settings: Settings, engine: str) -> Iterator[Finding]:
    told = {"draft_steps": settings.steps, "draft_topk": settings.topk, "draft_tokens": settings.draft_tokens}
    flags = {"draft_steps": "--steps", "draft_topk": "--topk", "draft_tokens": "--draft-tokens"}
    for name, asked in told.items():
        real = seen.number(name)
        if asked is not None and real is not None and asked != real:
            yield warning(
                "live-settings",
                f"{seen.name}: {flags[name]} {asked} was checked, the process runs with {real}",
                engine=engine,
            )
