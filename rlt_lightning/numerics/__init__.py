"""Pure tensor functions, torch only: log-probs, rewards, KL, advantages, losses, packing.

Classes that a config names by `class_path` are exported here; functions are imported from their modules.
"""

from rlt_lightning.numerics.advantages import (
    AdvantageEstimator,
    GroupCenteredAdvantages,
    GroupNormalisedAdvantages,
    LeaveOneOutAdvantages,
    ShuffledAdvantages,
)
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.importance import TruncatedImportanceSampling
from rlt_lightning.numerics.losses import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
)

__all__ = [
    "AdvantageEstimator",
    "CISPOLoss",
    "DAPOLoss",
    "Divergence",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GroupCenteredAdvantages",
    "GroupNormalisedAdvantages",
    "LeaveOneOutAdvantages",
    "PolicyLoss",
    "ShuffledAdvantages",
    "TruncatedImportanceSampling",
]
