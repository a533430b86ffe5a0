"""What a user tells `rlt plan`: the GPU, its memory, expected lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlt_lightning.types import InputError

# Memory that the driver shows, GiB; dense bf16 products, FLOP/s; memory bandwidth, bytes/s. From NVIDIA's
# data sheets of the SXM cards.
GPUS = {
    "A100": (79.3, 312e12, 2.0e12),
    "H100": (79.6, 989e12, 3.35e12),
    "H200": (140.4, 989e12, 4.8e12),
    "B200": (178.4, 2250e12, 7.7e12),
}
CUDA_GIB = 2.0  # stated: CUDA context, libraries' workspaces, NCCL, and what fragmentation wastes
CPU_BANDWIDTH = 20e9  # stated, bytes/s


@dataclass(frozen=True)
class PlanOptions:
    """What a plan needs to know beyond the settings of the run.

    Args:
        verb: What is planned: fit or predict; None: predict where settings say so that only `rlt predict`
            reads. An evaluation is always planned as `rlt test`.
        device: H100, H200, A100, B200 or cpu; auto: cpu where trainer.accelerator says so, else H100.
        device_gib: Memory of one device, GiB; None: the device's, or this machine's shared by processes.
        tflops: Peak of its matrix products, TFLOP/s; None: the device's, or measured on this CPU.
        bandwidth_gb_s: Rate of its memory, GB/s; None: the device's.
        mfu: Part of the peak that products reach, counting the ones that gradient checkpointing repeats.
        prompt_length: Longest prompt, tokens; None: data.max_prompt_length, in fine-tuning 0.
        completion_length: Longest completion, tokens; None: the sampling limit, in fine-tuning
            data.max_length less the prompt.
        mean_prompt_length: Mean of prompts, tokens; None: of the rows, or 1/16 of the longest.
        mean_completion_length: Mean of completions, tokens; None: of the rows, or 0.3 of the longest.
            Memory is for the longest lengths, time for lengths with these means.
        gpu_memory_utilization: Part of a GPU that a vLLM worker takes; launch.arguments take precedence.
        tensor_parallel_size: GPUs that share a copy of the weights, for workers that are named by URL.
        decode_tokens_per_s: Rate of one copy; None: from its memory bandwidth and mfu.
        push_gb_s: Rate at which weights reach workers, GB/s; None: 0.8 by gloo or disk, 50 by NCCL.
        json: File that the plan is also written to.
    """

    verb: Literal["fit", "predict"] | None = None
    device: str = "auto"
    device_gib: float | None = None
    tflops: float | None = None
    bandwidth_gb_s: float | None = None
    mfu: float = 0.4
    prompt_length: int | None = None
    completion_length: int | None = None
    mean_prompt_length: int | None = None
    mean_completion_length: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    decode_tokens_per_s: float | None = None
    push_gb_s: float | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", *GPUS):
            raise InputError(f"plan.device must be auto, cpu, {', '.join(GPUS)}, but is {self.device}.")
        numbers = (
            "device_gib",
            "tflops",
            "bandwidth_gb_s",
            "prompt_length",
            "completion_length",
            "mean_prompt_length",
            "mean_completion_length",
            "push_gb_s",
        )
        for name in (*numbers, "decode_tokens_per_s", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"plan.{name} must be above 0, but is {value}.")
        if self.json is not None and not Path(self.json).resolve().parent.is_dir():
            raise InputError(f"plan.json must be in a folder that exists, but is {self.json}.")
        parts = {"mfu": self.mfu, "gpu_memory_utilization": self.gpu_memory_utilization}
        for name, value in parts.items():
            if not 0 < value <= 1:
                raise InputError(f"plan.{name} must be above 0 and at most 1, but is {value}.")
