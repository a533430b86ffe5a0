"""How often answers are right: pass@1 with its standard error, pass@k, maj@k.

One process counts all answers of a run, so the metrics do not wait for other ranks (`sync_on_compute`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class PassAt1(Metric):
    """Mean accuracy, and its standard error over problems.

    pass@1 = mean_i p_i, with p_i the fraction of problem i's k responses that are right

    standard error = sqrt(sum_i (p_i - pass@1)^2 / (n (n - 1)))

    The standard error is over n problems, taken as a sample of many like them. Responses to one problem are
    not independent, so k enters only through the p_i. NaN for a single problem.
    """

    full_state_update = False
    count: Tensor
    total: Tensor
    total_squares: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        for name in ("count", "total", "total_squares"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, num_correct: int, num_samples: int) -> None:
        """Count one problem."""
        accuracy = num_correct / num_samples
        self.count += 1
        self.total += accuracy
        self.total_squares += accuracy**2

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard error."""
        mean = self.total / self.count
        squares = (self.total_squares - self.count * mean**2).clamp(min=0)
        return mean, (squares / (self.count * (self.count - 1))).sqrt()


class PassAtK(Metric):
    """Mean probability that at least one of k responses is right, without bias from n >= k (pass@k).

    1 - C(n - c, k) / C(n, k)          for c right ones of n          (Codex, arXiv:2107.03374, Eq. 1)

    Args:
        k: Responses per draw.
    """

    full_state_update = False
    count: Tensor
    total: Tensor

    def __init__(self, k: int) -> None:
        super().__init__(sync_on_compute=False)
        self.k = k
        for name in ("count", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, num_correct: int, num_samples: int) -> None:
        """Count one problem.

        Raises:
            ValueError: If it has fewer than k responses.
        """
        if num_samples < self.k:
            raise ValueError(f"pass@{self.k} needs {self.k} responses per problem, but got {num_samples}.")
        self.count += 1
        self.total += 1 - math.comb(num_samples - num_correct, self.k) / math.comb(num_samples, self.k)

    def compute(self) -> Tensor:
        """Return the mean over problems."""
        return self.total / self.count


class MajorityAtK(Metric):
    """Mean accuracy of the answer that most of a problem's k responses give (maj@k)."""

    full_state_update = False
    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        for name in ("count", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, answers: Sequence[int | None], correct: Sequence[bool]) -> None:
        """Count one problem; see `majority_accuracy`."""
        self.count += 1
        self.total += majority_accuracy(answers, correct)

    def compute(self) -> Tensor:
        """Return the mean over problems."""
        return self.total / self.count


def majority_accuracy(answers: Sequence[int | None], correct: Sequence[bool]) -> float:
    """Return the fraction of the most frequent answers that is right: 0, 1 or, in a tie, between.

    Args:
        answers: One per response: equal numbers for equivalent answers, None for no answer, which is no vote.
        correct: Whether each response is right.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = {answer for answer, is_right in zip(answers, correct, strict=True) if is_right}
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(answer in right for answer in winners) / len(winners)


def reported_k(num_samples: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and the number of samples."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]
