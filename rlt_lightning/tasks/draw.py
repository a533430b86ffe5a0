"""Draw problems of one split from a seed, each problem once.

    draw ─▶ seen before? ─▶ in which split? ─▶ yield      the same problems in every process

A problem's split depends on its text alone: no problem is in two splits, whatever the seeds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from rlt_lightning.types import InputError

Problem = TypeVar("Problem")
MAX_MISSES = 10_000  # after this many draws in a row that give nothing new, we say that there are no more


NUM_BUCKETS = 16  # into which problems fall by the hash of their text
Splits = dict[str, range]  # buckets by split; the first split that has a problem's bucket has the problem
# One problem in 8 is a test problem.
EIGHTHS: Splits = {"test": range(0, NUM_BUCKETS, 8), "train": range(NUM_BUCKETS)}


def find_split(text: str, splits: Splits) -> str:
    """Return the split that a problem belongs to."""
    bucket = zlib.crc32(text.encode()) % NUM_BUCKETS
    return next(name for name, buckets in splits.items() if bucket in buckets)


def draw_different(
    source: str,
    draw: Callable[[], Problem],
    write_text: Callable[[Problem], str],
    num_rows: int,
    split: str,
    splits: Splits = EIGHTHS,
) -> Iterator[Problem]:
    """Yield different problems of one split.

    A problem is drawn when it is asked for: the caller may use the same generator between two of them.

    Args:
        source: Name of the source, for messages.
        draw: Draws a problem of any split.
        write_text: Returns the text that makes a problem the one it is.
        num_rows: Number of problems.
        split: Name of the split.
        splits: All splits of the source.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    if split not in splits:
        raise InputError(
            f"The {source} source has the splits train and test, but got '{split}'. Use one of them."
        )
    texts: set[str] = set()
    misses = 0
    while len(texts) < num_rows:
        problem = draw()
        text = write_text(problem)
        if text not in texts and find_split(text, splits) == split:
            texts.add(text)
            misses = 0
            yield problem
            continue
        misses += 1
        if misses > MAX_MISSES:
            raise InputError(
                f"The {source} source has about {len(texts)} different rows of these settings, but "
                f"{num_rows} were asked for. Lower data.num_embedded_rows."
            )
