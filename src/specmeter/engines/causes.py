"""Why a server died, in one line, from its log and exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from specmeter.trace.masking import mask_text

TAIL_BYTES = 65536
SHOWN_LINES = 6

# The first that matches wins; most specific first. {0} is the pattern's first group.
_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), text)
    for pattern, text in (
        (r"address already in use|Errno 98|port \d+ (?:is )?(?:already )?(?:in use|taken)", "the port is taken"),
        (r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError", "out of GPU memory"),
        (
            r"No available memory for the cache blocks|not enough memory.*KV|Not enough memory\. Please try",
            "too little memory is left for the KV cache",
        ),
        (r"can't allocate memory|Cannot allocate memory|^MemoryError|std::bad_alloc", "out of memory"),
        (r"No space left on device", "the disk is full"),
        (r"unrecognized arguments: (.+)", "unknown arguments: {0}"),
        (r"invalid choice: (.+)", "invalid choice: {0}"),
        (r"ModuleNotFoundError: (No module named .+)", "{0}"),
        (r"(?:RepositoryNotFoundError|is not a local folder and is not a valid model identifier)", "no such model"),
        (
            r"Couldn't connect to '?https?://|Network is unreachable|MaxRetryError|LocalEntryNotFoundError",
            "the model is not on this machine and could not be fetched",
        ),
        (r"No CUDA GPUs are available|Found no NVIDIA driver", "no GPU is usable"),
    )
)
_EXCEPTION = re.compile(r"^(?:\S+ )*?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .+)$")
# What an engine's outer processes say after one of their own has failed: the cause stands before it.
_ELSEWHERE = re.compile(
    r"See root cause above|See stack trace (?:\(above\) )?for (?:the )?root cause"
    r"|initialization failed due to an exception in a background process",
    re.IGNORECASE,
)
_PASSING = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def log_tail(path: Path, lines: int = SHOWN_LINES, secrets: Sequence[str] = ()) -> list[str]:
    """The last non-empty ``lines`` of a log, colours, control characters and ``secrets`` taken out.

    Empty if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    cleaned = (_ANSI.sub("", line).rstrip() for line in text.replace("\r", "\n").split("\n"))
    printable = ("".join(char for char in line if char.isprintable() or char == "\t") for line in cleaned)
    return [mask_text(line, secrets) for line in printable if line.strip()][-lines:]


def cause_in_log(path: Path, exit_code: int | None, secrets: Sequence[str] = ()) -> str:
    """The cause in words (a known pattern, else an exception's line), then the log's last lines.

    ``secrets`` are masked in both.
    """
    tail = log_tail(path, 400, secrets)
    cause = _known_cause(tail) or _exception(tail) or ""
    ended = _ending(exit_code)
    head = "; ".join(part for part in (cause, ended) if part) or "no cause is in its log"
    shown = [f"    {line[:200]}" for line in tail[-SHOWN_LINES:]]
    return "\n".join([head, *(["  log (last lines):", *shown] if shown else ["  its log is empty"])])


def _known_cause(lines: list[str]) -> str | None:
    for pattern, text in _KNOWN:
        for line in reversed(lines):
            if match := pattern.search(line):
                return text.format(*(group.strip() for group in match.groups() or ("",)))
    return None


def _exception(lines: list[str]) -> str | None:
    """The last exception's line; where that one points to a cause before it, the first that does not."""
    found = [match for line in lines if (match := _EXCEPTION.match(line.strip()))]
    if not found:
        return None
    chosen = found[-1]
    if _ELSEWHERE.search(chosen.string):
        causes = (one for one in found if not (_ELSEWHERE.search(one.string) or _passing(one)))
        chosen = next(causes, chosen)
    return chosen.group(1)[:300]


def _passing(exception: re.Match[str]) -> bool:
    """Whether the log itself says that the server went on after it."""
    return _PASSING.search(exception.string[: exception.start(1)]) is not None


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return ""
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    killer = " (by someone, or by the kernel for want of memory)" if exit_code == -signal.SIGKILL else ""
    return f"it was ended by {name}{killer}"
