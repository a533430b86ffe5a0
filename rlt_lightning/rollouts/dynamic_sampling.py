"""Replace groups whose rewards are all equal by other problems (DAPO, arXiv:2503.14476, section 3.2).

Such a group has advantage 0 and teaches nothing. A step has a slot for each of its problems, counted over
all ranks; `RLTModule.training_step` has the loop:

    sample ─▶ score ─▶ which slots have equal rewards? ──▶ none, or no round is left ─▶ train
      ▲                              │
      └─── one problem for each ◀────┘  the next ones of the training order

Every rank knows all rewards and all problems, so all ranks decide alike. A slot whose rewards are still
equal after the last round keeps its group, so a step always has its usual size.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlt_lightning.types import InputError


@dataclass(frozen=True)
class DynamicSampling:
    """Sample other problems in place of those whose completions all earned the same.

    Args:
        max_rounds: How often a step does so at most. A round samples one problem for each group of equal
            rewards that is left, so a step samples at most 1 + max_rounds times its problems.

    Raises:
        InputError: If max_rounds is below 1.
    """

    max_rounds: int = 3

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise InputError(
                "rollouts.dynamic_sampling.max_rounds must be at least 1, but is "
                f"{self.max_rounds}. Raise it, or set rollouts.dynamic_sampling to null: that is off."
            )


@dataclass
class RefillCounts:
    """The cost of dynamic sampling in a step, over all ranks."""

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
