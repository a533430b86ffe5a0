"""The one callback that training needs: it brings the completions."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.engines.base import Engine, Sampling
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.modules.base import mix_seed
from rlt_lightning.pretrained import model_config
from rlt_lightning.types import InputError, Problem, PromptBatch, Rollouts


class RolloutCallback(Callback):
    """Sample completions with the current weights and attach them to the batch.

    Args:
        engine: Where completions come from; in process by default.
        sampling: Temperature and limits of training completions.
        val_sampling: The same for validation; None: as in training.
        val_completions: Completions per held-out problem.
        seed: Of all sampling. A completion depends on (seed, iteration, problem) alone, so a resumed run
            repeats it.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        sampling: Sampling = Sampling(),
        val_sampling: Sampling | None = None,
        val_completions: int = 1,
        seed: int = 0,
    ) -> None:
        self.engine: Engine = HFEngine() if engine is None else engine
        self.sampling = sampling
        self.val_sampling = val_sampling or sampling
        self.val_completions = val_completions
        self.seed = seed

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before any model is loaded, that prompts and completions fit into both contexts."""
        if stage == "fit" and self.sampling.temperature == 0:
            raise InputError(
                "RolloutCallback.sampling.temperature must be above 0 in training, but is 0: greedy "
                "completions of a "
                "group are all alike. Set it, the released recipe uses 0.7."
            )
        reward = getattr(pl_module, "reward", None)
        if reward is not None and reward.teacher_temperature != self.sampling.temperature:
            rank_zero_warn(
                f"sampling.temperature is {self.sampling.temperature}, but reward.teacher_temperature is "
                f"{reward.teacher_temperature}: the k1 and k3 estimates of the KL are then biased."
            )
        longest = max(self.sampling.max_completion_length, self.val_sampling.max_completion_length)
        problems: list[Problem] = trainer.datamodule.problems  # type: ignore[attr-defined]
        for model, role in ((pl_module.pretrained, "teacher"), (pl_module.student_name, "student")):
            config = model_config(str(model), bool(pl_module.trust_remote_code)).get_text_config()
            require_room(problems, role, config.max_position_embeddings, longest)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_engine(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_engine(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        num_completions: int = pl_module.group_size  # type: ignore[assignment]
        seeds = [mix_seed(self.seed, pl_module.global_step, problem.row) for problem in batch.problems]
        self._attach(trainer, pl_module, batch, self.sampling, num_completions, seeds)

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        seeds = [
            mix_seed(self.seed, -1, problem.row) for problem in batch.problems
        ]  # the same at every validation
        self._attach(trainer, pl_module, batch, self.val_sampling, self.val_completions, seeds)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.engine.close()

    def _start_engine(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start it once the weights are where they will be trained, a restored checkpoint included."""
        self.engine.start(pl_module.policy, trainer.datamodule.format.tokenizer)  # type: ignore[attr-defined]
        self.engine.health()

    def _attach(
        self,
        trainer: Trainer,
        pl_module: Any,
        batch: PromptBatch,
        sampling: Sampling,
        num_completions: int,
        seeds: list[int],
    ) -> None:
        chat_format = trainer.datamodule.format  # type: ignore[attr-defined]
        with pl_module.phase("generate"):
            if self.engine.policy_version != pl_module.global_step:
                self.engine.update_weights(pl_module.policy.named_parameters(), pl_module.global_step)
            prompts = [problem.teacher_prompt for problem in batch.problems]
            groups = self.engine.generate(prompts, sampling, num_completions, chat_format.end_tag, seeds)
        rollouts = [
            chat_format.rollout(problem, completion)
            for problem, group in zip(batch.problems, groups, strict=True)
            for completion in group
        ]
        batch.rollouts = Rollouts(rollouts, num_completions, self.engine.policy_version, sampling.temperature)


def require_room(problems: list[Problem], role: str, context: int, max_completion_length: int) -> None:
    """Check that the longest problem and a full-length completion fit into a model's context, in tokens.

    Raises:
        InputError: Naming the row, the lengths and the settings that would make room.
    """
    for problem in problems:
        fixed = len(problem.teacher_prompt)
        if role == "student":
            fixed = sum(map(len, (problem.student_prefix, problem.think_prefix, problem.student_suffix)))
            fixed += len(problem.solution_ids)
        if fixed + max_completion_length > context:
            raise InputError(
                f"Prompt and completion must fit into the {role}'s context of {context} tokens, but row "
                f"{problem.row} "
                f"needs {fixed} + max_completion_length {max_completion_length}. "
                "Lower sampling.max_completion_length or data.max_prompt_length."
            )
