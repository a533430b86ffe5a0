"""Engines, which sample completions, and the ways in which weights reach them."""

from rlt_lightning.engines.base import (
    Engine,
    EngineDescription,
    EngineError,
    Placement,
    SampleRequest,
    Sampling,
    WorkerSettings,
    WorkersLost,
    build_requests,
    sample_all,
)
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.engines.launch import Launch
from rlt_lightning.engines.push import AdapterPush, GlooPush, IPCPush, NoPush, WeightPush
from rlt_lightning.engines.vllm import VLLMEngine

__all__ = [
    "AdapterPush",
    "Engine",
    "EngineDescription",
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
    "WorkerSettings",
    "WorkersLost",
    "build_requests",
    "sample_all",
]
