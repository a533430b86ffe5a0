"""LightningModules: RLTModule (GRPO of the teacher) and SFTModule (supervised fine-tuning)."""

from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sft import SFTModule

__all__ = ["RLTModule", "SFTModule"]
