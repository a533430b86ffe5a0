"""Reinforcement-Learned Teachers (RLT, arXiv:2506.08388) as a PyTorch Lightning trainer.

Scripts import their classes and functions from here. Each is loaded at its first use, so
`import rlt_lightning` takes no time.
"""

import os
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlt_lightning.run import __version__ as __version__
from rlt_lightning.run.allocator import grow_segments

if TYPE_CHECKING:
    from rlt_lightning.callbacks import ResponseCallback, RolloutCallback
    from rlt_lightning.datamodules import (
        EvaluationDataModule,
        ScoringData,
        StratosDataModule,
        StudentLikelihoodData,
        StudentOPDData,
        StudentRLData,
        StudentSFTData,
        TeacherRLData,
        TeacherSFTData,
    )
    from rlt_lightning.engines import Sampling
    from rlt_lightning.modules import EvaluationModule, OPDModule, RLTModule, SFTModule
    from rlt_lightning.modules.optimizer import OptimizerConfig
    from rlt_lightning.rewards import RLTReward
    from rlt_lightning.teacher import Explanation, Score, Teacher
    from rlt_lightning.trainer import Trainer

__all__ = [
    "EvaluationDataModule",
    "EvaluationModule",
    "Explanation",
    "OPDModule",
    "OptimizerConfig",
    "RLTModule",
    "RLTReward",
    "ResponseCallback",
    "RolloutCallback",
    "SFTModule",
    "Sampling",
    "Score",
    "ScoringData",
    "StratosDataModule",
    "StudentLikelihoodData",
    "StudentOPDData",
    "StudentRLData",
    "StudentSFTData",
    "Teacher",
    "TeacherRLData",
    "TeacherSFTData",
    "Trainer",
]

# In a notebook, tqdm asks for widgets when it is imported; our bars need none.
warnings.filterwarnings("ignore", ".*IProgress not found.*")

EXPORTS = {
    "callbacks": ("ResponseCallback", "RolloutCallback"),
    "datamodules": (
        *("EvaluationDataModule", "ScoringData", "StratosDataModule", "StudentLikelihoodData"),
        *("StudentOPDData", "StudentRLData", "StudentSFTData", "TeacherRLData", "TeacherSFTData"),
    ),
    "engines": ("Sampling",),
    "modules": ("EvaluationModule", "OPDModule", "RLTModule", "SFTModule"),
    "modules.optimizer": ("OptimizerConfig",),
    "rewards": ("RLTReward",),
    "teacher": ("Explanation", "Score", "Teacher"),
    "trainer": ("Trainer",),
}


def __getattr__(name: str) -> Any:
    """Import what a script asks for."""
    for module, names in EXPORTS.items():
        if name in names:
            grow_segments(os.environ)
            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what can be imported from here."""
    return sorted({*globals(), *__all__})
