"""Means over a whole validation, of batches of any size on any rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Validated:
    """The figures of one held-out batch."""

    means: dict[str, float]
    count: int  # of what they are means over
    largest: dict[str, float]
