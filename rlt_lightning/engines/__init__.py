"""Engines, which sample completions, and the ways in which weights reach them."""

from rlt_lightning.engines.base import (
    Engine,
    EngineError,
    Placement,
    SampleRequest,
    Sampling,
    WorkersLost,
    build_requests,
    sample_all,
)
from rlt_lightning.engines.budget import BudgetedCompletion, BudgetForcing, sample_with_budget
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.engines.launch import Launch
from rlt_lightning.engines.nccl import NCCLPush
from rlt_lightning.engines.push import AdapterPush, DiskPush, GlooPush, NoPush, WeightPush
from rlt_lightning.engines.vllm import VLLMEngine

__all__ = [
    "AdapterPush",
    "BudgetForcing",
    "BudgetedCompletion",
    "DiskPush",
    "Engine",
    "EngineError",
    "GlooPush",
    "HFEngine",
    "Launch",
    "NCCLPush",
    "NoPush",
    "Placement",
    "SampleRequest",
    "Sampling",
    "VLLMEngine",
    "WeightPush",
    "WorkersLost",
    "build_requests",
    "sample_all",
    "sample_with_budget",
]
