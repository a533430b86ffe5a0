"""Read from the settings which workers sample, on which GPUs, and how weights reach them."""

from __future__ import annotations

from typing import Any

from rlt_lightning.engines import Engine
from rlt_lightning.plan.inputs import LanguageModel, PlannedWorkers
from rlt_lightning.plan.options import PlanOptions
from rlt_lightning.plan.processes import count_devices, gpu_ids

# Stated, GB/s; docs/planning.md says where each comes from.
PUSH_GB_S = {"gloo": 0.8, "disk": 0.8, "nccl": 50.0}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def push_bandwidth(engine: Engine, options: PlanOptions) -> float:
    """Return the rate at which weights reach the workers, bytes per second."""
    workers = engine.describe().workers
    backend = workers.push_backend if workers else None
    return 1e9 * (options.push_gb_s or PUSH_GB_S.get(backend or "", 1.0))


def read_worker(
    engine: Engine, policy: LanguageModel, devices: Any, options: PlanOptions, notes: list[str]
) -> PlannedWorkers | None:
    """Return what the settings say of the workers that sample; None if the engine has none.

    Args:
        engine: The engine, not started.
        policy: The model that they sample with.
        devices: trainer.devices, to find out whether workers share GPUs with the trainer.
        options: The options of the plan, which describe workers that run already.
        notes: Assumptions are added here.
    """
    settings = engine.describe().workers
    if settings is None:
        return None
    push_bytes = policy.weight_bytes if settings.push_dtype is None else settings.push_dtype.itemsize
    utilization = options.gpu_memory_utilization
    launch = settings.launch
    if launch is None:
        size = options.tensor_parallel_size
        num_gpus, weight_bytes, colocated = settings.num_workers * size, 2, False
        notes.append(
            f"{settings.num_workers} workers by URL, each on {size} separate GPUs, all alike, in bfloat16"
        )
    else:
        size = launch.tensor_parallel_size
        num_gpus = launch.num_workers * size * launch.data_parallel_size
        weight_bytes = DTYPE_BYTES.get(launch.dtype, 2)
        words = [word for argument in launch.arguments for word in argument.split("=")]
        if "--gpu-memory-utilization" in words:
            utilization = float(words[words.index("--gpu-memory-utilization") + 1])
        colocated = bool({gpu for ids in launch.gpus or [[0]] for gpu in ids} & trainer_gpus(devices))
    return PlannedWorkers(
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
        pushed=settings.push_backend is not None,
    )


def trainer_gpus(devices: Any) -> set[int]:
    """Return the ids of the GPUs that train on one machine, from trainer.devices."""
    if not isinstance(devices, int) and "," in str(devices):
        return set(gpu_ids(devices))
    return set(range(count_devices(devices, False, [])))
