"""Recognise the published sets of the paper's Table 1, so that other rows get no place beside its figures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """What is known of a published set.

    Args:
        num_rows: Its rows.
        digest: `digest` of its questions; None where no copy of the rows could be read to compute it.
    """

    num_rows: int
    digest: str | None


PUBLISHED = {
    "aime24": Published(30, "9ba0779372c9e7cb"),
    "math500": Published(500, "e15712daa05eddc5"),
    # Its rows are not public as plain text, so only their number is known.
    "gpqa_diamond": Published(198, None),
}


def digest(questions: Iterable[str]) -> str:
    """Return a hash of questions that depends on neither their order nor their white space."""
    hashes = sorted(hashlib.sha256("".join(text.split()).encode()).hexdigest() for text in questions)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def known_by_number(name: str) -> bool:
    """Return whether a published set is recognised only by the number of its rows."""
    return name in PUBLISHED and PUBLISHED[name].digest is None


def difference(name: str, questions: list[str]) -> str | None:
    """Return what makes a set under a known name another one; None for the published set, or other names.

    Args:
        name: Name of the set, such as math500.
        questions: Its questions, without template.
    """
    published = PUBLISHED.get(name)
    if published is None:
        return None
    if len(questions) < published.num_rows:
        return f"{len(questions)} of {published.num_rows} rows"
    if len(questions) > published.num_rows:
        return f"{len(questions)} rows, where it has {published.num_rows}"
    if published.digest is not None and digest(questions) != published.digest:
        return "its questions are others"
    return None
