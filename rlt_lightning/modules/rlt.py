"""Reinforcement-Learned Teachers: GRPO of a teacher against a frozen student. Start at `training_step`.

The life of a step, on every rank; the steps marked * wait for the other ranks:

    TeacherRLData             batch.problems: this rank's part of the step (`collate` in stratos.py)
    training_step
      ├ sampler.request*      the problems of all ranks (rollouts/sampler.py, from RolloutCallback)
      ├ collect               for each chunk of completions, alike on every rank:
      │   ├ sampler.stream*   what has come from the engine
      │   ├ step.divide       over ranks, by tokens: a rank's shard is a list of rows (rollouts/step.py)
      │   ├ runner.run        models read the shard, as reward and loss declare (modules/passes.py)
      │   ├ reward.measure    tokens and texts → numbers of each row (rewards/)
      │   ├ step.share*       once all are there: all ranks get all numbers
      │   └ reward.score      whole groups → rewards (N,), alike on every rank
      ├ request_others        dynamic sampling: again, for groups of equal rewards
      ├ submit_next*          asynchronous rollouts: the engine samples the next step meanwhile
      ├ advantages            compare within each group → (N,)
      ├ runner.updates        an update's micro-batches of each loss term, equally many on all ranks
      ├ forward_backward      for each of them (policy.py):
      │   ├ forward           log-probs with gradient, (M,)
      │   ├ compute_loss      its term: LossInputs → LossOutput, whose figures the step keeps (losses.py)
      │   └ manual_backward   the last one sums gradients over ranks*
      ├ finish_update*        no rank has failed; `optimizer_step_now`: clip, AdamW (policy.py)
      └ log_iteration*        means over ranks → metrics.csv, W&B; callbacks read batch.rollouts, batch.step

With sharded weights, each forward and backward waits for the other ranks too. `rollouts/step.py` carries a
step, `models/packed.py` runs a micro-batch through a model; `numerics/` computes, `step_metrics.py` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from rlt_lightning.datamodules.items import FIXED_PIECES
from rlt_lightning.datamodules.stages import ScoringData, StudentLikelihoodData, StudentRLData, TeacherRLData
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.engines.base import Placement
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import Dtype
from rlt_lightning.modules.credits import Credit, RewardCredit
from rlt_lightning.modules.losses import AnswerTerm, LossTerm, PolicyGradient, build_sampled_pass, list_passes
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.modules.passes import PassRunner, pad_engine_log_probs, score_groups, score_rollouts
from rlt_lightning.modules.rollout_rows import predicted_rows
from rlt_lightning.modules.step_metrics import (
    held_out_metrics,
    require_agreement,
    reward_means,
    reward_metrics,
)
from rlt_lightning.numerics.advantages import AdvantageEstimator, GroupNormalisedAdvantages
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling
from rlt_lightning.numerics.losses import GRPOLoss, PolicyLoss
from rlt_lightning.rewards.base import Reward
from rlt_lightning.rewards.explanations import require_scorable, require_student
from rlt_lightning.rewards.rlt import RLTReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.rollouts.step import POLICY, REFERENCE, ScoringPass, StepBatch
from rlt_lightning.run.jsonl import JsonRow
from rlt_lightning.types import InputError, PromptBatch, Rollout, Rollouts


class RLTModule(OnPolicyModule):
    """Train a teacher to write explanations that help a frozen student (RLT, arXiv:2506.08388, section 3).

    Args:
        teacher: Model to train: local folder, hub id, or a name such as miniature.
        student: Frozen model that scores the completions, with any tokenizer; "policy", the weights that
            train, as they are at this step; "reference", those at the start, or as ReferenceSync moves them;
            None if the reward asks no model.
        group_size: Completions per problem, G; 64 in the paper.
        reward: The RLT reward and its options, or a subclass with further terms; or a LikelihoodReward, such
            as LogProbReward, of a student that thinks; or a TextReward: CorrectnessReward makes this
            traditional RL.
        advantages: How rewards of a group become advantages; None: GroupNormalisedAdvantages().
        policy_loss: GRPO or a variant of it; None: GRPOLoss().
        importance_sampling: Weights pi_trainer / pi_engine, truncated or masked. "auto": of tokens, capped at
            2, if the engine has a copy of the weights, unless rollouts are asynchronous. None: no weights;
            stale rollouts are then clipped by their ratio instead.
        teacher_log_probs: The teacher's log-probs in r_KL. "rollout": the engine's, if it sent them at the
            reward's temperature, else of another forward; in validation the trainer's. "recompute": always
            of another forward.
        student_dtype: Type of a frozen student's weights.
        updates_per_rollout: Mini-batches of whole groups into which an iteration's completions are divided,
            with an optimizer step on each. `global_step` and schedules count iterations.
        num_epochs: How often an iteration learns from each of them. From the second update on, the ratio in
            the loss, to the policy at the start of the iteration, is not 1.
        answer_weight: Weight of the answer term, the gradient of the solution's score, where the policy
            is the student (`AnswerTerm`); None: 1 if the reward has the term, else 0. The term has neither
            advantages nor importance weights: for a control by ShuffledAdvantages set it to 0.
        options: Those of `OnPolicyModule` and `PolicyModule`, such as optimizer, dtype and lora.

    Raises:
        InputError: If group_size is below 2, since a group of one has no baseline, or if settings contradict
            each other.
    """

    # What each sampled token gains; a subclass may have another one (credits.py).
    credit: Credit = RewardCredit()
    reward: Reward
    frozen_role = "student"

    data_classes: ClassVar[tuple[type[StratosDataModule], ...]] = (
        *(TeacherRLData, ScoringData),
        *(StudentRLData, StudentLikelihoodData),
    )

    def __init__(
        self,
        teacher: str = DEFAULT_MODEL,
        student: str | None = DEFAULT_MODEL,
        group_size: int = 8,
        reward: Reward = RLTReward(),
        advantages: AdvantageEstimator | None = None,
        policy_loss: PolicyLoss | None = None,
        *,
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None = "auto",
        teacher_log_probs: Literal["rollout", "recompute"] = "rollout",
        student_dtype: Dtype = "float32",
        updates_per_rollout: int = 1,
        num_epochs: int = 1,
        answer_weight: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            pretrained=teacher, group_size=group_size, importance_sampling=importance_sampling, **options
        )
        require_student(reward, student)
        self.student = Student.of(student, teacher)
        self.answer_weight = choose_answer_weight(answer_weight, reward, self.student)
        self.reward = reward
        self.advantages = advantages or GroupNormalisedAdvantages()
        self.policy_loss = policy_loss or GRPOLoss()
        self.frozen_dtype = student_dtype
        self.teacher_log_probs = teacher_log_probs
        self.updates_per_rollout = updates_per_rollout
        self.num_epochs = num_epochs
        # A group of one has no baseline.
        for name, least in {"group_size": 2, "updates_per_rollout": 1, "num_epochs": 1}.items():
            if getattr(self, name) < least:
                raise InputError(
                    f"model.{name} must be at least {least}, but is {getattr(self, name)}. Raise it."
                )

    def setup(self, stage: str) -> None:
        """Check, before any model is loaded, that the reward can judge completions for this data."""
        super().setup(stage)
        data = get_stratos_data(self.trainer)
        if stage == "fit" and data.brings_completions:
            raise InputError(
                f"{type(self).__name__} trains on completions that it samples, but those of "
                f"{type(data).__name__} are given. Choose TeacherRLData for data, or score them: `rlt "
                "predict`."
            )
        if stage == "predict" and data.samples == "thoughts":
            raise InputError(
                f"`rlt predict` writes explanations or answers, but those of {type(data).__name__} are "
                "thoughts. Choose StudentRLData for data; or evaluate the student: `rlt test`."
            )
        models = (POLICY, REFERENCE, *self.frozen_names)
        if unknown := [name for name in self.credit.models if name not in models]:
            raise InputError(
                f"The credit of {type(self).__name__} may ask {', '.join(models)}, but asks "
                f"{', '.join(unknown)}. Correct `by` of its RatioCredit, or set model.student."
            )
        rows = data.prompts_per_step // self.updates_per_rollout * self.group_size
        if stage == "fit" and rows < self.trainer.world_size:
            raise InputError(
                "Every process must have a completion of each mini-batch, which has whole groups, but "
                f"model.updates_per_rollout {self.updates_per_rollout} leaves {rows} for "
                f"{self.trainer.world_size}. Lower it, or raise data.prompts_per_step."
            )
        self.reward.check(data.problems)
        self.student.format = data.format
        require_scorable(self.reward, self.student)
        self.reward.open(data.format.tags)

    def require_data(self, data: Any) -> None:
        """See `PolicyModule.require_data`; the reward must fit the completions."""
        super().require_data(data)
        if data.samples not in self.reward.judges:
            raise InputError(
                f"{type(self.reward).__name__} judges {' or '.join(self.reward.judges)}, but the completions "
                f"of {type(data).__name__} are {data.samples}. Choose another class for data, or another "
                "model.reward."
            )

    def load_frozen_models(self) -> None:
        """Load the student and, where the loss has a KL penalty or it is the student, the reference."""
        super().load_frozen_models()
        for name in self.frozen_names:
            self.models[name] = self.load_frozen(name, self.frozen_dtype, "the frozen student")
        # The policy without its adapter is the initial teacher.
        is_base = self.lora is not None and not self.reference_moves
        if self.needs_reference(self.trainer.training) and not is_base:
            self.reference = self.load_frozen(self.pretrained, self.dtype_name, "the reference")

    def needs_reference(self, trains: bool) -> bool:
        """See `OnPolicyModule.needs_reference`: by the loss, or as the student."""
        in_loss = trains and (self.policy_loss.kl_coef or REFERENCE in self.credit.models)
        return bool(in_loss) or self.student.model == REFERENCE

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the name of the student, unless it is the policy or the reference."""
        return self.student.frozen_names

    def list_scorers(self) -> tuple[str, ...]:
        """See `OnPolicyModule.list_scorers`: the policy and the student, if the reward asks one."""
        return () if self.student.name is None else (POLICY, *self.frozen_names)

    def list_readers(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """See `OnPolicyModule.list_readers`."""
        readers = [("teacher", self.pretrained, FIXED_PIECES["teacher"])]
        if self.student.name is not None:
            readers.append(("student", self.student.name, FIXED_PIECES["student"]))
        return readers

    def build_card_metadata(self) -> dict[str, Any]:
        """Return the models and the reward of a prediction, for a data card."""
        options = {name: v for name, v in vars(self.reward).items() if isinstance(v, (int, float, str))}
        reward = ", ".join([type(self.reward).__name__, *(f"{name} {v}" for name, v in options.items())])
        name = self.student.name
        models = {"teacher": self.pretrained, "student": name} if name else {"model": self.pretrained}
        return models | {"reward": reward}

    def teardown(self, stage: str) -> None:
        """Close the reward; after an exception RolloutCallback does it."""
        self.reward.close()

    # Training

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Run one RL iteration: sample, score with the student, compare within groups, step the teacher."""
        sampler, runner, terms = self.require_sampler(), self.build_runner(), self.losses
        # Sampled, read and scored; alike on all ranks.
        step = self.collect(runner, sampler.request(batch.problems), terms)
        for _ in range(sampler.max_rounds):  # of dynamic sampling; 0 without it
            others = sampler.request_others(step.find_flat_groups())
            if others is None:
                break
            step.replace(self.collect(runner, others, terms), others.slots)
        sampler.submit_next()  # asynchronous rollouts: sampled while this step trains
        updates = [step.shard]
        if self.divides_again:
            with self.phase("score") as stats:
                updates = step.split(self.updates_per_rollout, self.build_shards)
                runner.run(step, step.shard, partial(list_passes, terms), stats)
                step.share_tokens(self.credit.columns, self.ranks.sum_tensor)
        with self.phase("train") as stats:
            step.advantages = self.advantages(step.rewards, self.group_size)  # (N,), alike on every rank
            step.check_finite(step.advantages, "advantage", self.advantages, range(len(step)))
            metrics = []
            for number, rows in enumerate(updates * self.num_epochs, 1):  # one optimizer step each
                # Forward, loss and backward of each micro-batch.
                self.forward_backward(runner.updates(step, rows, terms, stats))
                metrics.append(self.finish_update(step, is_last_update=number == self.num_updates))
        figures = average_metrics(metrics) | reward_metrics(step)
        if sampler.max_rounds:
            figures |= step.counts.compute_metrics(len(step.find_flat_groups()))
        self.log_iteration(batch, step, figures)

    @property
    def num_updates(self) -> int:
        """Return how many optimizer steps an iteration takes."""
        return self.updates_per_rollout * self.num_epochs

    @property
    def divides_again(self) -> bool:
        """Return whether the loss needs other shards than the reward, and so runs its forwards later.

        Completions that are replaced need no reference; each mini-batch is divided over all ranks.
        """
        return bool(self.require_sampler().max_rounds) or self.updates_per_rollout > 1

    @property
    def losses(self) -> list[LossTerm]:
        """Return the terms of the loss."""
        gradient = PolicyGradient(
            self.policy_loss, self.importance_weights, self.num_updates > 1, self.credit
        )
        score = self.reward.find_answer()
        if score is None or not self.answer_weight:
            return [gradient]
        return [gradient, AnswerTerm(score, self.policy_loss, self.student, self.answer_weight)]

    def collect(self, runner: PassRunner, request: RolloutRequest, terms: Sequence[LossTerm]) -> StepBatch:
        """Return completions, which were read and scored as they came; all ranks get all rewards.

        A rank without a part of a chunk reads a dummy, since with sharded weights all ranks run a forward,
        and so that it knows the columns. A failure of the reward is kept, as all ranks go on with the next
        chunk: `raise_together` comes behind the last one.
        """
        sampler, step = self.require_sampler(), StepBatch.of_request(request, self.build_shards())
        recompute = self.teacher_log_probs == "recompute"

        def declare(rollout: Rollout) -> list[ScoringPass]:
            of_loss = [] if self.divides_again else list_passes(terms, rollout)
            return self.reward.scoring_passes(rollout, self.student) + of_loss

        for chunk in sampler.stream(request):  # rows, alike on every rank
            with self.phase("score") as stats:
                part = step.divide(chunk)
                rows = part or chunk[:1]
                runner.run(step, rows, declare, stats, recompute)
                try:
                    with torch.no_grad():
                        step.put_numbers(part, self.reward.measure(step, rows, self.student))
                except Exception as error:  # of a user's class: any
                    step.keep_failure(error)
        self.require_fresh(request.policy_version)
        with self.phase("score"):
            self.ranks.raise_together(step)
            step.share(self.ranks.sum_tensor)
            score_groups(step, self.reward)
        return step

    # Validation and prediction

    def score(self, rollouts: Rollouts, recompute: bool = False) -> StepBatch:
        """Return completions of this rank with their rewards.

        Args:
            rollouts: The completions.
            recompute: Take the policy's log-probs from the trainer, not from the engine; the column "sampled"
                then has those of all tokens.
        """

        def declare(rollout: Rollout) -> list[ScoringPass]:
            sampled = [build_sampled_pass(rollout)] if recompute else []
            return sampled + self.reward.scoring_passes(rollout, self.student)

        ask = recompute or self.teacher_log_probs == "recompute"
        return score_rollouts(self.build_runner(), self.reward, self.student, rollouts, declare, ask)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Keep the held-out reward, its terms, completion length and the fraction of closed explanations."""
        rollouts = batch.rollouts = self.require_sampler().sample_held_out(batch.problems)
        self.require_fresh(rollouts.policy_version)
        with self.phase("score"):
            step = batch.step = self.score(rollouts, recompute=True)
            mismatch = self.compare_sampled(step, step.shard)
        largest = {"rollout/val_mismatch_max": mismatch.largest} if mismatch.num_tokens else {}
        figures = reward_means(step, step.shard, held_out=True) | held_out_metrics(rollouts)
        self.held_out.add(figures, len(rollouts.rollouts), largest)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[JsonRow]:
        """Score completions, which may come with the data, and return a row of each; callbacks write them.

        A rank that has no batch left scores a spare one, of which it returns no row.
        """
        if batch.rollouts is None:
            batch.rollouts = self.require_sampler().sample_traces(batch.problems)
            self.check_engine(batch.rollouts)
        self.require_fresh(batch.rollouts.policy_version)
        with self.phase("score"):
            batch.step = self.score(batch.rollouts)
        if batch.spare:
            return []
        return list(predicted_rows(batch, get_stratos_data(self.trainer), str(self.pretrained)))

    def check_engine(self, rollouts: Rollouts) -> None:
        """Compare each worker's log-probs of one completion with the teacher's, if they enter the reward.

        An engine with the trainer's weights samples with the teacher itself.

        Raises:
            EngineError: If they differ too much.
        """
        placement = self.require_sampler().dispatcher.engine.placement
        if placement is Placement.SHARED_WEIGHTS or self.reward.find_kl(rollouts.temperature) is None:
            return
        firsts = {rollout.completion.worker or "": rollout for rollout in reversed(rollouts.rollouts)}
        step = StepBatch.of_rollouts(replace(rollouts, rollouts=[*firsts.values()]))
        self.build_runner().run(
            step, step.shard, lambda rollout: [build_sampled_pass(rollout)], recompute=True
        )
        for row, worker in enumerate(firsts):
            mismatch = self.compare_sampled(step, [row])
            require_agreement(mismatch, self.mismatch_limit, self.global_step, worker)

    def compare_sampled(self, step: StepBatch, rows: Sequence[int]) -> Mismatch:
        """Return how far the engine's log-probs are from the trainer's, which the column "sampled" has."""
        log_probs, token_mask = step.pad("sampled", rows)  # (N, T)
        engine_log_probs = pad_engine_log_probs(step.rollouts(rows), log_probs)
        if engine_log_probs is None:
            return Mismatch()
        return Mismatch.between(log_probs, engine_log_probs, token_mask)


def average_metrics(updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of metrics over the updates of an iteration."""
    if len(updates) == 1:
        return updates[0]
    return {name: sum(metrics[name] for metrics in updates) / len(updates) for name in updates[0]}


def choose_answer_weight(weight: float | None, reward: Reward, student: Student) -> float:
    """Return the weight of the answer term; None: 1 where there is one.

    Raises:
        InputError: If there is no such term for this reward and student.
    """
    has_term = student.model == POLICY and reward.find_answer() is not None
    if weight is None:
        return float(has_term)
    if weight < 0 or (weight and not has_term):
        raise InputError(
            "model.answer_weight must be 0 or, with model.student policy and a LogProbReward or "
            f"VeriFreeReward, above: it is {weight}, with student {student.model or None} and "
            f"{type(reward).__name__}. Set it to 0."
        )
    return weight
