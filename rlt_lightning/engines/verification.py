"""Compare a worker's log-probs with the trainer's."""

from __future__ import annotations

AGREEMENT = {
    "float32": 5e-4,
    "float16": 0.02,
    "bfloat16": 0.1,
}  # nats, mean over a text, by worker's data type


def disagreement(scores: list[float], log_probs: dict[int, list[float]], bound: float) -> str | None:
    """Say how a worker's log-probs differ from the trainer's of the latest version; None if they do not.

    They are also stale when they are within the bound, but four times as near to an earlier version: a small
    step moves log-probs by less than the bound, yet by more than rounding does.
    """
    distances = {version: mean_distance(scores, values) for version, values in log_probs.items()}
    latest = max(distances)
    nearest = min(distances, key=distances.__getitem__)
    error = distances[latest]
    if nearest != latest and distances[nearest] < error / 4:
        return (
            f"its log-probs differ by {error:.2g} nats per token from those of step {latest} and by "
            f"{distances[nearest]:.2g} from those of step {nearest}: later pushes have not arrived."
        )
    if not error <= bound:
        return (
            f"its log-probs differ by {error:.2g} nats per token (at most {bound:g} is rounding) and fit no "
            "earlier step either."
        )
    return None


def mean_distance(a: list[float], b: list[float]) -> float:
    """Mean absolute difference."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
