"""On-policy distillation: a student learns on its own answers from a teacher that sees the solution.

    training_step
      ├ sampler.complete*   the student's answers, on all ranks, each with the view of the teacher
      ├ step.divide         over ranks, by tokens: a rank's shard is a list of rows (rollouts/step.py)
      ├ runner.run          "sampled": the teacher's log-probs of judged tokens, their credit
      ├ runner.updates      the shard's micro-batches
      ├ forward_backward    for each of them (policy.py):
      │   ├ forward         "full": the teacher's states before each judged token, without gradient, those
      │   │                 of the student, and the divergence there; "sampled": the student's log-probs
      │   └ compute_loss    their sum → manual_backward, the last one sums gradients*
      ├ finish_update*      no rank has failed; clip, AdamW (policy.py)
      ├ step.share*         all ranks get the numbers of all answers
      └ log_step*           means over ranks → metrics.csv, W&B

Ranks wait for each other in what is marked *; with sharded weights in each forward and backward too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from rlt_lightning.datamodules.items import FIXED_PIECES
from rlt_lightning.datamodules.stages import StudentOPDData
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.datamodules.views import TeacherViews
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import Dtype
from rlt_lightning.modules.credits import RatioCredit
from rlt_lightning.modules.losses import LossOutput, LossTerm, PolicyGradient, list_passes
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.modules.passes import LossInputs
from rlt_lightning.modules.step_metrics import held_out_metrics
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.importance import TruncatedImportanceSampling
from rlt_lightning.numerics.losses import DAPOLoss
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rollouts.columns import REWARD, Group, Record
from rlt_lightning.rollouts.step import POLICY, REFERENCE, ScoringPass, StepBatch
from rlt_lightning.types import InputError, PromptBatch, Rollout

DIVERGENCE, JUDGED = Group("divergence"), Record("judged_tokens")  # columns of a step


class OPDModule(OnPolicyModule):
    """Train a student on its own answers, towards a teacher that sees the solution (on-policy distillation).

    loss = sum over judged tokens of D(student || teacher) / number of judged tokens of the step

    D is a divergence of the next-token distributions (GKD, arXiv:2306.13649, Eq. 2 with the student's own
    samples), or the policy gradient of the sampled tokens' log-ratio.

    Args:
        pretrained: The student, which is trained: local folder, hub id, or a name such as miniature.
        teacher: Frozen model that judges, such as an RLT teacher; None: the student itself.
        teacher_weights: Of oneself as teacher: "frozen" at the start, "live", or "averaged" by ReferenceSync.
        divergence: Which divergence.
        estimator: "full": over words. "sampled": reverse KL by the log-ratio of sampled tokens, or spans.
        temperature: Divides the logits of both; None: the temperature of sampling.
        group_size: Answers per problem.
        importance_sampling: Of "sampled": see `RLTModule`. The full divergence takes the tokens as they
            are.
        teacher_dtype: Type of the teacher's weights.
        options: Those of `OnPolicyModule` and `PolicyModule`, such as optimizer, dtype and lora.

    Raises:
        InputError: If settings contradict each other.
    """

    data_classes = (StudentOPDData,)
    frozen_role = "teacher"

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        teacher: str | None = None,
        teacher_weights: Literal["frozen", "live", "averaged"] = "frozen",
        divergence: Divergence = Divergence(),
        estimator: Literal["full", "sampled"] = "full",
        temperature: float | None = None,
        group_size: int = 1,
        *,
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None = "auto",
        teacher_dtype: Dtype = "float32",
        **options: Any,
    ) -> None:
        # The full divergence is no mean over samples of the engine that could be weighed.
        weights = importance_sampling if estimator == "sampled" else None
        super().__init__(pretrained=pretrained, group_size=group_size, importance_sampling=weights, **options)
        if group_size < 1 or (temperature is not None and temperature <= 0):
            raise InputError(
                "model.group_size must be at least 1 and model.temperature above 0 or null, but they are "
                f"{group_size} and {temperature}. Raise them."
            )
        if teacher is not None and teacher_weights != "frozen":
            raise InputError(
                f"model.teacher_weights {teacher_weights} are the student's own, but model.teacher is "
                f"{teacher}. Set one of them back: teacher to null, or teacher_weights to frozen."
            )
        if estimator == "sampled" and divergence.kind != "reverse":
            raise InputError(
                "model.estimator sampled estimates reverse KL over all words, but model.divergence is "
                f"{divergence}. Leave it out, or set the estimator to full."
            )
        if estimator == "full" and importance_sampling not in (None, "auto"):
            raise InputError(
                "model.importance_sampling weighs sampled tokens, but with model.estimator full the loss "
                "sums over words. Leave it out, or set the estimator to sampled."
            )
        self.teacher_name = teacher
        self.teacher_weights = teacher_weights
        self.divergence = divergence
        self.head_loss = divergence if estimator == "full" else None
        self.estimator = estimator
        self.temperature = temperature
        self.frozen_dtype = teacher_dtype

    def setup(self, stage: str) -> None:
        """Check, before any model is loaded, that data and settings fit."""
        super().setup(stage)
        if self.reference_moves != (self.teacher_weights == "averaged"):
            raise InputError(
                "model.teacher_weights averaged and the callback ReferenceSync need each other, but "
                f"teacher_weights is {self.teacher_weights}. Set both or none."
            )
        if self.views.byte_tokenizers is not None and self.estimator == "full":
            raise InputError(
                f"The divergence sums over words that both models share, but the tokenizer of the teacher "
                f"{self.teacher_name} is not the student's. Set model.estimator to sampled, which compares "
                "spans of text."
            )

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the name of the teacher, if it is another model."""
        return () if self.teacher_name is None else (self.teacher_name,)

    def list_readers(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """See `OnPolicyModule.list_readers`."""
        teacher = self.teacher_name or self.pretrained
        return [
            ("student", self.pretrained, FIXED_PIECES["teacher"]),
            ("teacher", teacher, ("teacher_view",)),
        ]

    def load_frozen_models(self) -> None:
        """Load the teacher, or a copy of the initial student."""
        super().load_frozen_models()
        if self.teacher_name is not None:
            model = self.load_frozen(self.teacher_name, self.frozen_dtype, "the teacher")
            self.models[self.teacher_name] = model
        elif self.needs_reference(self.trainer.training):
            role = "the teacher: the student at its start"
            self.reference = self.load_frozen(self.pretrained, self.dtype_name, role)

    # Training

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Run one iteration: the teacher judges the student's answers, and the student steps towards it."""
        sampler = self.require_sampler()
        request = sampler.request(batch.problems)
        sampler.complete(request)
        self.require_fresh(request.policy_version)
        sampler.submit_next()  # asynchronous rollouts: sampled while this step trains
        step = StepBatch.of_request(request, self.build_shards())
        step.divide(range(len(step)))
        runner, terms = self.build_runner(), [self.term]
        if self.estimator == "sampled":
            with self.phase("score") as stats:
                runner.run(step, step.shard, partial(list_passes, terms), stats)  # by the teacher
        with self.phase("train") as stats:
            # Forward, loss and backward of each micro-batch.
            self.forward_backward(runner.updates(step, step.shard, terms, stats))
            metrics = self.finish_update(step)
        self.measure(step)
        step.share(self.ranks.sum_tensor)
        self.log_iteration(batch, step, score_answers(step) | metrics)

    @property
    def term(self) -> LossTerm:
        """Return the loss."""
        if self.estimator == "full":
            return Distillation(self.teacher_model, self.temperature, self.views.exchanged, self.divergence)
        # A mean over tokens without a clip.
        loss = DAPOLoss(clip_eps_low=1.0, clip_eps_high=math.inf, kl_coef=0.0)
        build_pass = partial(build_judged_pass, temperature=self.temperature)
        return PolicyGradient(loss, self.importance_weights, credit=self.ratio, build_pass=build_pass)

    @property
    def ratio(self) -> RatioCredit:
        """Return the credit of a sampled token."""
        return RatioCredit(self.teacher_model, self.temperature)

    def measure(self, step: StepBatch) -> None:
        """Add up the divergence of each of this rank's answers over its judged tokens."""
        # Divergences already, or the student's log-probs, beside which the teacher's are known.
        ours, theirs = step.tokens["judged"], step.tokens.get(self.ratio.name, {})
        sums = [ours[row].sum() - (theirs[row].sum() if row in theirs else 0.0) for row in step.shard]
        judged = [float(count_judged(rollout)) for rollout in step.rollouts(step.shard)]
        divergences = torch.stack(sums)
        step.put_numbers(step.shard, {DIVERGENCE: divergences, JUDGED: upload(judged, divergences.device)})

    @property
    def teacher_model(self) -> str:
        """Return the teacher's name in scoring passes."""
        return self.teacher_name or (POLICY if self.teacher_weights == "live" else REFERENCE)

    @property
    def views(self) -> TeacherViews:
        """Return the teacher's contexts."""
        data: Any = get_stratos_data(self.trainer)  # `require_data` has checked that it has views
        views: TeacherViews = data.views
        return views

    def needs_reference(self, trains: bool) -> bool:
        """Return whether the teacher is a copy of the student; a frozen LoRA's teacher is its base."""
        by_itself = self.teacher_weights == "averaged" or (self.teacher_weights == "frozen" and not self.lora)
        return self.teacher_name is None and by_itself

    # Validation

    @torch.no_grad()
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Keep the divergence on held-out problems, answer length and the fraction of closed answers."""
        rollouts = batch.rollouts = self.require_sampler().sample_held_out(batch.problems)
        self.require_fresh(rollouts.policy_version)
        step, term = StepBatch.of_rollouts(rollouts), self.term
        with self.phase("score"):
            self.build_runner().run(
                step,
                step.shard,
                lambda rollout: [term.scoring_pass(rollout), *term.scoring_passes(rollout)],
                recompute=True,
            )
        self.measure(step)
        metrics = score_answers(step)
        batch.step = step
        self.held_out.add(held_out_metrics(rollouts), len(step), {})
        figures = {"distill/val_divergence": metrics["distill/divergence"]}
        self.held_out.add(figures, int(step.table[JUDGED].sum()), {})


@dataclass(eq=False)
class Distillation(LossTerm):
    """The divergence of the student from a teacher that sees the solution, over judged tokens.

    Args:
        teacher: The teacher's name in scoring passes.
        temperature: Divides the logits of both; None: that of sampling.
        exchanged: The first tokens of the two models' closing tags, which change places.
        divergence: Which divergence.
    """

    teacher: str
    temperature: float | None
    exchanged: tuple[int, int] | None
    divergence: Divergence

    def scoring_pass(self, rollout: Rollout) -> ScoringPass:
        """Return the answer up to the last judged token, compared with what the teacher reads.

        Of an answer that the teacher cannot judge: its first token, and the teacher's context.
        """
        judged, context = build_judged_pass(rollout, self.temperature), rollout.problem.teacher_view
        shown = (rollout.view.token_ids if rollout.view else []) or context[-1:]
        scored = {"judged": (len(context), len(context) + (len(shown) if judged.num_scored else 0))}
        key = judged.family, self.temperature
        other = ScoringPass(self.teacher, context, shown, scored, *key, exchanged=self.exchanged)
        return replace(judged, compared_with=other, divergence=self.divergence)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the sum over judged tokens, divided by their number in the step."""
        loss = inputs.computed.values.sum() / inputs.num_scored
        return LossOutput(loss, {"policy/loss": loss.detach(), "distill/divergence": loss.detach()})


def score_answers(step: StepBatch) -> dict[str, Any]:
    """Reward answers with minus the mean divergence of their judged tokens, nats; return the step's metrics.

    Reward and divergence are 0 where nothing is judged.
    """
    counts, divergences = step.table[JUDGED], step.table[DIVERGENCE]
    step.set_scores({REWARD: -divergences / counts.clamp(min=1), JUDGED: counts})
    num_judged, num_sampled = float(counts.sum()), sum(len(step.token_ids(row)) for row in range(len(step)))
    return {
        "distill/divergence": float(divergences.sum()) / max(1.0, num_judged),
        # Judged tokens of an answer, their part of all sampled tokens, and answers without one.
        "distill/judged_tokens": counts.mean(),
        "distill/judged_frac": num_judged / num_sampled,
        "distill/unjudged_frac": (counts == 0).float().mean(),
    }


def build_judged_pass(rollout: Rollout, temperature: float | None) -> ScoringPass:
    """Return the answer up to the last judged token; of one without any its first token, none scored."""
    prompt, num = rollout.problem.teacher_prompt, count_judged(rollout)
    start = rollout.view.start if rollout.view else 0
    return ScoringPass(
        POLICY,
        prompt,
        rollout.completion.token_ids[: max(1, start + num)],
        {"judged": (len(prompt) + start, len(prompt) + start + num)},
        family=rollout.problem.row,
        temperature=temperature,
    )


def count_judged(row: Rollout) -> int:
    """Return how many of an answer's tokens the teacher judges."""
    return row.view.num_tokens if row.view else 0
