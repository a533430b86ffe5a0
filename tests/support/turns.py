"""Runs whose workers share the GPUs of training."""

from __future__ import annotations


def turns(calls: list[str]) -> str:
    """What a worker was asked to do, in short: s(leep), w(ake up), p(ush), c(omplete or score)."""
    letters = {"/sleep": "s", "/wake_up": "w", "/update_weights": "p", "/v1/completions": "c"}
    return "".join(letters.get(call.split()[1], "") for call in calls)
