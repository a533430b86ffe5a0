"""DeepSpeed ZeRO for a step of several micro-batches, with our checkpoints.

DeepSpeed's engine expects one forward per call; an RL step runs several, so the strategy calls the module
directly and the module calls the engine (`ModelEntry`). In the order of a run:

    setup_environment      gloo on CPUs, instead of DeepSpeed's accelerator
    model_sharded_context  settings of bfloat16; the module itself shards what it loads (ZeRO3.fill)
    setup                  clipping; the engine is made; start_from: fp32 weights as they are in the files
    training_step          module.training_step, without the engine's forward around it
    save_checkpoint        weights() and moments(): fp32, gathered tensor by tensor (checkpoints/io.py)
    load_checkpoint        weights in the model, then in the optimizer's fp32 copy, then restore_moments()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from rlt_lightning.checkpoints.folder import WEIGHTS
from rlt_lightning.checkpoints.io import NamedCheckpoints, name_parameters, place_step
from rlt_lightning.models.weights import (
    Deferred,
    Read,
    WeightFiles,
    full_shape,
    trained_parameters,
    trained_tensors,
)
from rlt_lightning.types import InputError, missing_package

# The names of this rank's fp32 weights in DeepSpeed's optimizers: ZeRO-3, ZeRO-1 and 2, ZeRO-1 with bf16.
FLAT_WEIGHTS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)


def call_module(verb: str, context: str) -> Any:
    """Return a step of the strategy without the engine's forward: that is for one of its micro-batches."""

    def step(self: DeepSpeed, *args: Any, **kwargs: Any) -> Any:
        with getattr(self.precision_plugin, f"{context}_step_context")():
            return getattr(self.lightning_module, f"{verb}_step")(*args, **kwargs)

    return step


class DeepSpeed(NamedCheckpoints, DeepSpeedStrategy):
    """DeepSpeed ZeRO-1, 2 or 3, on GPUs and, by gloo, on CPUs.

    Args:
        stage: 1 shards optimizer states, 2 gradients too, 3 weights too.
        logging_batch_size_per_gpu: The batch size in DeepSpeed's reports, and nowhere else.
        kwargs: Options of Lightning's strategy, such as offload_optimizer and offload_parameters.
    """

    def __init__(self, stage: int = 3, logging_batch_size_per_gpu: int = 1, **kwargs: Any) -> None:
        if find_spec("deepspeed") is None:
            instead = "use --config hardware/fsdp2"
            raise missing_package("A strategy of DeepSpeed", "deepspeed", "deepspeed", instead)
        if kwargs.get("offload_parameters") and stage != 3:
            raise InputError(
                f"offload_parameters is for stage 3, which has weights in shards, but stage is {stage}. Use "
                "only offload_optimizer, or stage 3."
            )
        super().__init__(stage=stage, logging_batch_size_per_gpu=logging_batch_size_per_gpu, **kwargs)

    @override
    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_environment()
            return
        # deepspeed reads this when it is imported.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.ops

        # It would compile for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.parallel_devices = [torch.device("cpu", i) for i in range(len(self.parallel_devices or ()))]
        DDPStrategy.setup_environment(self)

    @override
    def setup(self, trainer: Any) -> None:
        # Batches hold token ids, which must not be cast.
        self.precision_plugin.convert_input = lambda data: data  # type: ignore[method-assign]
        # DeepSpeed leaves a module where it is if its weights are in shards; metrics meet the other ranks'.
        for part in self.lightning_module.modules():
            if isinstance(part, Metric):
                part.to(self.root_device)
        if not trainer.training:
            super().setup(trainer)
            return
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = self.lightning_module.optimizer_config.max_grad_norm
        policy, read = self.lightning_module.policy, self.lightning_module.entry.read
        if read is None:
            # In main memory: on a GPU both they and DeepSpeed's copies would be there at a time.
            read = {name: parameter.data.cpu() for name, parameter in trained_parameters(policy)}.__getitem__
        super().setup(trainer)
        if "bf16" in self.config:
            self.start_from(read)

    @override
    def _init_optimizers(self) -> Any:
        optimizer, lr_scheduler = super()._init_optimizers()
        name_parameters(optimizer, self.lightning_module.policy)
        return optimizer, lr_scheduler

    def start_from(self, read: Read) -> None:
        """Set the optimizer's fp32 weights from the files, since DeepSpeed made them from rounded ones."""
        for name, parameter in trained_parameters(self.lightning_module.policy):
            whole = read(name)
            if whole.dtype != torch.bfloat16:
                set_state(parameter, whole, None)

    @override
    def model_sharded_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        self._init_config_if_needed()
        assert isinstance(self.config, dict)
        if "bf16" in self.config:
            # DeepSpeed would skip a step that overflows; the module stops the run.
            self.config["bf16"]["check_grad_overflow"] = False
            # Gradients are exchanged and added up in fp32.
            self.config["communication_data_type"] = "fp32"
            self.config["data_types"] = {"grad_accum_dtype": "fp32"}
        # PyTorch's fused AdamW needs no compiler.
        self.config["zero_force_ds_cpu_optimizer"] = False
        # The module shards what it loads.
        return nullcontext()

    # Checkpoints hold the fp32 weights that the optimizer keeps, whatever type the model runs in.

    @override
    def weights(self, policy: Any) -> dict[str, Any]:
        if not self.optimizers:
            return trained_tensors(policy)
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            name: fp32_state(tensor, partial(safe_get_full_fp32_param, tensor))
            if isinstance(tensor, nn.Parameter)
            else tensor
            for name, tensor in trained_tensors(policy).items()
        }

    @override
    def moments(self, policy: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        # Of each flat tensor of this rank that the optimizer has stepped.
        states = [state for state in self.optimizers[0].optimizer.state.values() if state]
        if not states:
            return
        self.link_moments()
        keys = [key for key, value in states[0].items() if torch.is_tensor(value) and value.ndim]
        numbers = {key: value for key, value in states[0].items() if key not in keys}  # step
        for name, parameter in trained_parameters(policy):
            get = partial(safe_get_full_optimizer_state, parameter)
            moments = {key: fp32_state(parameter, partial(get, key)) for key in keys}
            # A copy for each weight: AdamW counts its steps in place.
            yield name, deepcopy(numbers) | moments

    def link_moments(self) -> None:
        """Let stages 1 and 2 find each parameter's part of the moments.

        DeepSpeed does it once, after it has stepped the first group of parameters, when others have none yet.
        """
        if not self.zero_stage_3:
            self.optimizers[0]._hp_optimizer_states_linked = False
            self.optimizers[0]._lazy_init_hp_params_optimizer_state()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        state = super().load_checkpoint(checkpoint_path, weights_only)
        if self.optimizers:
            files = WeightFiles(str(Path(checkpoint_path) / WEIGHTS))
            for name, parameter in trained_parameters(self.lightning_module.policy):
                set_state(parameter, files(name), None)
        return state

    @override
    def restore_moments(
        self, policy: Any, numbers: dict[str, dict[str, Any]], files: dict[str, WeightFiles]
    ) -> None:
        if not numbers:
            return
        zero = self.optimizers[0]
        counts = next(iter(numbers.values()))
        [flats] = [getattr(zero, name) for name in FLAT_WEIGHTS if hasattr(zero, name)]
        for flat in flats:
            moments = {key: torch.zeros_like(flat) for key in files}
            counted = {key: place_step(zero.optimizer, flat, value) for key, value in counts.items()}
            zero.optimizer.state[flat] = counted | moments
        self.link_moments()
        for name, parameter in trained_parameters(policy):
            for key, file in files.items():
                set_state(parameter, file(name), key)

    training_step, validation_step, test_step, predict_step = map(
        call_module, ("training", "validation", "test", "predict"), ("train", "val", "test", "predict")
    )


def fp32_state(parameter: Tensor, full_tensor: Callable[[], Tensor]) -> Deferred:
    """Return a placeholder for a parameter's optimizer state, gathered when all ranks read it."""
    return Deferred(torch.Size(full_shape(parameter)), torch.float32, full_tensor)


def set_state(parameter: Any, whole: Tensor, key: str | None) -> None:
    """Set a parameter's fp32 weight (key None) or one of its moments in DeepSpeed's optimizer."""
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    whole = whole.float()
    if not hasattr(parameter, "ds_tensor"):
        if key is None:
            safe_set_full_fp32_param(parameter, whole)
        else:
            safe_set_full_optimizer_state(parameter, whole, key)
        return
    # The size is the same on all ranks, so the last rank's part may be padded.
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank()
    flat = nn.functional.pad(
        whole.flatten(), (0, max(0, size * torch.distributed.get_world_size() - whole.numel()))
    )
    shard = flat[start : start + size]
    if key is None:
        safe_set_local_fp32_param(parameter, shard)
    else:
        safe_set_local_optimizer_state(parameter, shard, key)
