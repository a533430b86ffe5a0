"""Reinforcement-Learned Teachers (RLT, arXiv:2506.08388) as a PyTorch Lightning trainer.

What a script needs is here; it is imported at its first use, so that `import rlt_lightning` takes no time.
"""

import os
import warnings
from collections.abc import MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlt_lightning.moved import install
from rlt_lightning.version import __version__ as __version__

if TYPE_CHECKING:
    from rlt_lightning.callbacks import ResponseCallback, RolloutCallback
    from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
    from rlt_lightning.engines import Sampling
    from rlt_lightning.modules import EvaluationModule, OPDModule, RLTModule, SFTModule
    from rlt_lightning.modules.optimizer import OptimizerConfig
    from rlt_lightning.numerics import RLTReward
    from rlt_lightning.python import Explanation, Score, Teacher, Trainer, score

# Sets how PyTorch takes memory of a GPU: in the trainer's processes, not in workers (`LocalServer`).
ALLOCATOR = "PYTORCH_ALLOC_CONF"

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
    "StratosDataModule",
    "Teacher",
    "Trainer",
    "score",
]

install()

# In a notebook, tqdm asks for widgets when it is imported; our bars need none.
warnings.filterwarnings("ignore", ".*IProgress not found.*")

PLACES = {
    "callbacks": ("ResponseCallback", "RolloutCallback"),
    "datamodules": ("EvaluationDataModule", "StratosDataModule"),
    "engines": ("Sampling",),
    "modules": ("EvaluationModule", "OPDModule", "RLTModule", "SFTModule"),
    "modules.optimizer": ("OptimizerConfig",),
    "numerics": ("RLTReward",),
    "python": ("Explanation", "Score", "Teacher", "Trainer", "score"),
}


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Let PyTorch's memory on a GPU grow in place, unless the user has set its allocator.

    Rows and caches have other sizes in every step, and fixed segments leave gaps that nothing fits into.
    PyTorch reads the variable once per process, under its older name too, so call this before torch is
    imported. Processes that are started later inherit it. Step 1 of the GPU ladder notes what PyTorch has
    made of it.
    """
    if not {ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment[ALLOCATOR] = "expandable_segments:True"


def __getattr__(name: str) -> Any:
    """Import what a script asks for."""
    for place, names in PLACES.items():
        if name in names:
            grow_segments(os.environ)
            value = getattr(import_module(f"{__name__}.{place}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what can be imported from here."""
    return sorted({*globals(), *__all__})
