"""Read from the settings which processes train, on which device, and how they divide the weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from rlt_lightning.modules.base import require_precision
from rlt_lightning.modules.meter import GIB, matmul_rate, resident_bytes
from rlt_lightning.plan.inputs import Device, Sharding
from rlt_lightning.plan.options import CPU_BANDWIDTH, CUDA_GIB, GPUS, PlanOptions
from rlt_lightning.types import InputError

ZERO_STAGES: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
# Other names of the precisions that the modules accept.
PRECISIONS = {"bf16": "bf16-mixed", "32": "32-true", "None": "32-true"}


@dataclass(frozen=True)
class Processes:
    """The processes that train."""

    on_cpu: bool
    per_machine: int
    number: int  # on all machines
    sharding: Sharding
    strategy: dict[str, Any]  # settings of the strategy
    mixed: bool  # matrix products in bfloat16 of fp32 weights

    @property
    def use_deepspeed(self) -> bool:
        """Return whether DeepSpeed steps the optimizer."""
        return self.sharding.startswith("zero")

    @property
    def cast_models(self) -> bool:
        """Return whether whole models are cast to bfloat16, rather than each product's operands."""
        return self.mixed and (self.use_deepspeed or self.sharding == "fsdp2")


def read_processes(trainer: Any, options: PlanOptions, notes: list[str]) -> Processes:
    """Read how many processes train and what they divide.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        options: The options of the plan.
        notes: Assumptions are added here.

    Raises:
        InputError: If the strategy or the precision is not supported.
    """
    on_cpu = options.device == "cpu" or (options.device == "auto" and trainer.accelerator == "cpu")
    per_machine = count_devices(trainer.devices, on_cpu, notes)
    number = per_machine * int(trainer.num_nodes)
    sharding, strategy = sharding_named(trainer.strategy, number)
    precision = PRECISIONS.get(str(trainer.precision), str(trainer.precision))
    require_precision(precision)
    return Processes(on_cpu, per_machine, number, sharding, strategy, mixed=precision == "bf16-mixed")


def count_devices(devices: Any, on_cpu: bool, notes: list[str]) -> int:
    """Return the number of processes on one machine, from trainer.devices."""
    if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
        devices = int(devices)
    if devices in ("auto", -1):
        found = 1 if on_cpu else max(1, torch.cuda.device_count())
        notes.append(f"trainer.devices is {devices}: planned for {found}, set it for another number")
        return found
    return devices if isinstance(devices, int) else len(gpu_ids(devices))


def gpu_ids(devices: Any) -> list[int]:
    """Return the ids in a list, or in a text such as "0,1"."""
    words = devices.split(",") if isinstance(devices, str) else devices
    return [int(word) for word in words if str(word).strip()]


def sharding_named(strategy: Any, num_processes: int) -> tuple[Sharding, dict[str, Any]]:
    """Return how a strategy divides the weights, and its settings.

    Raises:
        InputError: If the planner does not know the strategy.
    """
    if isinstance(strategy, str):
        if strategy == "auto":
            return ("ddp" if num_processes > 1 else "whole"), {}
        if strategy.startswith("ddp"):
            return "ddp", {}
    else:
        settings = dict(strategy.get("init_args") or {}) | dict(strategy.get("dict_kwargs") or {})
        name = str(strategy.get("class_path")).rpartition(".")[2]
        if name == "FSDP2":
            return "fsdp2", settings
        if name == "DeepSpeed" and int(settings.get("stage", 3)) in ZERO_STAGES:
            return ZERO_STAGES[int(settings.get("stage", 3))], settings
        if name in ("DDPStrategy", "SingleDeviceStrategy"):
            return ("ddp" if name == "DDPStrategy" else "whole"), {}
    raise InputError(
        "rlt plan knows the strategies auto, ddp, rlt_lightning.strategies.FSDP2 and "
        f"rlt_lightning.strategies.DeepSpeed of stage 1 to 3, but trainer.strategy is {strategy}. Use one."
    )


def read_device(options: PlanOptions, processes: Processes, notes: list[str]) -> Device:
    """Return the device of one process: this CPU, measured, or a GPU by its data sheet."""
    name = "H100" if options.device == "auto" else options.device
    if processes.on_cpu:
        name = "cpu"
        # Measured before the steps below take more memory.
        reserved = resident_bytes() or 0.5 * GIB
        machine_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
        gib, bandwidth = machine_gib / processes.per_machine, CPU_BANDWIDTH
        dtype = torch.bfloat16 if processes.mixed else torch.float32
        peak = 1e12 * options.tflops if options.tflops else matmul_rate(torch.device("cpu"), dtype)
    else:
        reserved = CUDA_GIB * GIB
        gib, peak, bandwidth = GPUS[name]
        peak = 1e12 * options.tflops if options.tflops else peak
        if options.device == "auto":
            notes.append("plan.device is not set: planned for an H100")
    return Device(
        name=name,
        memory=GIB * (options.device_gib or gib),
        flops=peak,
        bandwidth=1e9 * options.bandwidth_gb_s if options.bandwidth_gb_s else bandwidth,
        reserved=reserved,
    )
