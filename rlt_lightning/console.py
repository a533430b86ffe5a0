"""Messages on the terminal or in the log: what takes long is announced first, and long waits are named."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event, Thread

from lightning.pytorch.utilities import rank_zero_only

LARGE_FILE_BYTES = 5 * 10**7
# Seconds between two lines of a log file, at most.
LOG_EVERY_S = 60.0
ERASE_LINE = "\r\x1b[2K"
# The waits that have begun and not ended. Only the last one prints, since it says most.
waits: list[Event] = []


@rank_zero_only
def announce(line: str) -> None:
    """Print a line to the standard error stream, above a progress bar if there is one; on rank 0 only."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def announce_reading(path: Path) -> None:
    """Say that a file of rows is read next, if it is large."""
    num_bytes = path.stat().st_size
    if num_bytes > LARGE_FILE_BYTES:
        announce(f"reading {path} ({size_text(num_bytes)})")


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
    terminal = redraws_lines()
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
    """Hide what the hub's client and `datasets` log about an error that is then raised and says more."""
    levels = {"huggingface_hub": logging.ERROR, "datasets": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@cache
def try_hub() -> None:
    """Ask the Hugging Face hub once per process whether it can be reached; if not, only its cache is used.

    Its client would try each file six times, which takes 23 s.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HTTPError as error:
        constants.HF_HUB_OFFLINE = True
        announce(f"{constants.ENDPOINT} cannot be reached ({error}), so only the hub's cache is used")


def is_offline() -> bool:
    """Return whether the Hugging Face hub is not asked, by HF_HUB_OFFLINE or since it cannot be reached."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def make_printable(text: str) -> str:
    """Replace characters that would control a terminal or cannot be printed, line ends too, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def wrap_line(line: str, indent: int, log_width: int | None = None) -> str:
    """Break a line at words where the terminal ends, or in a log.

    Args:
        line: The line.
        indent: Number of spaces before what follows.
        log_width: Columns where standard output is no terminal; None: the line stays whole there.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else log_width
    if width is None:
        return line
    spaces = " " * indent
    return textwrap.fill(
        line,
        max(width, indent + 30),
        subsequent_indent=spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as MB, or as GB from one GB on."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def redraws_lines() -> bool:
    """Return whether standard error is a terminal on which a line can be redrawn: one that has a size.

    Terminals of containers and of some editors are 0 columns wide. They get lines, as a log does.
    """
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # a stream that is no file, such as a notebook's
        return True
