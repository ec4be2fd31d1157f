"""Drives calls at a server: so many at once, or as they arrive by chance; and sums up what came back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import numpy as np

from specmeter.bench.client import Api, Call, Client, Outcome
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace import Request

OnDone = Callable[[Outcome], None]


def _ignored(outcome: Outcome) -> None:
    pass


@dataclass(frozen=True)
class Load:
    """How calls are sent: ``concurrency`` at once, or in open loop at ``rate`` a second (Poisson, seeded) if not None.

    ``stop_on_error`` sends nothing more after the first failure: a comparison with a hole in it is worth nothing.
    The streams of ``concurrency`` begin evenly over ``ramp_s`` seconds, the first at once and the last at the end.
    """

    concurrency: int = 1
    rate: float | None = None
    seed: int = 0
    stop_on_error: bool = True
    ramp_s: float = 0.0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise SpecmeterError(f"concurrency is {self.concurrency}; it must be 1 or more.")
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise SpecmeterError(f"rate is {self.rate}; it must be above 0 requests a second.")
        if not 0 <= self.ramp_s < 1e6:
            raise SpecmeterError(f"The ramp is {self.ramp_s} seconds; it must be 0 or more.")
        if self.ramp_s and self.rate is not None:
            raise SpecmeterError("A ramp begins streams one after another, and requests at a rate have none.")


@dataclass(frozen=True)
class LoadResult:
    """The outcomes in the order of the calls, the wall time, and what the generator itself used of one core.

    ``full_ns``: when the last stream began, on the clock of the outcomes; None where the work ran out before (or at a
    rate).
    """

    outcomes: tuple[Outcome, ...]
    wall_s: float
    own_cpu_share: float
    full_ns: int | None = None


def drive(
    base_url: str, model: str, calls: Sequence[Call], load: Load, api: Api = "chat", on_done: OnDone = _ignored
) -> LoadResult:
    """Send all calls and wait for the answers; ``on_done`` hears of each as it ends."""
    began, cpu = time.perf_counter(), time.process_time()
    outcomes, full_ns = asyncio.run(_drive(base_url, model, calls, load, api, on_done))
    wall = time.perf_counter() - began
    return LoadResult(tuple(outcomes), wall, (time.process_time() - cpu) / wall if wall else 0.0, full_ns)


async def _drive(
    base_url: str, model: str, calls: Sequence[Call], load: Load, api: Api, on_done: OnDone
) -> tuple[list[Outcome], int | None]:
    limit = load.concurrency if load.rate is None else len(calls)
    results: dict[int, Outcome] = {}
    full_ns: int | None = None
    async with Client(base_url, model, api, connections=max(1, limit)) as client:

        async def one(index: int) -> bool:
            outcome = await client.send(calls[index])
            results[index] = outcome
            on_done(outcome)
            return not (outcome.error and load.stop_on_error)

        if load.rate is None:
            full_ns = await _closed_loop(one, len(calls), load)
        else:
            await _open_loop(one, len(calls), load.rate, load.seed)
    return [results[index] for index in sorted(results)], full_ns


async def _closed_loop(one: Callable[[int], Coroutine[object, object, bool]], count: int, load: Load) -> int | None:
    """Gives when the last stream began its first request; None where nothing was left for it."""
    queue = iter(range(count))
    streams = min(load.concurrency, count)
    going, full_ns, over = True, None, asyncio.Event()

    async def stream(number: int) -> None:
        nonlocal going, full_ns
        with contextlib.suppress(asyncio.TimeoutError):
            # A stream that is to begin after the work has run out holds nothing up.
            if number:
                await asyncio.wait_for(over.wait(), stream_start_s(number, streams, load.ramp_s))
        for index in queue:
            if not going:
                break
            if number == streams - 1 and full_ns is None:
                full_ns = time.perf_counter_ns()
            going = await one(index) and going
        over.set()

    await asyncio.gather(*(stream(number) for number in range(streams)))
    return full_ns


def stream_start_s(number: int, streams: int, ramp_s: float) -> float:
    """When a stream begins, seconds after the first: evenly spaced, the last of ``streams`` at ``ramp_s``."""
    return ramp_s * number / (streams - 1) if streams > 1 else 0.0


async def _open_loop(one: Callable[[int], Coroutine[object, object, bool]], count: int, rate: float, seed: int) -> None:
    began = time.perf_counter()
    running: list[asyncio.Task[bool]] = []
    for index, due in enumerate(arrivals(count, rate, seed)):
        # From the schedule, not from the last send: a late send must not shift all later ones.
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        if any(task.done() and task.result() is False for task in running):
            break
        running.append(asyncio.create_task(one(index)))
    await asyncio.gather(*running)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each of ``count`` requests is due, seconds after the first: a Poisson process of ``rate`` a second."""
    rng, due = random.Random(seed), [0.0]
    while len(due) < count:
        due.append(due[-1] + rng.expovariate(rate))
    return due[:count]


def lateness_ms(outcomes: Sequence[Outcome], load: Load) -> list[float]:
    """How much later than due each request of an open loop was sent, the first taken as on time.

    A generator that cannot keep its schedule hides the waiting of the users it stands for (coordinated omission), so
    this belongs beside the times.
    """
    if load.rate is None or not outcomes:
        return []
    due = arrivals(len(outcomes), load.rate, load.seed)
    began = outcomes[0].send_ns
    return [(outcome.send_ns - began) / 1e6 - 1000 * wanted for outcome, wanted in zip(outcomes, due, strict=True)]


def raise_failure(outcomes: Sequence[Outcome], what: str = "A request failed.") -> None:
    """Raise SpecmeterError (exit 4) for the first outcome that failed, with its reason."""
    for outcome in outcomes:
        if outcome.error:
            raise SpecmeterError(
                what,
                f"Request {outcome.call.request_id} (prompt {outcome.call.prompt.prompt_id}): {outcome.error}",
                "Look at the server's log.",
                Exit.SERVER_FAILED,
            )


def as_request(outcome: Outcome, start: int = 0) -> Request:
    """The outcome as the trace's record of a request."""
    return Request(
        request_id=outcome.call.request_id,
        prompt_id=outcome.call.prompt.prompt_id,
        setting=outcome.call.setting,
        block=outcome.call.block,
        send_ns=outcome.send_ns,
        first_ns=outcome.first_ns,
        end_ns=outcome.last_ns,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.output_tokens,
        error=outcome.error,
        start=start,
    )


def percentiles(values: Sequence[float]) -> dict[str, float | int | None]:
    """n, mean, p50, p90 and p99 of ``values``; None where there are none."""
    if not values:
        return {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(array, (50, 90, 99)))
    return {"n": len(values), "mean": float(array.mean()), "p50": p50, "p90": p90, "p99": p99}


def summarise(result: LoadResult) -> dict[str, object]:
    """What the client saw, as a JSON object: units in the key names.

    ``token_ms`` is per request (last minus first arrival over tokens - 1); ``gap_ms`` is between arriving pieces, each
    of which may carry several tokens under speculation; ``user_tok_s`` is decode only, ``total_tok_s`` end to end.
    """
    good = [outcome for outcome in result.outcomes if not outcome.error]
    gaps: list[float] = []
    for outcome in good:
        gaps.extend(np.diff(np.asarray(outcome.arrivals_ns, dtype=np.int64)) / 1e6)
    per_token = [outcome.token_ms for outcome in good if outcome.token_ms is not None]
    cached = [outcome.cached_tokens for outcome in good if outcome.cached_tokens is not None]
    tokens = sum(outcome.output_tokens for outcome in good)
    return {
        "requests": len(result.outcomes),
        "failed": len(result.outcomes) - len(good),
        "wall_s": result.wall_s,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": tokens,
        "ttft_ms": percentiles([(outcome.first_ns - outcome.send_ns) / 1e6 for outcome in good]),
        "token_ms": percentiles(per_token),
        "gap_ms": percentiles(gaps),
        "user_tok_s": percentiles([1000.0 / value for value in per_token]),
        "total_tok_s": tokens / result.wall_s if result.wall_s else None,
        "generator_core_share": result.own_cpu_share,
    }
