"""Choose the engine where none is set: vLLM on NVIDIA GPUs, else the trainer's own model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer

from rlt_lightning.engines.base import Engine
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.engines.launch import Launch, find_executable
from rlt_lightning.engines.push import NoPush
from rlt_lightning.engines.vllm import VLLMEngine
from rlt_lightning.models.embedded import DEFAULT_MODEL, MINIATURES

# Of a GPU's memory, where the trainer's weights and moments stay while a worker is awake.
SHARED_MEMORY = 0.4


def find_gpus(trainer: Trainer) -> list[int]:
    """Return the NVIDIA GPUs of this node that the trainer uses, counted among those that it sees."""
    is_nvidia = trainer.strategy.root_device.type == "cuda" and torch.version.hip is None
    return list(trainer.device_ids) if is_nvidia else []


def choose_engine(
    gpus: Sequence[int], model: str, pushes: bool, installed: bool | None = None
) -> tuple[Engine, str | None]:
    """Return the engine of a run that sets none, and why.

    no NVIDIA GPU, a model that comes with the package    HFEngine: a worker starts slower than these sample
    vllm is not installed                                 HFEngine, and what to install
    the trainer holds weights                             a worker on each of its GPUs, in turns with it
    it holds none, and is one process                     a worker that loads the model itself
    it holds none, and is several processes               HFEngine: workers answer one process

    Args:
        gpus: The trainer's NVIDIA GPUs on this node, a process each.
        model: Name of the model that samples.
        pushes: Whether the trainer holds weights, which are pushed.
        installed: Whether vllm is; None: look for it.
    """
    if not gpus or model in (DEFAULT_MODEL, *MINIATURES):
        return HFEngine(), None
    if not (find_executable("vllm") if installed is None else installed):
        return HFEngine(), (
            "rollouts.engine: HFEngine, as vllm is not installed, which samples many times faster: pip "
            "install 'rlt-lightning[vllm]'"
        )
    if not pushes and len(gpus) > 1:
        return HFEngine(), (
            f"rollouts.engine: HFEngine in {len(gpus)} processes, since vLLM workers answer one. With "
            "trainer.devices 1, or with hardware/evaluate_8gpu, vLLM samples"
        )
    # As many tokens as fit into the memory.
    arguments = ["--max-model-len", "auto"]
    if pushes:
        arguments += ["--enable-sleep-mode", "--gpu-memory-utilization", str(SHARED_MEMORY)]
    workers = [[gpu] for gpu in gpus]
    launch = Launch(num_workers=len(gpus), gpus=workers, dtype="bfloat16", arguments=arguments)
    push = None if pushes else NoPush()
    how = ", in turns with the trainer" if pushes else ""
    reason = f"rollouts.engine: vLLM on GPUs {', '.join(map(str, gpus))}{how}, since vllm is installed"
    return VLLMEngine(launch=launch, push=push, sleep=pushes), reason
