"""Read from the settings which devices train and which ones sample."""

from __future__ import annotations

from typing import Any

import torch

from rlt_lightning.engines import Engine
from rlt_lightning.planner.inputs import LanguageModel, Worker
from rlt_lightning.planner.options import PlanOptions

PUSH_GB_S = {"gloo": 1.0, "disk": 1.0, "nccl": 50.0}  # stated; gloo and disk by benchmarks/push.py
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def count_devices(devices: Any, on_cpu: bool, notes: list[str]) -> int:
    """Processes on one machine, as trainer.devices says it."""
    if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
        devices = int(devices)
    if devices in ("auto", -1):
        found = 1 if on_cpu else max(1, torch.cuda.device_count())
        notes.append(f"trainer.devices is {devices}: planned for {found}, set it for another number")
        return found
    return devices if isinstance(devices, int) else len(gpu_ids(devices))


def gpu_ids(devices: Any) -> list[int]:
    """The ids of a list, or of a text such as "0,1"."""
    words = devices.split(",") if isinstance(devices, str) else devices
    return [int(word) for word in words if str(word).strip()]


def push_backend(engine: Engine) -> str:
    """Return the name of the way that weights travel to the engine; empty if they do not."""
    workers = engine.describe().workers
    return workers.push_backend or "" if workers else ""


def worker_of(
    engine: Engine, policy: LanguageModel, devices: Any, options: PlanOptions, notes: list[str]
) -> Worker | None:
    """Return what is known of the workers that sample; None if the engine has none."""
    settings = engine.describe().workers
    if settings is None:
        return None
    launch = settings.launch
    push_bytes = policy.weight_bytes if settings.push_dtype is None else settings.push_dtype.itemsize
    utilization = options.gpu_memory_utilization
    if launch is None:
        size = options.tensor_parallel_size
        num_gpus, weight_bytes, colocated = settings.num_workers * size, 2, False
        notes.append(
            f"{settings.num_workers} workers by URL, each on {size} GPUs of its own, all alike, in bfloat16"
        )
    else:
        size = launch.tensor_parallel_size
        num_gpus = launch.num_workers * size * launch.data_parallel_size
        weight_bytes = DTYPE_BYTES.get(launch.dtype, 2)
        words = [word for argument in launch.arguments for word in argument.split("=")]
        if "--gpu-memory-utilization" in words:
            utilization = float(words[words.index("--gpu-memory-utilization") + 1])
        own = set(gpu_ids(devices)) if not isinstance(devices, int) and "," in str(devices) else None
        taken = {gpu for ids in launch.gpus or [[0]] for gpu in ids}
        trained_on = own if own is not None else set(range(count_devices(devices, False, [])))
        colocated = bool(taken & trained_on)
    return Worker(
        num_gpus=num_gpus,
        tensor_parallel_size=size,
        weight_bytes=weight_bytes,
        gpu_memory_utilization=utilization,
        max_sequences=settings.max_sequences,
        push_bytes=push_bytes,
        only_adapter=engine.takes_adapters,
        bucket_bytes=settings.push_bytes,
        colocated=colocated,
        sleeps=engine.takes_turns,
    )
