"""How a model's weights are stored on the processes of a run: whole, or in shards (FSDP2, DeepSpeed ZeRO-3).

A sharded model is built empty and filled tensor by tensor, so no process ever holds all of it. Every call of
a model goes through its `ModelEntry`, since the sharding libraries gather weights in hooks of a forward:

    module.run(function) → strategy.model(function) → ModelEntry.forward → function(model) → blocks, head
                                                                        │ FSDP2, ZeRO-3: each gathers its
                                                                        │ weights before its forward and its
                                                                        │ backward, and frees them after

    class           weights   gradients         optimizer's states   gathered for a checkpoint
    Unsharded       whole     whole             whole                nothing: rank 0 writes what it has
    FullyShard      sharded   sharded           sharded              by DTensor.full_tensor
    DeepSpeedZeRO   whole     sharded (ZeRO-2)  sharded              by deepspeed's safe_get_full_*
    ZeRO3           sharded   sharded           sharded              by deepspeed's safe_get_full_*

When gradients of all ranks are added up:

    Unsharded (DDP), ZeRO-1   in the last micro-batch of an update; until then a rank keeps whole ones
    FullyShard                the same, or in every micro-batch: reduce_every_micro_batch (fsdp2.py)
    ZeRO-2, ZeRO-3            in every micro-batch
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlt_lightning.models.kernels import find_blocks
from rlt_lightning.models.weights import GROUP_NUMEL, Read, fill_in_place, stored_once
from rlt_lightning.run.console import announce, size_text
from rlt_lightning.strategies.fsdp2 import measure_free_bytes, whole_gradients_fit


class ModelEntry(nn.Module):
    """The one way into a model: `entry(function, *arguments)` returns `function(model, *arguments)`.

    Args:
        model: The model.
    """

    # Reads the weights of the start again, if they were read tensor by tensor.
    read: Read | None = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(model, *arguments)`."""
        return function(self.model, *arguments)


class WeightLayout:
    """What the processes of a run hold of a model's weights; a strategy decides it.

    Args:
        strategy: Lightning's strategy.
    """

    # Whether every process holds a part of each weight, so that all ranks must run a forward together.
    sharded = False
    # Whether the optimizer keeps its states, and steps, in main memory.
    steps_on_cpu = False

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def fill(self, model: nn.Module, read: Read) -> ModelEntry:
        """Fill an empty model with its weights, in shards, where `sharded`."""
        raise NotImplementedError

    def freeze(self, entry: Any) -> Callable[..., Any]:
        """Prepare a model that is not trained, and return the function that calls it."""
        return entry

    def prepare_fit(self) -> None:
        """Choose by free memory, alike on all ranks, once all weights are loaded."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch; `last` is whether it is the last of an update."""
        return nullcontext()

    def step(
        self, optimizer: Any, parameters: list[nn.Parameter], max_norm: float, is_last_update: bool = True
    ) -> Tensor:
        """Clip (0: never), step the optimizer, and return the gradient's norm before clipping.

        Args:
            optimizer: Lightning's optimizer, which counts its steps as `global_step`.
            parameters: What it trains.
            max_norm: The largest norm.
            is_last_update: Whether this step is counted.
        """
        norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm or torch.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if norm.isfinite():
            (optimizer if is_last_update else optimizer.optimizer).step()
        return norm


class Unsharded(WeightLayout):
    """Every process holds all weights: a single process, or DDP."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Let ranks exchange gradients only in a step's last backward."""
        model = self.strategy.model
        return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()


class FullyShard(WeightLayout):
    """PyTorch's FSDP2: every transformer block is sharded by itself, and then the rest of the model."""

    sharded = True
    # Whether gradients of all ranks are added up in every micro-batch.
    reduces_every = True

    def fill(self, model: nn.Module, read: Read) -> ModelEntry:
        """Shard the empty model, then keep this rank's part of each tensor."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": self.strategy.device_mesh["data_parallel"]}
        if self.strategy.precision_plugin.precision == "bf16-mixed":
            # With autocast only, fp32 weights would be gathered and copied to half precision.
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        buffers = dict(model.named_buffers())
        for block in find_blocks(model):
            fully_shard(block, **options)
        # A root keeps its weights whole after a forward by default, and frozen ones would stay so.
        entry: Any = fully_shard(ModelEntry(model), reshard_after_forward=True, **options)
        entry.to_empty(device=self.strategy.root_device)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        fill_in_place(stored_once(model), read)
        return entry

    def prepare_fit(self) -> None:
        """Decide whether gradients of all ranks are added up in every micro-batch."""
        chosen = self.strategy.reduce_every_micro_batch
        if chosen == "auto":
            num_bytes, device = self.count_gradient_bytes(), self.strategy.root_device
            fit = whole_gradients_fit(num_bytes, measure_free_bytes(device, self.strategy.num_processes))
            on_all_ranks = self.strategy.reduce(torch.tensor(float(fit), device=device), reduce_op="min")
            chosen = not on_all_ranks
            when = "every micro-batch" if chosen else "the last micro-batch of an update"
            announce(f"fsdp2: gradients, {size_text(num_bytes)} whole, are added up over ranks in {when}")
        self.reduces_every = chosen

    def count_gradient_bytes(self) -> int:
        """Return the bytes of the whole gradients of all trained weights while they add up."""
        mixed = self.strategy.precision_plugin.precision == "bf16-mixed"
        trained = [p for p in self.strategy.lightning_module.policy.parameters() if p.requires_grad]
        return sum(p.numel() * (4 if mixed else p.dtype.itemsize) for p in trained)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Add up gradients over ranks in this micro-batch, or keep them whole."""
        self.strategy.lightning_module.entry.set_requires_gradient_sync(last or self.reduces_every)
        return nullcontext()


class DeepSpeedZeRO(WeightLayout):
    """DeepSpeed ZeRO-1 and ZeRO-2: optimizer states are sharded, and with ZeRO-2 gradients."""

    @property
    def steps_on_cpu(self) -> bool:  # type: ignore[override]
        """Return whether the strategy has offload_optimizer."""
        return "offload_optimizer" in self.strategy.config["zero_optimization"]

    @property
    def half_precision(self) -> bool:
        """Return whether models run in bfloat16, for which DeepSpeed casts weights, without autocast."""
        return "bf16" in self.strategy.config

    def freeze(self, entry: Any) -> Callable[..., Any]:
        """Cast the weights, but no buffers, as DeepSpeed does with the trained model."""
        if self.half_precision:
            for parameter in entry.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return entry

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Tell the engine before the forward; otherwise it takes every backward for the last one."""
        self.strategy.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def step(
        self, optimizer: Any, parameters: list[nn.Parameter], max_norm: float, is_last_update: bool = True
    ) -> Tensor:
        """Let the engine clip, to the norm in its configuration, and step."""
        (optimizer if is_last_update else self.strategy.model).step()
        norm = float(self.strategy.model.get_global_grad_norm())
        # DeepSpeed reports -1 for a norm that is not finite. NCCL averages only tensors of the device.
        return torch.tensor(norm if norm >= 0 else torch.nan, device=self.strategy.root_device)


class ZeRO3(DeepSpeedZeRO):
    """DeepSpeed ZeRO-3: weights are sharded too."""

    sharded = True

    def fill(self, model: nn.Module, read: Read) -> ModelEntry:
        """Let rank 0 read the tensors in groups; DeepSpeed broadcasts and shards each group."""
        import deepspeed

        # From a parameter of the empty model to its sharded one.
        filled: dict[Any, nn.Parameter] = {}
        group = nn.ParameterList()

        def shard() -> None:
            deepspeed.zero.Init(module=group, config_dict_or_path=self.strategy.config)

        for name, tensor in stored_once(model).items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(read(name))
                continue
            # The engine casts whole weights, but no sharded ones.
            dtype = torch.bfloat16 if self.half_precision else tensor.dtype
            reads = self.strategy.is_global_zero
            whole = read(name).to(dtype) if reads else torch.empty_like(tensor, dtype=dtype, device="cpu")
            filled[tensor] = nn.Parameter(whole, tensor.requires_grad)
            if sum(p.numel() for p in [*group, whole]) > GROUP_NUMEL:
                shard()
                group = nn.ParameterList()
            group.append(filled[tensor])
        shard()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, filled[parameter])
        # An engine moves no model that is in shards, so its buffers would stay in main memory.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.strategy.root_device)
        return ModelEntry(model)

    def freeze(self, entry: Any) -> Callable[..., Any]:
        """Give the model to another engine, which gathers weights when they are needed.

        It does so in hooks of the modules. The engine's forward would add one to what it returns, which
        refuses a backward: that of a loss in which the frozen model's head takes part.
        """
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1}
        config |= {
            key: self.strategy.config[key]
            for key in ("zero_optimization", "bf16", "fp16")
            if key in self.strategy.config
        }
        engine, *_ = deepspeed.initialize(model=entry, config=config, dist_init_required=False)
        module: Callable[..., Any] = engine.module
        return module


def get_sharding(strategy: Any) -> WeightLayout:
    """Return how the trainer's strategy stores weights."""
    if isinstance(strategy, DeepSpeedStrategy):
        return (ZeRO3 if strategy.zero_stage_3 else DeepSpeedZeRO)(strategy)
    return (FullyShard if isinstance(strategy, ModelParallelStrategy) else Unsharded)(strategy)
