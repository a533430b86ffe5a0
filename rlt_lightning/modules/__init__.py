"""LightningModules: RLTModule (GRPO of the teacher), SFTModule (fine-tuning), EvaluationModule."""

from rlt_lightning.modules.evaluation import EvaluationModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sft import SFTModule

__all__ = ["EvaluationModule", "RLTModule", "SFTModule"]
