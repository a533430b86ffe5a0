"""LightningModules: RLTModule and LikelihoodModule (GRPO), SFTModule, OPDModule, EvaluationModule."""

from rlt_lightning.modules.evaluation import EvaluationModule
from rlt_lightning.modules.likelihood import LikelihoodModule
from rlt_lightning.modules.opd import OPDModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sft import SFTModule
from rlt_lightning.modules.text_reward import CorrectnessReward, TextReward

__all__ = [
    "CorrectnessReward",
    "EvaluationModule",
    "LikelihoodModule",
    "OPDModule",
    "RLTModule",
    "SFTModule",
    "TextReward",
]
