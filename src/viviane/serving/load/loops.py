"""The load itself: clients that wait for their answers, and arrivals that do not wait for anyone.

A latency is counted from the moment at which a request was to be sent. A server that falls behind therefore cannot hide
the time that requests spent waiting for their turn (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np

from viviane.serving.load.clients import Client
from viviane.serving.load.phase import NOT_SENT, Tally
from viviane.serving.load.settings import LoadSettings


async def closed_loop(client: Client, requests: list[Any], count: int, settings: LoadSettings) -> Tally:
    """Let clients send, each its next request when it has the answer to the last one."""
    tally, turn = Tally(), cycle(requests)
    gc.collect()
    start = perf_counter()
    until = start + settings.seconds

    async def work() -> None:
        while (begin := perf_counter()) < until:
            outcome = await client.send(next(turn))
            tally.add(outcome, perf_counter() - begin)

    await asyncio.gather(*(work() for _ in range(count)))
    tally.seconds = max(perf_counter() - start, settings.seconds)
    return tally


async def open_loop(client: Client, requests: list[Any], rate: float, settings: LoadSettings) -> Tally:
    """Send at the times of a Poisson process, whether or not earlier requests are answered."""
    tally, turn = Tally(), cycle(requests)
    draw = np.random.default_rng(settings.seed)
    times = np.cumsum(draw.exponential(1 / rate, int(rate * settings.seconds * 1.5) + 10))
    times = times[times < settings.seconds]
    under_way: set[asyncio.Task[None]] = set()
    gc.collect()
    start = perf_counter()

    async def send(intended: float) -> None:
        outcome = await client.send(next(turn))
        tally.add(outcome, perf_counter() - intended)

    for time in times:
        wait = start + time - perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        if len(under_way) >= settings.max_outstanding:
            tally.errors[NOT_SENT] += 1
            await asyncio.sleep(0)
            continue
        task = asyncio.create_task(send(start + time))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way)
    tally.seconds = max(perf_counter() - start, settings.seconds)
    return tally
