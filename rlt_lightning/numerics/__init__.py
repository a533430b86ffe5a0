"""Pure tensor functions, torch only: log-probs, rewards, KL, advantages, losses, packing."""

from rlt_lightning.numerics.advantages import (
    AdvantageEstimator,
    GroupCenteredAdvantages,
    GroupNormalisedAdvantages,
    LeaveOneOutAdvantages,
    ShuffledAdvantages,
    zero_std_groups,
)
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling
from rlt_lightning.numerics.kl import exact_kl, head_exact_kl, log_ratio_kl, schulman_kl
from rlt_lightning.numerics.log_probs import head_log_probs, token_entropy, token_log_probs
from rlt_lightning.numerics.losses import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
)
from rlt_lightning.numerics.packing import PackedSequences, from_padded, pack_by_tokens, to_padded
from rlt_lightning.numerics.rewards import (
    NonFiniteError,
    RewardTerms,
    RLTReward,
    masked_mean,
    require_finite,
    student_kl_penalty,
    student_solution_reward,
)

__all__ = [
    "AdvantageEstimator",
    "BNPOLoss",
    "CISPOLoss",
    "DAPOLoss",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GroupCenteredAdvantages",
    "GroupNormalisedAdvantages",
    "LeaveOneOutAdvantages",
    "Mismatch",
    "NonFiniteError",
    "PackedSequences",
    "PolicyLoss",
    "RLTReward",
    "RewardTerms",
    "ShuffledAdvantages",
    "TruncatedImportanceSampling",
    "exact_kl",
    "from_padded",
    "head_exact_kl",
    "head_log_probs",
    "log_ratio_kl",
    "masked_mean",
    "pack_by_tokens",
    "require_finite",
    "schulman_kl",
    "student_kl_penalty",
    "student_solution_reward",
    "to_padded",
    "token_entropy",
    "token_log_probs",
    "zero_std_groups",
]
