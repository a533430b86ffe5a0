"""Messages on the terminal or in the log: what takes long is announced first, and long waits are named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from lightning.pytorch.utilities import rank_zero_only

AFTER_S = 5.0  # shorter waits print nothing


@rank_zero_only
def announce(line: str) -> None:
    """Print a line to the standard error stream, above a progress bar if there is one; on rank 0 only."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


@contextmanager
def waiting_for(what: Callable[[], str] | str) -> Iterator[None]:
    """Print what the block waits for, if it takes longer than `AFTER_S`.

    Args:
        what: Text after "waiting for", or a function that returns it; an empty text prints nothing.
    """

    def tell() -> None:
        if text := what if isinstance(what, str) else what():
            announce(f"waiting for {text}")

    timer = Timer(AFTER_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def make_printable(text: str) -> str:
    """Replace characters that would control a terminal or cannot be printed, line ends too, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as MB, or as GB from one GB on."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
