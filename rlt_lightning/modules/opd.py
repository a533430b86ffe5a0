"""On-policy distillation: a student learns on its own answers from a teacher that sees the solution.

    training_step
      ├ sampler.complete*   the student's answers, on all ranks, each with the view of the teacher
      ├ divide              over ranks, by tokens: a rank's shard is a list of numbers (rollouts/shards.py)
      ├ update_policy       the shard's micro-batches (`pack` in base.py); for each:
      │   ├ teacher*        its states before each judged token, without gradient
      │   └ student*        its states there; the divergence of both distributions, summed → backward
      └ log_step*

In what is marked * ranks meet: in the first always, in the others with sharded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from rlt_lightning.datamodules.stages import StudentOPDData
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.datamodules.teacher_views import TeacherViews
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import Dtype
from rlt_lightning.models.lora import without_adapter
from rlt_lightning.models.packed import (
    ModelHead,
    compute_log_probs,
    head_divergence,
    scored_hidden_states,
)
from rlt_lightning.modules.base import follow_options
from rlt_lightning.modules.frozen import FrozenModel, RunModel
from rlt_lightning.modules.on_policy import OnPolicyModule, OnPolicyOptions, UpdateSums
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.step_metrics import rollout_metrics
from rlt_lightning.numerics.divergence import Divergence, sampled_advantages
from rlt_lightning.numerics.importance import TruncatedImportanceSampling
from rlt_lightning.numerics.packing import (
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    from_padded,
    to_padded,
)
from rlt_lightning.numerics.rewards import FiniteChecks
from rlt_lightning.numerics.spans import Span
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.types import InputError, PromptBatch, RewardTerms, Rollout, Rollouts, Scores


class OPDModule(OnPolicyModule):
    """Train a student on its own answers, towards a teacher that sees the solution (on-policy distillation).

    loss = sum over judged tokens of D(student || teacher) / number of judged tokens of the step

    D is a divergence of the next-token distributions (GKD, arXiv:2306.13649, Eq. 2 with the student's own
    samples), or the policy gradient of the sampled tokens' log-ratio.

    Args:
        pretrained: The student, which is trained: local folder, hub id, or a name such as miniature.
        teacher: Frozen model that judges, such as an RLT teacher; None: the student itself.
        teacher_weights: Of oneself as teacher: "frozen" at the start, "live", or "averaged" by ReferenceSync.
        divergence: Which divergence, over all words or the likeliest.
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

    @follow_options
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
        **options: Unpack[OnPolicyOptions],
    ) -> None:
        # The full divergence is no mean over samples of the engine that could be weighed.
        weights = importance_sampling if estimator == "sampled" else None
        super().__init__(pretrained=pretrained, group_size=group_size, importance_sampling=weights, **options)
        self.save_hyperparameters(logger=False)
        weighted = importance_sampling not in (None, "auto")
        require_options(group_size, teacher, teacher_weights, estimator, divergence, weighted, temperature)
        self.teacher_name = teacher
        self.teacher_weights = teacher_weights
        self.divergence = divergence
        self.estimator = estimator
        self.temperature = temperature
        self.teacher_dtype: Dtype = teacher_dtype
        self.teacher: FrozenModel | None = None

    def setup(self, stage: str) -> None:
        """Check, before any model is loaded, that data and settings fit."""
        super().setup(stage)
        if stage == "predict":
            raise InputError(
                "`rlt predict` scores or writes explanations, but OPDModule trains a student, which does "
                "neither. To let the trained student answer, use `rlt test --config recipe_7b/evaluate`."
            )
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
    def head_loss(self) -> Divergence | None:
        """Return the divergence that is minimised through the head, for the check of its kernels."""
        return self.divergence if self.estimator == "full" else None

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the name of the teacher, if it is another model."""
        return () if self.teacher_name is None else (self.teacher_name,)

    def list_scoring_models(self) -> list[tuple[str, FrozenModel]]:
        """See `OnPolicyModule.list_scoring_models`."""
        return [] if self.teacher is None else [(str(self.teacher_name), self.teacher)]

    def load_frozen_models(self) -> None:
        """Load the teacher, or a copy of the initial student."""
        super().load_frozen_models()
        if self.teacher_name is not None:
            self.teacher = self.load_frozen(self.teacher_name, self.teacher_dtype, "the teacher")
        elif self.copies_student:
            role = "the teacher: the student at its start"
            self.reference = self.load_frozen(self.pretrained, self.dtype_name, role)

    def types(self) -> dict[str, str]:
        """Add the teacher's type."""
        named = {} if self.teacher_name is None else {"model.teacher_dtype": self.teacher_dtype}
        return super().types() | named

    def build_metadata(self) -> dict[str, Any]:
        """See `PolicyModule.build_metadata`."""
        metadata = super().build_metadata()
        teacher = self.teacher_name or f"the student itself ({self.teacher_weights})"
        kind = self.divergence.kind if self.estimator == "full" else "sampled log-ratio"
        metadata["training"] |= {"teacher": teacher, "divergence": kind}
        return metadata

    # Training

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Run one iteration: the teacher judges the student's answers, and the student steps towards it."""
        sampler = self.require_sampler()
        request = sampler.request(batch.problems)
        sampler.complete(request)
        self.require_fresh(request.policy_version)
        sampler.submit_next()  # asynchronous rollouts: sampled while this step trains
        shards = self.build_shards()
        shard = shards.divide({number: request.count_tokens(number) for number in request.completions})
        rollouts = request.build_rollouts(shard)
        with self.phase("train") as stats:
            metrics, found = self.update_policy(rollouts, stats)
        # Of each answer how much was judged, and the sum of its divergence.
        sums = torch.stack([values.sum() for values in found]).tolist() if found else []
        judged = dict(zip(shard, zip(map(len, found), sums, strict=True), strict=True))
        judged = self.gather(judged, "what the teacher judges on all ranks")
        own = request.own_numbers
        counts = upload([judged[number][0] for number in own], self.device, torch.float32)
        divergences = upload([judged[number][1] for number in own], self.device, torch.float32)
        terms = JudgedTerms(-divergences / counts.clamp(min=1), judged_tokens=counts)
        rollouts = batch.rollouts = request.build_rollouts(own)
        batch.scores = Scores(terms, [], [], [])
        metrics |= judged_metrics(terms, rollouts, self.sum_over_ranks)
        metrics |= self.measure_rollouts(rollouts, shards)
        self.log_step(metrics, len(rollouts.rollouts))

    def update_policy(self, rollouts: Rollouts, stats: PhaseStats) -> tuple[dict[str, Any], list[Tensor]]:
        """Take one optimizer step towards the teacher.

        Args:
            rollouts: The N answers of this rank's shard.
            stats: Counts the tokens that the student computes.

        Returns:
            Metrics, and the divergence at each answer's judged tokens, N of (T,), nats.
        """
        rows = rollouts.rollouts
        sequences = [build_student_sequence(row) for row in rows]
        _, num_tokens = self.sum_over_ranks(len(rows), sum(sum(s.scored) for s in sequences))
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        sums = UpdateSums()
        with self.place_teacher() as ask:
            self.optimizers().zero_grad()  # type: ignore[union-attr]
            for micro_batch in self.pack(sequences, measure_lengths(rows), stats):
                loss, values, metrics, mismatch = self.micro_batch_loss(
                    rollouts, ask, micro_batch.planned, micro_batch.packed, num_tokens, sums.checks
                )
                self.manual_backward(micro_batch.scale * loss)
                sums.add(micro_batch, metrics, mismatch)
                for i, own in zip(micro_batch.indices, values, strict=True):
                    found[i] = own
            return self.finish_update(sums), found

    def micro_batch_loss(
        self,
        rollouts: Rollouts,
        ask: RunModel,
        micro_batch: MicroBatch,
        packed: PackedSequences,
        num_tokens: float,
        checks: FiniteChecks,
    ) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor], Tensor | None]:
        """Judge n answers.

        Args:
            rollouts: N answers.
            ask: Calls the teacher.
            micro_batch: Which n of them are meant.
            packed: What the student reads of them, in one row.
            num_tokens: Judged tokens of the whole step.
            checks: Get what must be finite.

        Returns:
            The loss, the divergence at each answer's judged tokens, n of (T,), nats, metrics, and the
            engine's mismatch.
        """
        rows = rollouts.rollouts
        teachers = self.pack_sequences([build_teacher_sequence(row) for row in rows], micro_batch)
        temperature = self.temperature or rollouts.temperature
        metrics, mismatch, num_tokens = {}, None, max(1.0, num_tokens)
        if self.estimator == "full":
            values = self.divergences(packed, teachers, temperature, ask)  # (M,)
            loss = values.sum() / num_tokens
        else:
            chosen = [rows[i] for i in micro_batch.indices]
            stale = rollouts.policy_version < self.global_step
            values, token_loss, entropy, mismatch = self.log_ratios(
                chosen, packed, teachers, temperature, ask, stale
            )
            loss = token_loss.sum() / num_tokens
            metrics["policy/entropy"] = entropy.sum() / num_tokens
        values = values.detach()
        lengths = [count_judged(rows[i]) for i in micro_batch.indices]
        numbers = [rows[i].problem.row for i in micro_batch.indices]
        checks.add(values, lengths, "divergence of student and teacher", numbers)
        metrics |= {"policy/loss": loss.detach(), "distill/divergence": values.sum() / num_tokens}
        return loss, values.split(lengths), metrics, mismatch

    def divergences(
        self, packed: PackedSequences, teachers: PackedSequences, temperature: float, ask: RunModel
    ) -> Tensor:
        """Return the divergence before each judged token, (M,), nats, with gradient to the student."""
        exchanged = self.views.exchanged
        with torch.no_grad():
            teacher_hidden = ask(scored_hidden_states, teachers)  # (M, H)

        def with_student(student: Any) -> Tensor:
            hidden = scored_hidden_states(student, packed)  # (M, H)

            def with_teacher(teacher: Any) -> Tensor:
                sides = (
                    ModelHead(student, temperature),
                    hidden,
                    ModelHead(teacher, temperature),
                    teacher_hidden,
                )
                return head_divergence(*sides, self.divergence, exchanged, self.head)

            return with_teacher(student) if self.is_own_teacher else ask(with_teacher)

        return self.run(with_student)

    def log_ratios(
        self,
        rows: list[Rollout],
        packed: PackedSequences,
        teachers: PackedSequences,
        temperature: float,
        ask: RunModel,
        stale: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compare the models at the sampled tokens.

        Args:
            rows: n answers.
            packed: What the student reads of them.
            teachers: What the teacher reads.
            temperature: Divides the logits of both.
            ask: Calls the teacher.
            stale: Whether older weights sampled them.

        Returns:
            log p_S - log p_T of each judged token, or its part of that of its span, nats; its loss, with
            gradient; the entropy there, nats; (M,) each. And the engine's mismatch.
        """
        with torch.no_grad():
            read = exchange_targets(teachers, packed.targets, self.views.exchanged)
            theirs, _ = ask(compute_log_probs, read, temperature, self.head)
        log_probs, entropy = self.run(compute_log_probs, packed, temperature, self.head, True)  # (M,)
        found = [span for row in rows for view in row.views for span in view.spans or ()]
        spans = found if self.views.byte_tokenizers else None
        advantages = sampled_advantages(log_probs, theirs, spans)
        lengths = [count_judged(row) for row in rows]
        padded, token_mask = to_padded(log_probs, lengths)  # (n, T)
        cut = [cut_to_judged(row) for row in rows]
        old, weights, mismatch = self.compare_with_engine(cut, padded, token_mask, stale)
        log_ratio = padded - (padded.detach() if old is None else old)
        ratio = from_padded(log_ratio, lengths).exp()  # (M,)
        weight = ratio if weights is None else from_padded(weights, lengths) * ratio
        return -per_token(advantages, spans), -weight * advantages, entropy.detach(), mismatch

    @property
    def views(self) -> TeacherViews:
        """Return what the teacher sees."""
        data = get_stratos_data(self.trainer)
        assert isinstance(data, StudentOPDData), "as `require_data` has checked"
        return data.views

    @property
    def copies_student(self) -> bool:
        """Return whether the teacher is a copy of the student; a frozen LoRA's teacher is its base."""
        by_itself = self.teacher_weights == "averaged" or (self.teacher_weights == "frozen" and not self.lora)
        return self.teacher_name is None and by_itself

    @property
    def is_own_teacher(self) -> bool:
        """Return whether the teacher's head is the student's."""
        return self.teacher is None and self.reference is None

    @contextmanager
    def place_teacher(self) -> Iterator[RunModel]:
        """Yield what calls the teacher, with its weights on the device inside the block."""
        frozen = self.teacher or self.reference
        if frozen is not None:
            with frozen.loaded_on(self.device) as run:
                yield run
        elif self.teacher_weights == "live":
            yield self.run
        else:
            yield partial(self.run, without_adapter)

    # Validation

    @torch.no_grad()
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Keep the divergence on held-out problems, answer length and the fraction of closed answers."""
        rollouts = batch.rollouts = self.require_sampler().sample_held_out(batch.problems)
        self.require_fresh(rollouts.policy_version)
        rows = rollouts.rollouts
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        sequences = [build_student_sequence(row) for row in rows]
        checks = FiniteChecks()
        with self.phase("score"), self.place_teacher() as ask:
            num_tokens = sum(map(count_judged, rows))
            for micro_batch, _ in self.plan_forward(measure_lengths(rows)):
                packed = self.pack_sequences(sequences, micro_batch)
                _, values, _, _ = self.micro_batch_loss(
                    rollouts, ask, micro_batch, packed, num_tokens, checks
                )
                for i, own in zip(micro_batch.indices, values, strict=True):
                    found[i] = own
            checks.require()
        lengths = rollout_metrics(rollouts)
        figures = {
            "rollout/val_length_mean": lengths["rollout/length_mean"],
            "rollout/val_closed_frac": lengths["rollout/closed_frac"],
        }
        self.held_out.add(figures, len(rows), {})
        judged = torch.cat(found).tolist()
        divergence = sum(judged) / max(1, len(judged))  # 0 if nothing is judged, as in training
        self.held_out.add({"distill/val_divergence": divergence}, len(judged), {})


@dataclass(frozen=True)
class JudgedTerms(RewardTerms):
    """What is recorded of each answer, both (N,).

    Attributes:
        reward: Minus the mean divergence of its judged tokens, nats; 0 if there is none.
        judged_tokens: How many tokens the teacher judged.
    """

    judged_tokens: Tensor


def count_judged(row: Rollout) -> int:
    """Return how many of an answer's tokens the teacher judges."""
    return sum(view.num_tokens for view in row.views)


def find_first_judged(row: Rollout) -> int:
    """Return the first of an answer's tokens that the teacher judges; 0 if it judges none."""
    return sum(view.start for view in row.views)


def cut_to_judged(row: Rollout) -> Rollout:
    """Return an answer cut to its judged tokens, with the engine's log-probs of them."""
    completion, start = row.completion, find_first_judged(row)
    part = slice(start, start + count_judged(row))
    log_probs = None if completion.log_probs is None else completion.log_probs[part]
    return replace(
        row, completion=replace(completion, token_ids=completion.token_ids[part], log_probs=log_probs)
    )


def build_student_sequence(row: Rollout) -> ScoredSequence:
    """Return prompt and answer up to the last judged token, which are scored; of others the first token."""
    prompt, start = row.problem.teacher_prompt, find_first_judged(row)
    rest = row.completion.token_ids[: max(1, start + count_judged(row))]
    scored = [False] * (len(prompt) + start) + [True] * count_judged(row)
    return ScoredSequence(prompt, rest, scored if row.views else [False] * (len(prompt) + len(rest)))


def build_teacher_sequence(row: Rollout) -> ScoredSequence:
    """Return the teacher's context and what it judges; of an answer that it cannot judge its context."""
    context, read = row.problem.teacher_view, row.views[0].token_ids if row.views else []
    rest = read or context[-1:]
    return ScoredSequence(context, rest, [False] * len(context) + [bool(read)] * len(rest))


def exchange_targets(
    teachers: PackedSequences, sampled: Tensor, exchanged: tuple[int, int] | None
) -> PackedSequences:
    """Return what the teacher reads, scored at the M sampled tokens as in `divergence` with `exchanged`.

    A student that samples the teacher's own closing tag gets no credit for an end: the exchange holds for
    each of both words, wherever it stands.
    """
    if exchanged is None:
        return teachers
    first, second = (sampled == word for word in exchanged)
    targets = torch.where(first, exchanged[1], torch.where(second, exchanged[0], sampled))
    return replace(teachers, targets=targets)


def per_token(values: Tensor, spans: Sequence[Span] | None) -> Tensor:
    """Divide what each of the student's tokens has of its whole span, (M,), by the span's tokens."""
    if spans is None:
        return values
    sizes = torch.tensor([span[1] for span in spans], dtype=torch.long, device="cpu")
    return values / upload(sizes.repeat_interleave(sizes), values.device).to(values.dtype)


def measure_lengths(rows: list[Rollout]) -> list[SequenceLengths]:
    """Return the lengths of what student and teacher read, whichever is longer."""
    pairs = [(build_student_sequence(row), build_teacher_sequence(row)) for row in rows]
    return [
        SequenceLengths(row.problem.row, max(len(s.prefix) for s in pair), max(len(s.rest) for s in pair))
        for row, pair in zip(rows, pairs, strict=True)
    ]


def judged_metrics(
    terms: JudgedTerms, rollouts: Rollouts, sum_over_ranks: Callable[..., list[float]]
) -> dict[str, Any]:
    """Return how much of the answers the teacher could judge."""
    rows = rollouts.rollouts
    own = sum(map(count_judged, rows)), sum(len(row.completion.token_ids) for row in rows)
    judged, sampled = sum_over_ranks(*own)
    return {
        "distill/judged_tokens": terms.judged_tokens.mean(),
        "distill/judged_frac": judged / sampled,
        "distill/unjudged_frac": (terms.judged_tokens == 0).float().mean(),
    }


def require_options(
    group_size: int,
    teacher: str | None,
    teacher_weights: str,
    estimator: str,
    divergence: Divergence,
    weighted: bool,
    temperature: float | None = None,
) -> None:
    """Check that settings of `OPDModule` do not contradict each other.

    `weighted` says whether importance weights were asked for.

    Raises:
        InputError: Naming them.
    """
    if group_size < 1:
        raise InputError(f"model.group_size must be at least 1, but is {group_size}. Raise it.")
    if temperature is not None and temperature <= 0:
        raise InputError(
            f"model.temperature must be positive, but is {temperature}. Raise it, or leave it out for "
            "that of sampling."
        )
    if teacher is not None and teacher_weights != "frozen":
        raise InputError(
            f"model.teacher_weights {teacher_weights} are the student's own, but model.teacher is "
            f"{teacher}. Set one of them back: teacher to null, or teacher_weights to frozen."
        )
    bounded = divergence.top_k is not None or divergence.clip is not None
    if estimator == "sampled" and (divergence.kind != "reverse" or bounded):
        raise InputError(
            "model.estimator sampled estimates reverse KL over all words, but model.divergence is "
            f"{divergence}. Leave it out, or set the estimator to full."
        )
    if estimator == "full" and weighted:
        raise InputError(
            "model.importance_sampling weighs sampled tokens, but with model.estimator full the loss sums "
            "over words. Leave it out, or set the estimator to sampled."
        )
