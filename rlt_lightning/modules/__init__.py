"""LightningModules: RLTModule (GRPO), SFTModule, EvaluationModule; and rewards of a text alone."""

from rlt_lightning.modules.evaluation import EvaluationModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sft import SFTModule
from rlt_lightning.modules.text_reward import CorrectnessReward, TextReward

__all__ = ["CorrectnessReward", "EvaluationModule", "RLTModule", "SFTModule", "TextReward"]
