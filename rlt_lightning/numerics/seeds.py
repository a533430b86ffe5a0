"""Seeds that are functions of step, rank and purpose."""

from __future__ import annotations


def mix_seed(*parts: int) -> int:
    """Return a 63-bit seed, hashed from integers: neighbouring inputs give unrelated streams."""
    seed = 0x9E3779B97F4A7C15
    for part in parts:
        seed = (seed ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return seed & 0x7FFFFFFFFFFFFFFF
