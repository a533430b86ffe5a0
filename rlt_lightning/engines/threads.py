"""Run functions in threads, and coroutines from ordinary code, even in a notebook with its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_background(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # handed on to whoever asks for the result
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also in a notebook, which has a running loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return run_in_background(lambda: asyncio.run(work)).result()


def iterate_in_thread(items: AsyncIterator[T]) -> Iterator[T]:
    """Yield the items of an async iterator. It runs in a thread, also while the caller is busy."""
    arrived: SimpleQueue[T | None] = SimpleQueue()  # None: no more come
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()

    async def forward() -> None:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        async for item in items:
            arrived.put(item)

    thread = run_in_background(lambda: asyncio.run(forward()))
    thread.add_done_callback(lambda _: arrived.put(None))
    try:
        while (item := arrived.get()) is not None:
            yield item
        thread.result()
    finally:
        if not thread.done():  # the caller wants no more
            loop, task = begun.result()
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)
            wait([thread])
