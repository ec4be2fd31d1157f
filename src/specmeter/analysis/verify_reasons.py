"""Why a class of kernels costs what it does in verify, in one line, from the numbers at hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from specmeter.analysis.costmodel_bytes import Read, forward_bytes
from specmeter.analysis.kernel_classes import CLASSES, COLLECTIVES, GEMM, LM_HEAD
from specmeter.analysis.moe import Experts, distinct_experts
from specmeter.analysis.verify_sides import Server, Side

# A class whose time changes by less than this factor does not grow with the width.
FLAT = 1.1
# Kernels shorter than this are bound by their own start and end, not by bytes or arithmetic.
TINY_US = 5.0
MOST_NAMES = 3


def bytes_facts(verify: Side, plain: Side, server: Server) -> dict[str, Any] | None:
    """Bytes each side reads at least, and the ms that takes; None without the model's shape or the tokens."""
    if server.shape is None or verify.tokens < 0:
        return None
    found: dict[str, Any] = {"context_tokens": server.context, "bandwidth_gb_s": server.gb_s}
    for name, side in (("verify", verify), ("plain", plain)):
        read = _read(side, server)
        assert read is not None
        found[name] = {**asdict(read), "total": read.total, "ms": _floor_ms(read.total, server)}
    return found


def _read(side: Side, server: Server) -> Read | None:
    if server.shape is None or side.tokens < 0:
        return None
    return forward_bytes(server.shape, round(side.tokens), server.context or 0.0, float(max(side.batch, 1)))


def _floor_ms(size: float, server: Server) -> float | None:
    return size / (server.gb_s * 1e6) if server.gb_s else None


def expert_facts(verify: Side, plain: Side, server: Server) -> dict[str, Any] | None:
    """Distinct experts a layer on either side: expected, and measured where given; None for a dense model."""
    shape = server.shape
    if shape is None or shape.experts is None or verify.tokens < 0:
        return None
    expected = [_distinct(shape.experts, side) for side in (verify, plain)]
    measured = server.measured_experts
    return {
        "total": shape.experts.total,
        "per_token": shape.experts.per_token,
        "expected": {"verify": expected[0], "plain": expected[1], "factor": expected[0] / expected[1]},
        "measured": {"verify": measured[0], "plain": measured[1], "factor": measured[0] / measured[1]}
        if measured
        else None,
    }


def _distinct(experts: Experts, side: Side) -> float:
    return distinct_experts(experts, side.tokens * max(side.batch, 1))


def reason_of(code: int, verify: Side, plain: Side, server: Server) -> str:
    """Why a class costs what it does, in one line, from the numbers at hand."""
    name, ours, theirs = CLASSES[code], verify.ms[code], plain.ms[code]
    if not theirs:
        return "plain decoding has no such kernels"
    if not ours:
        return "verify has no such kernels"
    parts = []
    if code in (GEMM, LM_HEAD):
        parts.append(
            _weights(verify, plain, server) if code == GEMM else _flat("its weights are read once", ours, theirs)
        )
    elif name == "attention":
        parts.append(_attention(verify, plain, server))
    elif name == "experts":
        parts.append(_expert_words(verify, plain, server))
    elif code == COLLECTIVES:
        parts.append(f"messages grow with the tokens, {_times(verify.tokens, plain.tokens)}; a part may be waiting")
    parts.append(_launches(code, verify, plain))
    return "; ".join(part for part in parts if part)


def _weights(verify: Side, plain: Side, server: Server) -> str:
    read = _read(verify, server)
    words = _flat("weights are read once whatever the width", verify.ms[GEMM], plain.ms[GEMM])
    if read is None:
        return words
    least = _floor_ms(read.weights, server)
    both = verify.ms[GEMM] + verify.ms[LM_HEAD]
    if least is None:
        return f"{words}; {read.weights / 1e9:.2f} GB with lm_head"
    return f"{words}; {read.weights / 1e9:.2f} GB with lm_head take {least:.3f} ms at least, both classes {both:.3f} ms"


def _flat(why: str, ours: float, theirs: float) -> str:
    if ours / theirs < 1 / FLAT:
        return f"{why}, so less than in a plain step is another kernel, or a machine that was not as busy"
    if ours / theirs < FLAT:
        return f"{why}: no growth, as it should be"
    return f"{why}, so a factor of {ours / theirs:.2f} is another kernel, padding or arithmetic"


def _attention(verify: Side, plain: Side, server: Server) -> str:
    words = "the context is read once a sequence, whatever the width"
    read = _read(verify, server)
    if read is None or not server.context:
        return words
    least = _floor_ms(read.kv, server)
    return f"{words}: {read.kv / 1e6:.1f} MB" + (f", {least:.4f} ms at least" if least is not None else "")


def _expert_words(verify: Side, plain: Side, server: Server) -> str:
    found = expert_facts(verify, plain, server)
    if found is None:
        return "more tokens touch more experts"
    expected, measured = found["expected"], found["measured"]
    words = (
        f"{expected['verify']:.0f} distinct experts a layer against {expected['plain']:.0f} are expected, "
        f"x {expected['factor']:.2f}"
    )
    return words + (
        f"; measured {measured['verify']:.0f} against {measured['plain']:.0f}, x {measured['factor']:.2f}"
        if measured else ""
    )  # fmt: skip


def _times(ours: float, theirs: float) -> str:
    return f"x {ours / theirs:.2f}" if ours > 0 and theirs > 0 else "by how much is not known"


def _launches(code: int, verify: Side, plain: Side) -> str:
    """What the number of kernels says: one more each costs its start, and tiny ones cost nothing but that."""
    ours, theirs = verify.kernels[code], plain.kernels[code]
    each = 1e3 * verify.ms[code] / ours
    tiny = f"; {each:.1f} us each, so their number counts and not the width" if each < TINY_US else ""
    if abs(ours - theirs) < 0.5:
        return f"as many kernels ({ours:.0f}){tiny}{_others(code, verify, plain)}"
    return f"{ours:.0f} kernels against {theirs:.0f}{tiny}{_others(code, verify, plain)}"


def _others(code: int, verify: Side, plain: Side) -> str:
    """Which kernels each side runs, where they share none of those that take the class's time."""
    if not verify.names or not plain.names or set(verify.names[code]) & set(plain.names[code]):
        return ""
    ours, theirs = (", ".join(side.names[code][:MOST_NAMES]) for side in (verify, plain))
    return f"; another kernel: {ours} against {theirs}" if ours and theirs else ""
