"""LightningModules: RLTModule (GRPO), SFTModule, OPDModule, EvaluationModule."""

from rlt_lightning.modules.evaluation import EvaluationModule
from rlt_lightning.modules.opd import OPDModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sft import SFTModule

__all__ = [
    "EvaluationModule",
    "OPDModule",
    "RLTModule",
    "SFTModule",
]
