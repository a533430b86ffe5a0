"""What a rollout can come from."""

from rlt_lightning.engines.base import Engine, EngineError, Sampling
from rlt_lightning.engines.hf import HFEngine

__all__ = ["Engine", "EngineError", "HFEngine", "Sampling"]
