"""How much better each completion is than the others of its prompt. One class per baseline."""

import hashlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class AdvantageEstimator(ABC):
    """Turns rewards into advantages, comparing only the completions of one prompt.

    Subclass it and write `compare` for another baseline.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        """Return one advantage per completion.

        Args:
            rewards: (N,), the `group_size` completions of a prompt in adjacent rows.
            group_size: Completions per prompt, G.

        Returns:
            (N,). Exactly 0 in a group whose rewards are all equal, whatever rounding says.

        Raises:
            ValueError: If `group_size` is below 2 or does not divide N.
        """
        groups = split_groups(rewards, group_size)  # (P, G)
        equal = zero_std_groups(rewards, group_size).unsqueeze(1)  # (P, 1)
        return self.compare(groups).masked_fill(equal, 0.0).flatten()

    @abstractmethod
    def compare(self, groups: Tensor) -> Tensor:
        """Return the advantages of rewards in groups, (P, G) -> (P, G)."""


class GroupNormalisedAdvantages(AdvantageEstimator):
    """GRPO: A_i = (r_i - mean(r)) / (std(r) + eps), with unbiased std (DeepSeekMath, arXiv:2402.03300).

    Args:
        eps: Keeps groups of nearly equal rewards from exploding, in the unit of the rewards.
    """

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = eps

    def compare(self, groups: Tensor) -> Tensor:
        """Centre and scale by the group."""
        return center(groups) / (groups.std(dim=1, keepdim=True) + self.eps)


class GroupCenteredAdvantages(AdvantageEstimator):
    """Dr. GRPO: A_i = r_i - mean(r), in the unit of the rewards (arXiv:2503.20783).

    Without the division by std, which weighs up prompts that are nearly all right or all wrong.
    """

    def compare(self, groups: Tensor) -> Tensor:
        """Centre by the group."""
        return center(groups)


class LeaveOneOutAdvantages(AdvantageEstimator):
    """RLOO: A_i = r_i - the mean of the group's other rewards, an unbiased baseline (arXiv:2402.14740)."""

    def compare(self, groups: Tensor) -> Tensor:
        """Centre by the others; r_i - mean of others = G / (G - 1) * (r_i - mean of all)."""
        group_size = groups.shape[1]
        return center(groups) * (group_size / (group_size - 1))


class ShuffledAdvantages(AdvantageEstimator):
    """Control for experiments: the right advantages, given to the wrong completions of the same prompt.

    A run that learns as well with these does not learn from its reward. An answer term has no advantage to
    shuffle: set model.answer_weight to 0. The permutation depends on the seed and on the rewards only, so
    there is no state to save and a resumed run equals an uninterrupted one.

    Args:
        seed: Another seed, another permutation.
        estimator: Computes the advantages to be shuffled; by default `GroupNormalisedAdvantages()`.
    """

    def __init__(self, seed: int = 0, estimator: AdvantageEstimator | None = None) -> None:
        self.seed = seed
        self.estimator = estimator or GroupNormalisedAdvantages()

    def compare(self, groups: Tensor) -> Tensor:
        """Shuffle within each group."""
        digest = hashlib.sha256(repr((self.seed, groups.tolist())).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        order = torch.rand(groups.shape, generator=generator).argsort(dim=1)  # (P, G)
        return self.estimator.compare(groups).gather(1, order.to(groups.device))


def zero_std_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Return True for each prompt whose completions all earned the same, and so teach nothing.

    Args:
        rewards: (N,), the `group_size` completions of a prompt in adjacent rows.
        group_size: Completions per prompt, G.

    Returns:
        (P,), bool.

    Raises:
        ValueError: If `group_size` is below 2 or does not divide N.
    """
    groups = split_groups(rewards, group_size)
    return groups.amax(dim=1) == groups.amin(dim=1)


def center(groups: Tensor) -> Tensor:
    """Subtract each group's mean, (P, G) -> (P, G)."""
    centered = groups - groups.mean(dim=1, keepdim=True)
    # The mean is rounded in the unit of the rewards, which std, where they are close, is far below.
    return centered - centered.mean(dim=1, keepdim=True)


def split_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Return rewards with one prompt per row, (N,) -> (P, G)."""
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2, but it is {group_size}: "
            "a single completion has none to compare with."
        )
    if rewards.numel() % group_size:
        raise ValueError(
            f"Every prompt needs group_size={group_size} completions, but {rewards.numel()} rewards "
            "came, which is no multiple of it. Give the engine and the module the same group_size."
        )
    return rewards.reshape(-1, group_size)
