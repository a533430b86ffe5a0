"""Problems that this package generates, as sources for `data.source` that need no download.

    countdown    make a target from numbers
    stepwise     chains and word sums, whose traces are of uneven quality, like raw reasoning traces

All use `draw.py`, by which a problem belongs to one split, whatever the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlt_lightning.tasks.countdown import countdown_rows
from rlt_lightning.tasks.stepwise import NEW_MIXTURE, NEW_OPERATIONS, chain_rows, word_sum_rows

# Each makes its rows from a number of rows, a seed and a split.
EMBEDDED: dict[str, Callable[[int, int, str], list[dict[str, Any]]]] = {
    "countdown": countdown_rows,
    "chains": chain_rows,
    "chains:right": partial(chain_rows, mixture=None),
    "new_chains": partial(chain_rows, mixture=NEW_MIXTURE, last=NEW_OPERATIONS),
    "word_sums": word_sum_rows,
}
