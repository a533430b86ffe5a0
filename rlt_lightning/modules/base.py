"""What both training stages share: a language model, its optimizer, packed log-probs, a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from rlt_lightning.numerics.log_probs import head_log_probs
from rlt_lightning.numerics.packing import PackedSequences
from rlt_lightning.numerics.rewards import NonFiniteError
from rlt_lightning.pretrained import load_model
from rlt_lightning.types import InputError

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
ScoredTokens = tuple[list[int], list[bool]]  # token ids of a sequence, and which of them are scored


class PhaseClock:
    """Seconds per phase of the current step; tells a listener, such as the progress bar, what runs now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.on_change: Callable[[str], None] | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`."""
        if self.on_change:
            self.on_change(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Return the seconds per phase since the last lap, and start anew."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class FrozenModel:
    """A model that is only read. Not a submodule, so it is in no optimizer, no checkpoint and no wrapper."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule and the clipping of gradients.

    Args:
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay of the matrices; vectors (norms, biases) are not decayed.
        betas: Decay rates of the two moments.
        scheduler: Shape of the learning rate after the warm-up: constant, linear or cosine to zero.
        warmup_frac: Part of the run, in [0, 1), over which the learning rate rises linearly from 0.
        max_grad_norm: Gradients are scaled down to this global L2 norm; 0 is off.
    """

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_frac: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_frac < 1:
            raise InputError(
                f"optimizer.warmup_frac must be in [0, 1), but got {self.warmup_frac}. It is a part of the "
                "run."
            )
        if self.lr <= 0 or self.max_grad_norm < 0:
            raise InputError(
                f"optimizer.lr must be > 0 and max_grad_norm >= 0, but got {self}. Correct model.optimizer."
            )


class PolicyModule(LightningModule):
    """A trainable language model behind manual optimization: one Lightning batch is one optimizer step.

    Args:
        pretrained: Embedded default, local folder or hub id.
        optimizer: AdamW, its schedule and gradient clipping.
        micro_batch_tokens: Tokens per forward; a longer sequence goes alone.
        head_chunk_size: Scored tokens per pass through the language-model head.
        dtype: Of the trained weights.
        gradient_checkpointing: Recompute activations in the backward pass.
        attn_implementation: transformers' name, None for its default.
        trust_remote_code: Run code that comes with a model.
        seed: Of everything random inside a step.
    """

    def __init__(
        self,
        pretrained: str,
        optimizer: OptimizerConfig,
        micro_batch_tokens: int,
        head_chunk_size: int,
        dtype: Dtype,
        gradient_checkpointing: bool,
        attn_implementation: str | None,
        trust_remote_code: bool,
        seed: int,
    ) -> None:
        super().__init__()
        if micro_batch_tokens < 1 or head_chunk_size < 1:
            raise InputError(
                "model.micro_batch_tokens and model.head_chunk_size must be at least 1, but are "
                f"{micro_batch_tokens} and {head_chunk_size}. Raise them."
            )
        self.automatic_optimization = False
        self.pretrained = pretrained
        self.optimizer_config = optimizer
        self.micro_batch_tokens = micro_batch_tokens
        self.head_chunk_size = head_chunk_size
        self.dtype_name: Dtype = dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.attn_implementation = attn_implementation
        self.trust_remote_code = trust_remote_code
        self.seed = seed
        self.phase = PhaseClock()
        self.step_metrics: dict[str, Any] = {}  # of the last step
        self.policy: Any = None  # the trained model, made in configure_model

    def configure_model(self) -> None:
        """Load the weights, after the data have been checked."""
        if self.policy is not None:
            return
        self.policy = self.load(self.pretrained, self.dtype_name)
        check_packing(self.policy, self.pretrained)
        self.policy.train()  # in eval mode, as it is loaded, gradient checkpointing would silently be off
        disable_dropout(self.policy)  # the policy that is scored is the policy that is trained
        if self.gradient_checkpointing:
            self.policy.gradient_checkpointing_enable({"use_reentrant": False})

    def load(self, name: str, dtype: Dtype) -> Any:
        """Load a model with this module's options."""
        return load_model(name, dtype, self.attn_implementation, self.trust_remote_code)

    def forward(self, packed: PackedSequences, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropy of the scored tokens under the policy, (M,) each, nats.

        The one entry that the strategy wraps: every forward with gradient comes through here.
        """
        log_probs, entropy = log_probs_of(
            self.policy, packed, temperature, self.head_chunk_size, with_entropy=True
        )
        assert entropy is not None
        return log_probs, entropy

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave batches alone: they hold lists of token ids, which become tensors when they are packed."""
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make a step's random state a function of seed, step and rank, so that a resumed run repeats it."""
        torch.manual_seed(mix_seed(self.seed, self.global_step, self.global_rank))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with linear warm-up into a constant, linear or cosine schedule over the whole run."""
        from transformers import get_scheduler

        config = self.optimizer_config
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
        total_steps = self.total_steps()
        name = "constant_with_warmup" if config.scheduler == "constant" else config.scheduler
        schedule = get_scheduler(name, optimizer, round(config.warmup_frac * total_steps), total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def total_steps(self) -> int:
        """Optimizer steps of the whole run.

        Not `trainer.estimated_stepping_batches`: asked before a checkpoint is restored, it sets the loader up
        too early, and Lightning then never restores the loader's position.
        """
        trainer = self.trainer
        steps_per_epoch = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
        limit = trainer.limit_train_batches
        if limit is not None:
            steps_per_epoch = (
                min(steps_per_epoch, limit) if isinstance(limit, int) else int(steps_per_epoch * limit)
            )
        by_epochs = [trainer.max_epochs * steps_per_epoch] if trainer.max_epochs not in (None, -1) else []
        by_steps = [trainer.max_steps] if trainer.max_steps != -1 else []
        if not by_epochs + by_steps:
            raise InputError(
                "The length of the run must be set, but is not. Set trainer.max_steps or max_epochs."
            )
        return min(by_epochs + by_steps)

    def same_on_every_rank(self, bins: list[list[int]]) -> Iterator[tuple[list[int], float]]:
        """Yield micro-batches and their weights, equally many on every rank.

        Each backward pass is a meeting of all ranks, so a rank that has fewer micro-batches runs its last one
        again with weight 0.
        """
        count = torch.tensor(float(len(bins)), device=self.device)
        most = int(self.trainer.strategy.reduce(count, reduce_op="max"))
        for number in range(most):
            yield bins[min(number, len(bins) - 1)], float(number < len(bins))

    def sum_over_ranks(self, *numbers: float) -> list[float]:
        """Add up numbers of every rank."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self.trainer.strategy.reduce(values, reduce_op="sum").tolist()

    def optimizer_step_now(self) -> dict[str, Any]:
        """Clip, step the optimizer and the schedule, and return gradient norm and learning rate."""
        optimizer: Any = self.optimizers()
        lr = optimizer.param_groups[0]["lr"]
        max_norm = self.optimizer_config.max_grad_norm or torch.inf
        grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), max_norm)
        if not grad_norm.isfinite():
            raise NonFiniteError(
                f"Every gradient must be finite, but at step {self.global_step} one is not. Resume from an "
                "earlier checkpoint with a lower learning rate, or use fp32."
            )
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]
        return {"policy/grad_norm": grad_norm, "policy/lr": lr}

    def log_step(self, metrics: dict[str, Any], batch_size: int) -> None:
        """Log the metrics of one optimizer step, means over all ranks, against the number of steps taken."""
        self.step_metrics = metrics
        self.log_dict(metrics, batch_size=batch_size, on_step=True, on_epoch=False, sync_dist=True)
        self.log("step", float(self.global_step), batch_size=batch_size)  # Lightning's x axis counts from 0

    def on_validation_end(self) -> None:
        """Do not count the time of a validation in the next training step."""
        self.phase.lap()

    def log_validation(self, metrics: dict[str, Any], batch_size: int) -> None:
        """Log means over the held-out set against the number of optimizer steps taken."""
        metrics = metrics | {"step": float(self.global_step)}
        self.log_dict(metrics, batch_size=batch_size, on_step=False, on_epoch=True, sync_dist=True)

    def log_largest(self, name: str, value: float) -> None:
        """Log the largest value over the held-out set."""
        self.log(name, value, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)


def scored_hidden_states(model: Any, packed: PackedSequences) -> Tensor:
    """Run the transformer without its head; return the states that predict the scored tokens, (M, H)."""
    # No attention_mask and no cache: with either, transformers attends across packed sequences.
    output = model.base_model(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False)
    return output.last_hidden_state[0, packed.predictors]


def log_probs_of(
    model: Any, packed: PackedSequences, temperature: float, head_chunk_size: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the scored tokens and, if asked for, the entropies behind them, (M,) each, nats."""
    hidden = scored_hidden_states(model, packed)  # (M, H)
    return head_log_probs(hidden, head_of(model), packed.targets, temperature, head_chunk_size, with_entropy)


def pack(sequences: list[ScoredTokens], device: torch.device) -> PackedSequences:
    """Lay sequences out in one row."""
    token_ids, score_masks = zip(*sequences, strict=True)
    return PackedSequences.from_lists(list(token_ids), list(score_masks), device)


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the map from hidden states (M, H) to logits (M, V), scaled and capped as the model does."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    scale = getattr(config, "logit_scale", None) or 1 / (
        getattr(config, "logits_scaling", None) or 1
    )  # Cohere, Granite

    def logits(hidden: Tensor) -> Tensor:
        values = head(hidden) * scale if scale != 1 else head(hidden)
        return values if cap is None else cap * torch.tanh(values / cap)

    return logits


def check_packing(model: Any, name: str) -> None:
    """Prove on two short sequences that packed log-probs equal the model's own, one by one.

    Raises:
        InputError: If the architecture attends across packed sequences or scales its logits in a way we do
            not know.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(1000, model.config.get_text_config().vocab_size)
    sequences = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (7, 12)]
    device = next(model.parameters()).device
    masks = [[False] + [True] * (len(sequence) - 1) for sequence in sequences]
    packed = PackedSequences.from_lists(sequences, masks, device)
    with torch.no_grad():
        ours, _ = log_probs_of(model, packed, temperature=1.0, head_chunk_size=len(packed.targets))
        theirs = []
        for sequence in sequences:
            ids = torch.tensor([sequence], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            theirs.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1))
    error = (ours - torch.cat(theirs)).abs().max().item()
    bound = (
        1e-3 if next(model.parameters()).dtype == torch.float32 else 0.5
    )  # nats; a leak shows as whole nats
    if not error <= bound:
        raise InputError(
            f"Packed log-probs of '{name}' must equal its one-by-one log-probs, but differ by {error:.2g} "
            f"nats: the architecture {type(model).__name__} cannot be trained packed. Use a Llama, Qwen2 or "
            "Qwen3 model."
        )


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def mix_seed(*parts: int) -> int:
    """Hash integers to one 63-bit seed: neighbouring inputs give unrelated streams."""
    seed = 0x9E3779B97F4A7C15
    for part in parts:
        seed = (seed ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return seed & 0x7FFFFFFFFFFFFFFF
