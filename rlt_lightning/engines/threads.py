"""Run functions in threads, and coroutines from ordinary code, even in a notebook with its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
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


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """Yield the items of an async iterator, which continues only while the next item is awaited."""

    async def take() -> T | None:
        return await anext(items, None)

    with asyncio.Runner() as runner:  # whose end cancels what still runs
        while (item := runner.run(take())) is not None:
            yield item
