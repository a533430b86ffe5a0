"""Messages on the terminal or in the log: what takes long is announced first, and long waits are named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Timer

from lightning.pytorch.utilities import rank_zero_only


@rank_zero_only
def announce(line: str) -> None:
    """Print a line to the standard error stream, above a progress bar if there is one; on rank 0 only."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


@contextmanager
def waiting_for(
    what: Callable[[], str] | str, deadline_s: float | None = None, after_s: float = 5.0
) -> Iterator[None]:
    """Print what the block waits for, if it takes longer than some seconds.

    Args:
        what: Text after "waiting for", or a function that returns it; an empty text prints nothing.
        deadline_s: Time after which the block gives up, if it does; only for the text.
        after_s: Time without a line. Short waits print nothing.
    """

    def tell() -> None:
        if text := what if isinstance(what, str) else what():
            announce(f"waiting for {text}" + ("" if deadline_s is None else f", at most {deadline_s:.0f} s"))

    timer = Timer(after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


def make_printable(text: str) -> str:
    """Replace characters that would control a terminal or cannot be printed, line ends too, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as MB, or as GB from one GB on."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
