"""LightningModules: RLTModule (GRPO), SFTModule, OPDModule, EvaluationModule; rewards that need a text."""

from rlt_lightning.evaluation.module import EvaluationModule
from rlt_lightning.modules.opd import OPDModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sft import SFTModule
from rlt_lightning.modules.text_reward import CorrectnessReward, TextReward

__all__ = ["CorrectnessReward", "EvaluationModule", "OPDModule", "RLTModule", "SFTModule", "TextReward"]
