"""The base of modules that train: the policy, its optimizer, its micro-batches, and what a step logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.nn.parallel import DistributedDataParallel

from rlt_lightning.checkpoints.io import name_parameters
from rlt_lightning.datamodules.loader import StepLoader
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.metrics import HeldOutFigures, StepMeans
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.kernels import Kernels, prepare_model
from rlt_lightning.models.load import Dtype
from rlt_lightning.models.lora import LoRA
from rlt_lightning.models.packed import HeadOptions, disable_dropout, verify_layout
from rlt_lightning.models.quantised import require_settings, without_frozen
from rlt_lightning.models.weights import trained_parameters
from rlt_lightning.modules.checks import (
    count_steps,
    require_dtype,
    require_even_rows,
    require_same_rows,
    require_same_settings,
    require_strategy,
    require_whole_steps,
)
from rlt_lightning.modules.frozen import Model, RunModel
from rlt_lightning.modules.language_model import LanguageModelModule
from rlt_lightning.modules.losses import LossTerm, compute_loss
from rlt_lightning.modules.optimizer import OptimizerConfig, build_optimizer, build_schedule, resume_schedule
from rlt_lightning.modules.passes import Micro, PassRunner, forward
from rlt_lightning.modules.phases import count_weights
from rlt_lightning.modules.ranks import Ranks
from rlt_lightning.modules.step_metrics import speed_metrics
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.finite import NonFiniteError
from rlt_lightning.numerics.packing import Layout
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.rewards.base import Reward
from rlt_lightning.rollouts.step import POLICY
from rlt_lightning.strategies.sharding import Unsharded, get_sharding
from rlt_lightning.types import InputError, as_list

# The progress bar shows these figures of a step.
SHOWN = {"reward/mean", "rollout/closed_frac", "rollout/truncated_frac", "policy/loss", "perf/tokens_per_s"}


class PolicyModule(LanguageModelModule):
    """A trainable language model behind manual optimization: one Lightning batch is one optimizer step.

    A subclass declares the options that are new or have another default, and passes the others on to here.

    Args:
        pretrained: Model to train: local folder, hub id, or a name such as miniature.
        optimizer: AdamW, its schedule and gradient clipping.
        micro_batch_tokens: Tokens per forward; a longer sequence gets a forward by itself.
        layout: How sequences share a forward: "shared_prefix" computes a group's prompt once, "packed" for
            each completion, "auto" chooses by a cost model, "single" runs one sequence at a time.
        head: How log-probs are computed from hidden states.
        dtype: Type of the trained weights and, if there is one, the reference's.
        gradient_checkpointing: Recompute activations in the backward pass.
        attn_implementation: transformers' name; None: ours, which shares prefixes.
        trust_remote_code: Run code that comes with a model.
        seed: Seed of everything random inside a step.
        lora: Train low-rank adapters, in fp32, and freeze the weights; None: train all.
        kernels: Which fused kernels compute the same numbers faster.

    Attributes:
        is_on_policy: Whether it trains on completions that it asks a sampler for.
        reward: What completions are worth, in the modules that have a reward.
        frozen_role: What the models of `frozen_names` are, for `rlt plan`.
        frozen_dtype: Type of their weights.
        head_loss: The divergence that is minimised through the head, for the check of its kernels.
    """

    data_classes: ClassVar[tuple[type[StratosDataModule], ...]] = (StratosDataModule,)
    is_on_policy: ClassVar[bool] = False
    reward: Reward | None = None
    frozen_role: ClassVar[str] = ""
    frozen_dtype: Dtype = "float32"
    head_loss: Divergence | None = None

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6),
        micro_batch_tokens: int = 16384,
        layout: Layout = "auto",
        head: HeadOptions = HeadOptions(),
        dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
        lora: LoRA | None = None,
        kernels: Kernels = Kernels(),
    ) -> None:
        super().__init__(pretrained, dtype, attn_implementation, trust_remote_code)
        sizes = {"model.micro_batch_tokens": micro_batch_tokens, "model.head.logits_mib": head.logits_mib}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise InputError(f"{name} must be at least 1, but is {size}. Raise it.")
        self.automatic_optimization = False
        self.optimizer_config = optimizer
        self.optimizer_name = "torch.optim.AdamW"  # `rlt fit --optimizer` sets another
        self.micro_batch_tokens = micro_batch_tokens
        self.layout, self.head = layout, head
        # Once the models are loaded, what all of them compute right.
        self.chosen_layout, self.chosen_head = layout, head
        self.gradient_checkpointing = gradient_checkpointing
        self.seed = seed
        self.lora = lora
        self.kernels = kernels
        self.peak_tokens_per_s: float | None = None  # that the GPU could train, if Lightning knows its peak
        # The metrics of the last step, means over ranks.
        self.step_metrics: dict[str, Any] = {}
        self.step_means = StepMeans()
        # Of all steps and ranks of the run so far.
        self.num_tokens = 0.0
        self.held_out = HeldOutFigures()
        self.is_configured = False

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the names of the models that are only read."""
        return ()

    def configure_callbacks(self) -> list[Callback]:
        """Refuse strategies that do not work, too."""
        require_strategy(self.trainer.strategy)
        require_whole_steps(self.trainer)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Refuse data of another stage, and number types in which training does not work."""
        self.require_data(getattr(self.trainer, "datamodule", None))
        self.num_ids = get_stratos_data(self.trainer).count_ids()
        if stage == "predict" and type(self).predict_step is LightningModule.predict_step:
            raise InputError(
                f"`rlt predict` scores or writes explanations, but {type(self).__name__} only trains. Use "
                "`rlt test` for the trained model's answers, or name it as model.teacher of an RLTModule."
            )
        deepspeed = isinstance(self.trainer.strategy, DeepSpeedStrategy)
        require_dtype(self.dtype_name, str(self.trainer.precision), deepspeed, trains=stage == "fit")
        sharding = get_sharding(self.trainer.strategy)
        require_settings(self.lora, self.optimizer_config, type(sharding) is Unsharded)
        if stage in ("fit", "validate") and sharding.sharded:
            require_even_rows(self.trainer, "weights in shards")

    def configure_model(self) -> None:
        """Load the weights, after the data have been checked.

        `load_from_checkpoint` has no trainer: it loads the trained model, and a verb later the other ones.
        """
        if self.is_configured:
            return
        if self._trainer is not None:
            self.is_configured = True
            self.sharding = get_sharding(self.trainer.strategy)
        if self.entry is None:
            self.load_policy()
        elif self.sharding.sharded:
            raise InputError(
                "A module of load_from_checkpoint has its weights whole, but trainer.strategy shards them. "
                "Make the module anew, and give the checkpoint as ckpt_path."
            )
        if self.is_configured:
            self.load_frozen_models()

    def load_policy(self) -> None:
        """Load the model that is trained."""
        self.entry = self.load(self.pretrained, self.dtype_name, "the trained model", self.lora, self.seed)
        # In eval mode, as it is loaded, gradient checkpointing would silently be off.
        self.entry.train()
        # Scoring and training must see the same policy.
        disable_dropout(self.entry)
        if self.gradient_checkpointing:
            self.policy.gradient_checkpointing_enable({"use_reentrant": False})

    def load_frozen_models(self) -> None:
        """Load the models that are only read."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the trained weights, which checkpoints hold; frozen ones can be loaded from their source."""
        state = super().state_dict(*args, **kwargs)
        named = self.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        return without_frozen(state, frozen)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the weights of a `state_dict`; frozen weights stay."""
        return super().load_state_dict(state_dict, strict and self.lora is None, assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the metadata from which, with the checkpoint's weights, a model folder can be made."""
        checkpoint["model"] = self.build_metadata()
        checkpoint["num_tokens"] = self.num_tokens

    def build_metadata(self) -> dict[str, Any]:
        """Return plain values: how the trained model is loaded, and how it was trained."""
        data = get_stratos_data(self.trainer)
        return {
            "pretrained": self.pretrained,
            "tokenizer": data.tokenizer_name,
            "chat_template": data.format.tokenizer.chat_template,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype_name,
            "lora": self.lora and asdict(self.lora),
            "states": self.optimizer_config.states,
            "optimizer": self.optimizer_name,
            "rows": data.fingerprint_rows(),
            "format": data.trained_format().to_plain(),
            "training": {
                "method": type(self).__name__,
                "optimizer steps": self.global_step,
                "data": f"{data.source} ({len(data.items)} rows)",
            },
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another adapter or other rows."""
        is_training = self._trainer is not None and self.trainer.training
        if is_training:
            require_same_rows(get_stratos_data(self.trainer), checkpoint["model"]["rows"])
            self.num_tokens = checkpoint["num_tokens"]
        saved = checkpoint["model"]
        settings: dict[str, tuple[Any, Any]] = {
            "model.lora": (saved["lora"], self.lora and asdict(self.lora))
        }
        if self.lora is not None:
            settings["model"] = saved["pretrained"], self.pretrained
        if is_training:
            settings["model.optimizer.states"] = saved["states"], self.optimizer_config.states
            settings["optimizer"] = saved["optimizer"], self.optimizer_name
        require_same_settings(settings)

    @torch.no_grad()
    def get_ready(self) -> None:
        """Choose kernels, and a layout in which the model computes the right log-probs."""
        self.check_model(self.run, self.pretrained, self.head_loss)

    def check_model(self, run: RunModel, name: str, divergence: Divergence | None) -> None:
        """Choose kernels and a layout in which this model is right too, and name the kernels in the log.

        The check runs in the run's precision: under bf16-mixed it checks the kernels for bfloat16.

        Args:
            run: Runs the model.
            name: Its name.
            divergence: Which one is computed with its head; None: log-probs.
        """
        with self.trainer.precision_plugin.forward_context():
            device, head = self.trainer.strategy.root_device, self.chosen_head
            self.chosen_head = prepare_model(run, name, self.kernels, head, device, divergence)
            self.chosen_layout = verify_layout(run, name, self.chosen_layout)

    def on_validation_start(self) -> None:
        """Get ready, unless this is a validation within a fit, which is ready."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            self.get_ready()

    def on_predict_start(self) -> None:
        """Get ready."""
        self.get_ready()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make a step's random state a function of seed, step and rank, so that a resumed run repeats it."""
        torch.manual_seed(mix_seed(self.seed, self.global_step, self.global_rank))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW and its schedule over the whole run; as in Lightning, a subclass may return others."""
        # On a GPU, and where moments are offloaded, AdamW steps all weights in one pass.
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        fused = True if on_gpu or self.sharding.steps_on_cpu else None
        optimizer = build_optimizer(self.optimizer_config, trained_parameters(self.policy), fused)
        schedule = build_schedule(self.optimizer_config, optimizer, self.total_steps())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def total_steps(self) -> int:
        """Return the optimizer steps of the whole run.

        `trainer.estimated_stepping_batches` would set the loader up before a checkpoint is restored, and
        Lightning would then never restore the loader's position.
        """
        trainer = self.trainer
        steps_per_epoch = len(get_stratos_data(trainer).step_loader())
        return count_steps(
            steps_per_epoch, trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches
        )

    def on_fit_start(self) -> None:
        """Get ready."""
        trainer = self.trainer
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            # No training changes a buffer, so all ranks have the same ones.
            trainer.strategy.model.broadcast_buffers = False
        if not isinstance(trainer.strategy, DeepSpeedStrategy):  # which needs the names before
            name_parameters(trainer.optimizers[0], self.policy)
        self.get_ready()
        self.sharding.prepare_fit()
        self.phase.device = self.device
        if self.device.type == "cuda":
            dtype = next(self.policy.parameters()).dtype
            dtype = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else dtype
            forwards = 3 if self.lora is None else 2  # a backward costs two; of a LoRA one
            if peak := get_available_flops(self.device, dtype):
                self.peak_tokens_per_s = peak / (2 * forwards * count_weights(self.policy))

    def on_train_start(self) -> None:
        """Check that a resumed run continues with the rows of its next step, and set its learning rate."""
        if not self.global_step:
            self.num_tokens = 0.0
        loader = self.trainer.train_dataloader
        if isinstance(loader, StepLoader):
            loader.begin_at(self.global_step)
        for schedule in as_list(self.lr_schedulers()) if self.global_step else []:
            resume_schedule(schedule)

    def build_runner(self) -> PassRunner:
        """Return the runner of this module's models, for one step."""
        return PassRunner(
            self.list_models(),
            self.device,
            self.chosen_head,
            self.micro_batch_tokens,
            self.chosen_layout,
            self.ranks,
            # In prediction a row's figures are to the last bit those of one rank.
            splits=not self.trainer.predicting,
        )

    @property
    def ranks(self) -> Ranks:
        """Return what a step needs of the other ranks."""
        return Ranks(self.trainer, self.device, self.sharding)

    def list_models(self) -> dict[str, Model]:
        """Return the models by the names that scoring passes use."""
        return {POLICY: Model(self.run, is_policy=True)}

    def forward_backward(self, micros: Iterable[tuple[LossTerm, Micro]]) -> None:
        """Add the gradients of an update's micro-batches, which `PassRunner.updates` yields."""
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        for term, micro in micros:
            computed = forward(self.run, micro.batch, term.with_entropy)  # (M,), with gradient
            loss = compute_loss(term, micro, computed, self.global_step)
            self.manual_backward(loss)

    def optimizer_step_now(self, is_last_update: bool = True) -> dict[str, Any]:
        """Clip, step the optimizer and its schedules, and return gradient norm and learning rate.

        `is_last_update` is false for all but the last update of an iteration: `global_step` and the schedules
        count iterations.
        """
        optimizer: Any = self.optimizers()
        lr = optimizer.param_groups[0]["lr"]
        max_norm = self.optimizer_config.max_grad_norm
        grad_norm = self.sharding.step(optimizer, list(self.policy.parameters()), max_norm, is_last_update)
        if not grad_norm.isfinite():
            raise NonFiniteError(
                f"Every gradient must be finite, but after step {self.global_step} one is not, although the "
                "loss is. Correct a loss of your own, whose derivative may divide by 0; otherwise resume "
                "from an earlier checkpoint in fp32, or start a new run from its weights (rlt export) with a "
                "lower learning rate."
            )
        for schedule in as_list(self.lr_schedulers()) if is_last_update else []:
            schedule.step()
        return {"policy/grad_norm": grad_norm, "policy/lr": lr}

    def speed_metrics(self, num_tokens: int) -> dict[str, float]:
        """Return the costs of the step on all ranks; `num_tokens` are this rank's."""
        world_size, peak = self.trainer.world_size, self.peak_tokens_per_s
        metrics = speed_metrics(self.phase.lap(), num_tokens, world_size, peak)
        peaks = {name: value for name, value in metrics.items() if name.endswith("_peak_gib")}
        return metrics | dict(zip(peaks, self.ranks.max(*peaks.values()), strict=True))

    def log_step(self, metrics: dict[str, Any], batch_size: int) -> None:
        """Log the metrics of one optimizer step, means over all ranks, against the number of steps taken."""
        self.step_means.update(metrics)
        self.step_metrics = self.step_means.compute()
        self.step_means.reset()
        self.num_tokens += float(self.step_metrics["perf/num_tokens"])
        self.step_metrics["perf/num_tokens"] = torch.tensor(self.num_tokens, dtype=torch.float64)
        for name, value in self.step_metrics.items():
            self.log(name, value, name in SHOWN, batch_size=batch_size, on_step=True, on_epoch=False)
        # Without it, Lightning's x axis would count from 0.
        self.log("step", torch.tensor(float(self.global_step)), batch_size=batch_size)

    def on_validation_end(self) -> None:
        """Keep the time of a validation out of the next training step."""
        self.phase.lap()

    def on_validation_epoch_end(self) -> None:
        """Log the figures of the whole held-out set, however ranks have shared it."""
        figures = self.held_out.compute(self.trainer)
        self.log_dict(figures)
        if figures:
            self.log("step", float(self.global_step))
