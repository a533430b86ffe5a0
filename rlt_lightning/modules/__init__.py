"""LightningModules: RLTModule (GRPO of the teacher) and SFTModule (fine-tuning); rewards of text alone."""

from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sft import SFTModule
from rlt_lightning.modules.text_reward import CorrectnessReward, TextReward

__all__ = ["CorrectnessReward", "RLTModule", "SFTModule", "TextReward"]
