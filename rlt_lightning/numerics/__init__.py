"""Pure tensor functions, torch only: log-probs, rewards, KL, advantages, losses, packing."""

from rlt_lightning.numerics.advantages import (
    AdvantageEstimator,
    GroupCenteredAdvantages,
    GroupNormalisedAdvantages,
    LeaveOneOutAdvantages,
    ShuffledAdvantages,
    zero_std_groups,
)
from rlt_lightning.numerics.attention import Segments, SharedPrefix, looped_attention, segment_attention
from rlt_lightning.numerics.balance import balance_shards, imbalance
from rlt_lightning.numerics.divergence import (
    Divergence,
    divergence,
    exact_kl,
    linear_divergence,
    linear_exact_kl,
    log_ratio_kl,
    sampled_advantages,
    schulman_kl,
)
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling
from rlt_lightning.numerics.log_probs import linear_log_probs, token_entropy, token_log_probs
from rlt_lightning.numerics.losses import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
)
from rlt_lightning.numerics.packing import (
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    micro_batches,
    split_to,
    to_padded,
)
from rlt_lightning.numerics.rewards import (
    NonFiniteError,
    masked_mean,
    require_finite,
    student_kl_penalty,
    student_solution_reward,
)
from rlt_lightning.numerics.varlen import FlashAttnKernel, TorchKernel
from rlt_lightning.types import RewardTerms

__all__ = [
    "AdvantageEstimator",
    "BNPOLoss",
    "CISPOLoss",
    "DAPOLoss",
    "Divergence",
    "DrGRPOLoss",
    "FlashAttnKernel",
    "GRPOLoss",
    "GSPOLoss",
    "GroupCenteredAdvantages",
    "GroupNormalisedAdvantages",
    "Head",
    "LeaveOneOutAdvantages",
    "LogitScale",
    "MicroBatch",
    "Mismatch",
    "NonFiniteError",
    "PackedSequences",
    "PolicyLoss",
    "RewardTerms",
    "ScoredSequence",
    "Segments",
    "SequenceLengths",
    "SharedPrefix",
    "ShuffledAdvantages",
    "TorchKernel",
    "TruncatedImportanceSampling",
    "balance_shards",
    "divergence",
    "exact_kl",
    "imbalance",
    "linear_divergence",
    "linear_exact_kl",
    "linear_log_probs",
    "log_ratio_kl",
    "looped_attention",
    "masked_mean",
    "micro_batches",
    "require_finite",
    "sampled_advantages",
    "schulman_kl",
    "segment_attention",
    "split_to",
    "student_kl_penalty",
    "student_solution_reward",
    "to_padded",
    "token_entropy",
    "token_log_probs",
    "zero_std_groups",
]
