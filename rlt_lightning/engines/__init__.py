"""Engines, which sample completions, and the ways in which weights reach them."""

from rlt_lightning.engines.base import (
    Engine,
    EngineError,
    Placement,
    SampleRequest,
    Sampling,
    WorkersLost,
)
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.engines.launch import Launch
from rlt_lightning.engines.push import GlooPush, IPCPush, NoPush, WeightPush
from rlt_lightning.engines.vllm import VLLMEngine

__all__ = [
    "Engine",
    "EngineError",
    "GlooPush",
    "HFEngine",
    "IPCPush",
    "Launch",
    "NoPush",
    "Placement",
    "SampleRequest",
    "Sampling",
    "VLLMEngine",
    "WeightPush",
    "WorkersLost",
]
