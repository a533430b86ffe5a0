"""Say what is waited for, if the wait is long."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

# Seconds between two lines of a log file, at most.
LOG_EVERY_S = 60.0
ERASE_LINE = "\r\x1b[2K"
# The waits that have begun and not ended. Only the last one prints, since it says most.
waits: list[Event] = []


@contextmanager
def waiting_for(
    what: Callable[[], str] | str,
    deadline_s: float | None = None,
    after_s: float = 5.0,
    on_terminal: bool = True,
) -> Iterator[None]:
    """Print what the block waits for, and how long: one line that changes on a terminal, some in a log.

    A log gets a line after `after_s`, and then whenever the wait has doubled or a minute has passed:

        waiting for vLLM worker http://127.0.0.1:8000 to answer: 10 s of at most 900 s

    A wait inside another one is printed in its place.

    Args:
        what: Text after "waiting for", or a function that returns it; an empty text prints nothing.
        deadline_s: Time after which the block gives up, if it does; only for the text.
        after_s: Time without a line. Short waits print nothing.
        on_terminal: Whether to print on a terminal. False where a progress bar shows the wait there.
    """
    terminal = sys.stderr.isatty()
    if terminal and not on_terminal:
        yield
        return
    begin, over = time.monotonic(), Event()
    limit = "" if deadline_s is None else f" of at most {deadline_s:.0f} s"

    def tell() -> None:
        shown, due_s = False, after_s
        while not over.wait(max(0.0, begin + due_s - time.monotonic())):
            waited = time.monotonic() - begin
            due_s = waited + (1.0 if terminal else min(waited, LOG_EVERY_S))
            text = what if isinstance(what, str) else what()
            if text and waits[-1:] == [over]:
                line = f"waiting for {text}: {waited:.0f} s{limit}"
                print(ERASE_LINE + line if terminal else line, end="" if terminal else "\n", file=sys.stderr)
                sys.stderr.flush()
                shown = True
        if shown and terminal:
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)

    thread = Thread(target=tell, daemon=True)
    waits.append(over)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        waits.remove(over)


@contextmanager
def without_hub_retries() -> Iterator[None]:
    """Leave out the hub's own five warnings of retries, which say less than the error that follows."""
    hub_log = logging.getLogger("huggingface_hub")
    level = hub_log.level
    hub_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub_log.setLevel(level)
