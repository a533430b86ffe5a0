"""Lightning's sharding strategies, as an RL step with several micro-batches needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn
from typing_extensions import override

from rlt_lightning.checkpoints.folder import WEIGHTS
from rlt_lightning.checkpoints.named import NamedCheckpoints
from rlt_lightning.models.weights import Deferred, Read, WeightFiles, full_shape, trained, trained_parameters
from rlt_lightning.types import InputError

# What DeepSpeed's optimizers call this rank's fp32 weights: ZeRO-3, ZeRO-1 and 2, ZeRO-1 with bf16.
FLAT_WEIGHTS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)


class DeepSpeed(NamedCheckpoints, DeepSpeedStrategy):
    """DeepSpeed ZeRO-1, 2 or 3, on GPUs and, by gloo, on CPUs.

    Args:
        stage: 1 shards optimizer states, 2 gradients too, 3 weights too.
        logging_batch_size_per_gpu: Of DeepSpeed's own reports alone.
        kwargs: Lightning's, such as offload_optimizer and offload_parameters.
    """

    def __init__(self, stage: int = 3, logging_batch_size_per_gpu: int = 1, **kwargs: Any) -> None:
        if find_spec("deepspeed") is None:
            raise InputError(
                "A strategy of DeepSpeed needs its package, but it is not installed. Install the extra: "
                "pip install -e '.[deepspeed]'; or use configs/overlays/fsdp2.yaml."
            )
        if kwargs.get("offload_parameters") and stage != 3:
            raise InputError(
                f"offload_parameters is for stage 3, which has weights in shards, but stage is {stage}. Use "
                "offload_optimizer alone, or stage 3."
            )
        super().__init__(stage=stage, logging_batch_size_per_gpu=logging_batch_size_per_gpu, **kwargs)

    @override
    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_environment()
            return
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read as deepspeed is imported
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute
        self.parallel_devices = [torch.device("cpu", i) for i in range(len(self.parallel_devices or ()))]
        DDPStrategy.setup_environment(self)

    @override
    def setup(self, trainer: Any) -> None:
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = self.lightning_module.optimizer_config.max_grad_norm
        self.precision_plugin.convert_input = lambda data: data  # type: ignore[method-assign]  # token ids
        policy, read = self.lightning_module.policy, self.lightning_module.entry.read
        if read is None:
            read = {name: parameter.data for name, parameter in trained_parameters(policy)}.__getitem__
        super().setup(trainer)
        if self.optimizers and "bf16" in self.config:
            self.start_from(read)

    def start_from(self, read: Read) -> None:
        """Undo, in the fp32 weights, the rounding to half precision of those that they were made from."""
        for name, parameter in trained_parameters(self.lightning_module.policy):
            whole = read(name)
            if whole.dtype != torch.bfloat16:
                set_state(parameter, whole, None)

    @override
    def model_sharded_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        self._init_config_if_needed()
        assert isinstance(self.config, dict)
        if "bf16" in self.config:  # by trainer.precision
            self.config["bf16"]["check_grad_overflow"] = False  # it would skip the step; we stop the run
            self.config["communication_data_type"] = "fp32"  # of gradients
            self.config["data_types"] = {"grad_accum_dtype": "fp32"}
        self.config["zero_force_ds_cpu_optimizer"] = False  # PyTorch's fused AdamW needs no compiler
        return nullcontext()  # the module shards what it loads

    # Checkpoints hold the fp32 weights that the optimizer keeps, whatever type the model runs in.

    @override
    def weights(self, policy: Any) -> dict[str, Any]:
        if not self.optimizers:
            return trained(policy)
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            name: fp32_state(tensor, partial(safe_get_full_fp32_param, tensor))
            if isinstance(tensor, nn.Parameter)
            else tensor
            for name, tensor in trained(policy).items()
        }

    @override
    def moments(self, policy: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        states = self.flat_states()
        if not states:  # no step was taken
            return
        self.link_moments()
        step = states[0]["step"]
        keys = [key for key, value in states[0].items() if torch.is_tensor(value) and value.ndim]
        for name, parameter in trained_parameters(policy):
            get = partial(safe_get_full_optimizer_state, parameter)
            moments = {key: fp32_state(parameter, partial(get, key)) for key in keys}
            yield name, {"step": step.clone()} | moments

    def link_moments(self) -> None:
        """Let stages 1 and 2 find a parameter's part of the moments.

        DeepSpeed does so once, after it has stepped the first group of parameters: the others have none yet.
        """
        if not self.zero_stage_3:
            self.optimizers[0]._hp_optimizer_states_linked = False
            self.optimizers[0]._lazy_init_hp_params_optimizer_state()

    def flat_states(self) -> list[dict[str, Any]]:
        """The state of each flat tensor of this rank that the optimizer has stepped."""
        return [state for state in self.optimizers[0].optimizer.state.values() if state]

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
        step = next(iter(numbers.values()))["step"]
        [flats] = [getattr(zero, name) for name in FLAT_WEIGHTS if hasattr(zero, name)]
        for flat in flats:
            moments = {key: torch.zeros_like(flat) for key in files}
            zero.optimizer.state[flat] = {"step": step.clone(), **moments}
        self.link_moments()
        for name, parameter in trained_parameters(policy):
            for key, file in files.items():
                set_state(parameter, file(name), key)

    # The engine's forward is for micro-batches, not for the steps that run several of them.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.lightning_module.predict_step(*args, **kwargs)


def fp32_state(parameter: Tensor, full_tensor: Callable[[], Tensor]) -> Deferred:
    """What DeepSpeed's optimizer keeps of a parameter in shards, made whole when all ranks ask for it."""
    return Deferred(torch.Size(full_shape(parameter)), torch.float32, full_tensor)


def set_state(parameter: Any, whole: Tensor, key: str | None) -> None:
    """Set what DeepSpeed's optimizer holds of a parameter: its fp32 weight (None), or one of its moments."""
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
    size = parameter.ds_tensor.numel()  # equal on all ranks, so the last one's may be padded
    start = size * torch.distributed.get_rank()
    flat = nn.functional.pad(
        whole.flatten(), (0, max(0, size * torch.distributed.get_world_size() - whole.numel()))
    )
    own = flat[start : start + size]
    if key is None:
        safe_set_local_fp32_param(parameter, own)
    else:
        safe_set_local_optimizer_state(parameter, own, key)
