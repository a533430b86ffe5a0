"""Replace groups whose rewards are all equal by other problems (DAPO, arXiv:2503.14476, section 3.2).

Such a group has advantage 0 and teaches nothing. A step has a place for each of its problems, counted over
all ranks; `RLTModule.training_step` has the loop:

    sample ─▶ score ─▶ which places have equal rewards? ─▶ none, or no round is left ─▶ train
      ▲                              │
      └─── one problem for each ◀────┘  the next ones of the training order

Every rank knows all rewards and all problems, so all ranks decide alike. A place whose rewards are still
equal after the last round keeps its group, so a step always has its usual size.

With `min_std_frac` groups whose rewards differ little are replaced too (RLPR, arXiv:2506.18254, section 3.4).
`RewardStd` keeps the average that they are compared with:

    steps 1 … 5    6 … 10                  11, 12, …
                   mean of these steps     moving average; groups below min_std_frac of it are replaced
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlt_lightning.types import InputError

# Of RLPR's run (OpenBMB/RLPR 8490fca, examples/RLPR/reproduce_qwen.sh); steps count from 1.
STD_FROM_STEP, STD_ACTS_FROM_STEP, STD_DECAY = 6, 11, 0.99


@dataclass(frozen=True)
class DynamicSampling:
    """Sample other problems in place of those whose completions all earned the same.

    Args:
        max_rounds: How often a step does so at most. A round samples one problem for each group of equal
            rewards that is left, so a step samples at most 1 + max_rounds times its problems.
        min_std_frac: From step 11 on, replace also groups whose rewards' standard deviation is below this
            part of its moving average; beta in RLPR, 0.5 to 1.0 there. 0: equal rewards only.

    Raises:
        InputError: If max_rounds is below 1 or min_std_frac below 0.
    """

    max_rounds: int = 3
    min_std_frac: float = 0.0

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise InputError(
                "rollouts.dynamic_sampling.max_rounds must be at least 1, but is "
                f"{self.max_rounds}. Raise it, or set rollouts.dynamic_sampling to null: that is off."
            )
        if self.min_std_frac < 0:
            raise InputError(
                f"rollouts.dynamic_sampling.min_std_frac must be at least 0, but is {self.min_std_frac}. Set "
                "it to 0.5, or to 0: only groups of equal rewards are then replaced."
            )


class RewardStd:
    """The mean over groups of their rewards' standard deviation, averaged over the steps; see above.

    Attributes:
        average: In the unit of the rewards; None before the first step that counts.
    """

    def __init__(self) -> None:
        self.average: float | None = None

    def find_bound(self, frac: float, step: int) -> float:
        """Return what part `frac` of the average is in a step, from 1; 0 before it acts."""
        return frac * self.average if self.average is not None and step >= STD_ACTS_FROM_STEP else 0.0

    def add(self, stds: Sequence[float], step: int) -> None:
        """Add a step: the standard deviations of all groups that it has sampled, dropped ones included."""
        if step < STD_FROM_STEP:
            return
        mean = sum(stds) / len(stds)
        weight = 1 - STD_DECAY if step >= STD_ACTS_FROM_STEP else 1 / (step - STD_FROM_STEP + 1)
        self.average = mean if self.average is None else self.average + weight * (mean - self.average)


@dataclass
class RefillCounts:
    """What dynamic sampling has cost in a step, over all ranks."""

    num_problems: int  # of the step
    rounds: int = 0
    dropped_groups: int = 0
    dropped_tokens: int = 0

    def compute_metrics(self, num_equal: int) -> dict[str, float]:
        """Return the metrics; `num_equal` groups were kept that should have been replaced."""
        return {
            # Problems of the step and in place of others; what was dropped for equal rewards.
            "rollout/sampled_problems": float(self.num_problems + self.dropped_groups),
            "rollout/dropped_groups": float(self.dropped_groups),
            "rollout/dropped_tokens": float(self.dropped_tokens),
            # How often others were sampled, and equal groups that the step trains on all the same.
            "rollout/refill_rounds": float(self.rounds),
            "rollout/kept_equal_groups": float(num_equal),
        }
