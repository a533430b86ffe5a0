"""Run the forwards that rewards and losses declare: merge, pack and run them, and unpack the values.

A `ScoringPass` (rollouts/step.py) is a sequence that a model reads, with the ranges of it that are scored.

    run       passes of each row ─▶ equal or nested sequences of a model run once ─▶ groups, in one order on
              all ranks ─▶ micro-batches, equally many on ranks that wait for each other ─▶ columns
    updates   the policy's passes of each loss term ─▶ micro-batches, equally many on all ranks ─▶ `forward`,
              with gradient, in the module's training_step

Two passes over a row are merged if they have one prefix and one's rest begins with the other's: the reference
reads a completion for the KL penalty and, as the student, with the solution after it; in validation all
sampled tokens have those of r_KL among them. Passes over different rows are shared only by
`ScoringPass.once`. With sharded weights every forward waits for all ranks: all run the same groups, and a
rank that has nothing in one runs two tokens as a dummy. Scoring draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_lightning.models.load import read_context_length
from rlt_lightning.models.packed import (
    HeadOptions,
    ModelHead,
    call_model,
    compute_log_probs,
    head_divergence,
    head_log_probs,
    scored_hidden_states,
)
from rlt_lightning.modules.frozen import Model, RunModel
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.ranks import Ranks
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.finite import NonFiniteError, choose_remedy, require_finite
from rlt_lightning.numerics.packing import (
    Layout,
    MicroBatch,
    PackedSequences,
    SequenceLengths,
    micro_batches,
    split_to,
    to_padded,
)
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards.base import Reward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import Term, columns_of
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch
from rlt_lightning.types import InputError, Rollout, Rollouts

# Returns the scoring passes of a completion.
Declare = Callable[[Rollout], Sequence[ScoringPass]]
# A pass over a row; None: a dummy, whose values nobody gets.
RowPass = tuple[int | None, ScoringPass]
# The token column of the policy's log-probs at the start of an iteration with several updates.
OLD = "old"


class Values(NamedTuple):
    """A model's values of a micro-batch's M scored tokens.

    Attributes:
        log_probs: Log-probs, (M,), nats; None if only divergences are wanted.
        entropy: Entropies there, (M,), nats; None if nobody asks for them.
        divergences: Divergences from the model that it is compared with, (M,) or fewer; None without one.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    divergences: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """Return what a loss reads: divergences, where models are compared, else log-probs."""
        found = self.log_probs if self.divergences is None else self.divergences
        assert found is not None
        return found


class PassKey(NamedTuple):
    """The settings that sequences share which go through a model together."""

    model: str
    temperature: float
    exchanged: tuple[int, int] | None = None
    compared_with: PassKey | None = None
    divergence: Divergence = Divergence("forward")

    @classmethod
    def of(cls, scoring: ScoringPass) -> PassKey:
        """Return the settings of a pass whose temperatures are set."""
        other, exchanged = scoring.compared_with, scoring.exchanged
        key = None if other is None else cls.of(other)
        return cls(scoring.model, scoring.temperature or 1.0, exchanged, key, scoring.divergence)

    def build_dummy(self) -> ScoringPass:
        """Return a pass for a rank that has none in this group."""
        return ScoringPass(
            self.model,
            [],
            [0, 0],
            {"dummy": (1, 2)},
            temperature=self.temperature,
            exchanged=self.exchanged,
            compared_with=self.compared_with and self.compared_with.build_dummy(),
            divergence=self.divergence,
        )


class Packed(NamedTuple):
    """A micro-batch in one packed row, and what it is compared with.

    Attributes:
        entries: Its passes with their rows.
        key: Their settings.
        head: How log-probs are computed from hidden states.
        tokens: The packed row.
        weight: 0: computed only because other ranks compute one; else 1.
        is_last: Whether it is the last of its group.
        run_other: Runs the model that it is compared with; None: nothing is compared.
        other_tokens: What that model reads.
        shares_head: Whether both models are the policy, which computes one forward at a time.
    """

    entries: list[RowPass]
    key: PassKey
    head: HeadOptions
    tokens: PackedSequences
    weight: float
    is_last: bool
    run_other: RunModel | None = None
    other_tokens: PackedSequences | None = None
    shares_head: bool = False

    def find_compared(self) -> list[int]:
        """Return which of the scored tokens are compared."""
        found, before = list[int](), 0
        for _, scoring in self.entries:
            slots = scoring.find_slots(scoring.compared)
            found += range(before + slots.start, before + slots.stop)
            before += scoring.num_scored
        return found


class Micro(NamedTuple):
    """A micro-batch of an update: rows of a loss term's passes.

    Attributes:
        step: The step.
        batch: The rows' tokens, and what the policy is compared with.
        scale: The factor of the loss: the strategy averages gradients over ranks, so each rank's part
            counts world_size times. 0: computed only because other ranks compute one.
        num_sequences: Rows of the whole update, of all ranks.
        num_tokens: Their tokens.
        num_scored: Tokens that the term scores in the whole update.
    """

    step: StepBatch
    batch: Packed
    scale: float
    num_sequences: float
    num_tokens: float
    num_scored: float

    @property
    def rows(self) -> list[int]:
        """Return the rows of the step."""
        return [row for row, _ in self.batch.entries if row is not None]

    @property
    def passes(self) -> list[ScoringPass]:
        """Return the policy's pass over each."""
        return [scoring for _, scoring in self.batch.entries]


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch of n rows: the policy's values, and everything that was known before.

    Attributes:
        micro: The micro-batch.
        computed: The policy's values, (M,), the only ones with gradient.
        log_probs: The same, (n, T), padded with 0: log-probs, or divergences.
        token_mask: True where the policy has computed something, (n, T).
        stale: Whether older weights sampled.
    """

    micro: Micro
    computed: Values
    log_probs: Tensor
    token_mask: Tensor
    stale: bool

    @classmethod
    def of(cls, micro: Micro, computed: Values, global_step: int) -> LossInputs:
        """Return the inputs of a micro-batch's loss."""
        padded, token_mask = to_padded(computed.values, [scoring.num_scored for scoring in micro.passes])
        return cls(micro, computed, padded, token_mask, micro.step.policy_version < global_step)

    @property
    def step(self) -> StepBatch:
        """Return the step."""
        return self.micro.step

    @property
    def rollouts(self) -> list[Rollout]:
        """Return the completions."""
        return self.step.rollouts(self.micro.rows)

    @property
    def advantages(self) -> Tensor:
        """Return the advantages, (n,)."""
        assert self.step.advantages is not None
        return self.step.advantages[upload(self.micro.rows, self.step.advantages.device)]

    @property
    def num_scored(self) -> float:
        """Return how many tokens the term scores in the whole update; 1 if there is none."""
        return max(1.0, self.micro.num_scored)

    def pad_column(self, name: str) -> Tensor:
        """Return a token column of these rows, (n, T)."""
        return self.step.pad(name, self.micro.rows)[0]

    @property
    def old_log_probs(self) -> Tensor:
        """Return the policy's log-probs at the start of the iteration, (n, T), without gradient.

        These are `log_probs` unless the iteration updates the policy several times.
        """
        return self.pad_column(OLD) if OLD in self.step.tokens else self.log_probs.detach()

    @property
    def engine_log_probs(self) -> Tensor | None:
        """Return the log-probs with which the engine sampled, (n, T); None if it did not report them."""
        parts = [scoring.sampled for scoring in self.micro.passes]
        return pad_engine_log_probs(self.rollouts, self.log_probs, parts)


def pad_engine_log_probs(
    rollouts: Sequence[Rollout], like: Tensor, parts: Sequence[slice] | None = None
) -> Tensor | None:
    """Return the engine's log-probs of the sampled tokens, (n, T), padded with 0 like `like`.

    Args:
        rollouts: n completions.
        like: A tensor of the type and on the device that are wanted.
        parts: Which tokens of each; None: all.

    Returns:
        None if the engine did not send all of them.
    """
    values = [rollout.completion.log_probs for rollout in rollouts]
    if any(value is None for value in values):
        return None
    parts = parts or [slice(None)] * len(rollouts)
    tensors = [
        torch.tensor((value or [])[part], dtype=like.dtype, device="cpu")
        for value, part in zip(values, parts, strict=True)
    ]
    return upload(pad_sequence(tensors, batch_first=True), like.device)


class Declares(Protocol):
    """A term of a loss, which the policy computes with gradient (losses.py)."""

    @property
    def with_entropy(self) -> bool:
        """Return whether it reads the policy's entropies."""

    def scoring_pass(self, rollout: Any) -> ScoringPass:
        """Return the policy's scoring pass over a completion."""


T = TypeVar("T", bound=Declares)


@dataclass
class PassRunner:
    """Runs scoring passes.

    Args:
        models: The models by the names that scoring passes use.
        device: Where models compute.
        head: How log-probs are computed from hidden states.
        micro_batch_tokens: Tokens of a forward; a longer sequence gets one by itself.
        layout: How sequences share a forward.
        ranks: The ranks. With sharded weights their forwards meet.
        splits: Whether a rank may split a micro-batch to have as many as the others.
    """

    models: Mapping[str, Model]
    device: torch.device
    head: HeadOptions = HeadOptions()
    micro_batch_tokens: int = 16384
    layout: Layout = "auto"
    ranks: Ranks = field(default_factory=Ranks)
    splits: bool = True

    @torch.no_grad()
    def run(
        self,
        step: StepBatch,
        rows: Sequence[int],
        declare: Declare,
        stats: PhaseStats | None = None,
        recompute: bool = False,
    ) -> None:
        """Fill token columns of the step for these rows, which are this rank's, or a dummy.

        Where other ranks have rows of the step too, values that are not finite stay in `step.checks`, and
        what `declare` raises, or a completion without room in a context, in `step.failure`: all ranks raise
        together what failed on one of them (`Ranks.raise_together`).

        Args:
            step: The step.
            rows: Rows of it.
            declare: Returns the scoring passes of a row.
            stats: Counts the tokens that models compute.
            recompute: Ask the policy also where the engine reported log-probs.

        Raises:
            NonFiniteError: If a log-prob is NaN or infinite, naming the rows and the value; see above.
            InputError: If a retokenized completion does not fit into a model's context; see above.
        """
        rollouts = {row: step.rollout(row) for row in rows}
        declared: list[tuple[int, ScoringPass]] = []
        for row, rollout in rollouts.items():
            try:
                declared += [(row, set_temperatures(scoring, step)) for scoring in declare(rollout)]
            except Exception as error:  # of a user's class: any
                step.keep_failure(error)
        if not recompute:
            declared = self.take_sampled(step, rollouts, declared)
        passes, shared = merge_passes(step, declared)
        groups: dict[PassKey, list[RowPass]] = {}
        for row, scoring in passes:
            groups.setdefault(PassKey.of(scoring), []).append((row, scoring))
        keys = list(groups)
        if self.ranks.sharded:
            keys = sorted({key for part in self.ranks.gather(keys) for key in part}, key=repr)
        for key in keys:
            self.run_group(step, key, groups.get(key) or [(None, key.build_dummy())], stats or PhaseStats())
        for row, scoring in shared:
            for column in (step.tokens.get(name, {}) for name in scoring.scored):
                if (first := step.known[find_once(scoring)]) in column:  # else this rank has failed
                    column[row] = column[first]
        if step.shards is None:
            step.checks.require()

    def take_sampled(
        self, step: StepBatch, rollouts: dict[int, Rollout], passes: list[tuple[int, ScoringPass]]
    ) -> list[tuple[int, ScoringPass]]:
        """Take the log-probs that the engine reported, in one copy; return the other passes."""
        served: list[tuple[int, ScoringPass]] = []
        others: list[tuple[int, ScoringPass]] = []
        for row, scoring in passes:
            is_served = scoring.asks_engine and scoring.temperature == step.temperature
            (served if is_served else others).append((row, scoring))
        # Asked whatever is served: rows of another rank may have declared other passes.
        if self.lacks_log_probs(step, rollouts) or not served:
            return passes
        values: list[float] = []
        for row, scoring in served:
            log_probs = rollouts[row].completion.log_probs
            assert log_probs is not None
            values += log_probs[scoring.sampled]
        flat = upload(values, self.device, torch.float32)
        counts = [scoring.num_scored for _, scoring in served]
        for (row, scoring), part in zip(served, flat.split(counts), strict=True):
            for name in scoring.scored:
                step.tokens.setdefault(name, {})[row] = part
        return others

    def lacks_log_probs(self, step: StepBatch, rollouts: dict[int, Rollout]) -> bool:
        """Return whether the engine did not report the log-probs of a completion; all ranks decide alike.

        They know all completions of a step that they share. Elsewhere they must only agree where they run
        forwards together.
        """
        if step.shards is not None:
            return step.lacks_log_probs
        unknown = any(rollout.completion.log_probs is None for rollout in rollouts.values())
        return self.ranks.any(unknown) if self.ranks.sharded else unknown

    def find_model(self, name: str) -> Model:
        """Return a model that passes name."""
        if name not in self.models:
            raise InputError(
                f"A scoring pass names the model '{name}', but this run has {', '.join(self.models)}. "
                "Correct the `ScoringPass` that your reward or loss term declares."
            )
        return self.models[name]

    def run_group(self, step: StepBatch, key: PassKey, passes: list[RowPass], stats: PhaseStats) -> None:
        """Run a model over sequences, or two models of which one is compared with the other."""
        with ExitStack() as stack:
            run = stack.enter_context(self.find_model(key.model).loaded_on(self.device))
            try:
                require_context(run, step, passes)
            except InputError as error:
                step.keep_failure(error)
                passes = [(None, key.build_dummy())]  # other ranks may wait for this one's forward
            for batch in self.pack(key, passes, self.ranks.sharded, stats):
                if batch.other_tokens is not None:
                    stats.tokens += batch.other_tokens.input_ids.shape[1]
                slots = batch.find_compared() if key.compared_with else None
                keep_values(step, batch.entries, forward(run, batch, slots=slots))

    def pack(
        self, key: PassKey, entries: Sequence[RowPass], all_ranks: bool, stats: PhaseStats
    ) -> Iterator[Packed]:
        """Yield the micro-batches of a group's passes, each in one row.

        Args:
            key: The group.
            entries: Its passes, with their rows.
            all_ranks: Whether all ranks get equally many.
            stats: Counts the tokens.
        """
        sequences = [scoring.build_sequence() for _, scoring in entries]
        others = [scoring.compared_with.build_sequence() for _, scoring in entries if scoring.compared_with]
        planned = self.plan(measure_lengths(entries), all_ranks)
        with ExitStack() as stack:
            run_other, shares_head = None, False
            if key.compared_with is not None:
                other = self.find_model(key.compared_with.model)
                # Once for all micro-batches: the model may lie in main memory.
                run_other = stack.enter_context(other.loaded_on(self.device))
                shares_head = other.is_policy and self.models[key.model].is_policy
            for number, (micro_batch, weight) in enumerate(planned, 1):
                tokens = PackedSequences.from_sequences(sequences, micro_batch.families, self.device)
                other_tokens = None
                if run_other is not None:
                    other_tokens = PackedSequences.from_sequences(others, micro_batch.families, self.device)
                stats.tokens += tokens.input_ids.shape[1]
                chosen, is_last = [entries[i] for i in micro_batch.indices], number == len(planned)
                compared = run_other, other_tokens, shares_head
                yield Packed(chosen, key, self.head, tokens, weight, is_last, *compared)

    def plan(self, lengths: list[SequenceLengths], all_ranks: bool) -> list[tuple[MicroBatch, float]]:
        """Divide sequences into micro-batches, each for one forward; return them with their weights.

        Args:
            lengths: The lengths of the sequences.
            all_ranks: Whether a forward waits for all ranks. Each then needs equally many micro-batches:
                a rank with fewer splits its largest. If none can be split, it repeats its last with weight 0.
        """
        planned = micro_batches(lengths, self.micro_batch_tokens, self.layout)
        if not all_ranks:
            return [(micro_batch, 1.0) for micro_batch in planned]
        [most] = map(int, self.ranks.max(len(planned)))
        if self.splits:
            planned = split_to(planned, most, lengths)
        return [(planned[min(i, len(planned) - 1)], float(i < len(planned))) for i in range(most)]

    # With gradient

    def updates(
        self, step: StepBatch, rows: Sequence[int], terms: Sequence[T], stats: PhaseStats
    ) -> Iterator[tuple[T, Micro]]:
        """Yield the micro-batches of all loss terms, each inside the strategy's context for its backward.

        All ranks get equally many: the last backward of an update sums gradients over ranks.

        Args:
            step: The step.
            rows: This rank's part of the rows that the update learns from.
            terms: The terms of the loss.
            stats: Counts the tokens that the policy computes.
        """
        rollouts, keys = step.rollouts(rows), list[PassKey]()
        try:
            passes_of_terms = [
                [set_temperatures(term.scoring_pass(rollout), step) for rollout in rollouts] for term in terms
            ]
            keys += map(find_key, terms, passes_of_terms)
        except Exception as error:  # of a user's class: any
            step.keep_failure(error)
            passes_of_terms = [[] for _ in terms]
        counts = [sum(scoring.num_scored for scoring in passes) for passes in passes_of_terms]
        # Losses divide by these, so that micro-batches of all ranks add up.
        num_tokens = sum(len(step.token_ids(row)) for row in rows)
        totals = self.ranks.sum(len(rows), num_tokens, *counts, step.failure is not None)
        if totals[-1]:
            self.ranks.raise_together(step)
        for number, (term, key, passes) in enumerate(zip(terms, keys, passes_of_terms, strict=True)):
            for batch in self.pack(key, list(zip(rows, passes, strict=True)), True, stats):
                with self.ranks.micro_batch(last=batch.is_last and number == len(terms) - 1):
                    scale, num_scored = batch.weight * self.ranks.world_size, totals[2 + number]
                    yield term, Micro(step, batch, scale, totals[0], totals[1], num_scored)


def find_key(term: Any, passes: Sequence[ScoringPass]) -> PassKey:
    """Return the settings that all of a term's passes share, so that any go into the same micro-batch.

    Raises:
        InputError: If not all are the policy's, at one temperature, compared with one model in one way.
    """
    keys = list(dict.fromkeys(map(PassKey.of, passes)))
    if len(keys) > 1 or any(key.model != POLICY for key in keys):
        raise InputError(
            f"{type(term).__name__}.scoring_pass must be a pass of the policy, at one temperature and "
            f"compared with one model in one way, but returned {', '.join(map(str, keys))}. Write a term "
            "of the loss for each."
        )
    return keys[0]


def set_temperatures(scoring: ScoringPass, step: StepBatch) -> ScoringPass:
    """Return a pass with the temperatures that it leaves to the step."""
    other = scoring.compared_with and set_temperatures(scoring.compared_with, step)
    if scoring.temperature and other is scoring.compared_with:
        return scoring
    return replace(scoring, temperature=scoring.temperature or step.temperature or 1.0, compared_with=other)


def find_once(scoring: ScoringPass) -> Hashable:
    """Return the key of values that several rows share; None if they share none."""
    return None if scoring.once is None else (scoring.model, scoring.temperature, scoring.once)


def merge_passes(
    step: StepBatch, declared: Sequence[tuple[int, ScoringPass]]
) -> tuple[list[tuple[int, ScoringPass]], list[tuple[int, ScoringPass]]]:
    """Return the passes that must be run, and those whose values another row has; rows of both."""
    merged: dict[int, list[ScoringPass]] = {}
    shared: list[tuple[int, ScoringPass]] = []
    for row, scoring in declared:
        if (once := find_once(scoring)) is not None and once in step.known:
            shared.append((row, scoring))
            continue
        if once is not None:
            step.known[once] = row
        of_row = merged.setdefault(row, [])
        for i, earlier in enumerate(of_row):
            if (both := merge_two(earlier, scoring)) is not None:
                of_row[i] = both
                break
        else:
            of_row.append(scoring)
    # Column by column: which sequences share a forward, and so the rounding, depends on the order.
    order = {
        name: number for number, name in enumerate(dict.fromkeys(next(iter(p.scored)) for _, p in declared))
    }
    passes = [(row, scoring) for row, of_row in merged.items() for scoring in of_row]
    return sorted(passes, key=lambda entry: order[next(iter(entry[1].scored))]), shared


def merge_two(ours: ScoringPass, theirs: ScoringPass) -> ScoringPass | None:
    """Return one pass with the columns of both, if the tokens of one begin with the other's; else None."""
    shorter, longer = (ours, theirs) if len(ours.rest) < len(theirs.rest) else (theirs, ours)
    settings = [(scoring.model, scoring.temperature, scoring.prefix) for scoring in (ours, theirs)]
    is_nested = settings[0] == settings[1] and longer.rest[: len(shorter.rest)] == shorter.rest
    if not is_nested or (ours.compared_with and theirs.compared_with):
        return None
    how = ours if ours.compared_with else theirs
    scored = {**ours.scored, **theirs.scored}
    return replace(longer, scored=scored, compared_with=how.compared_with, divergence=how.divergence)


@torch.no_grad()
def score_rollouts(
    runner: PassRunner,
    reward: Reward,
    student: Student,
    rollouts: Rollouts,
    declare: Declare | None = None,
    recompute: bool = False,
) -> StepBatch:
    """Return completions that no other rank has, with their rewards.

    Args:
        runner: Runs the models.
        reward: The reward.
        student: Its student, with the format.
        rollouts: The completions.
        declare: Returns the scoring passes; None: those that the reward needs.
        recompute: See `PassRunner.run`.

    Raises:
        NonFiniteError: If a log-prob or reward is NaN or infinite.
    """
    step = StepBatch.of_rollouts(rollouts)
    declare = declare or (lambda rollout: reward.scoring_passes(rollout, student))
    runner.run(step, step.shard, declare, recompute=recompute)
    step.put_numbers(step.shard, reward.measure(step, step.shard, student))
    score_groups(step, reward)
    return step


def score_groups(step: StepBatch, reward: Reward) -> None:
    """Reward whole groups from the table of their completions.

    Raises:
        NonFiniteError: If a reward is NaN or infinite; it names a term that is, and the class.
    """
    step.set_scores(reward.score(step.table, step.group_size))
    rows, source = [step.row_number(row) for row in range(len(step))], type(reward).__name__
    try:
        require_finite(step.rewards, f"reward of {source}", rows, choose_remedy(reward))
    except NonFiniteError:
        for name, values in columns_of(step.table, Term).items():
            require_finite(values, f"term '{name}' of {source}", rows, choose_remedy(reward))
        raise


def forward(
    run: RunModel, batch: Packed, with_entropy: bool = False, slots: Sequence[int] | None = None
) -> Values:
    """Run a model on a packed row, and the one that it is compared with, which gets no gradient.

    Args:
        run: Runs the model.
        batch: Its tokens, and the other model.
        with_entropy: Whether entropies are wanted, where nothing is compared.
        slots: Which scored tokens are compared, where log-probs are wanted too; None: all are compared.
    """
    tokens, key, head = batch.tokens, batch.key, batch.head
    run_other, other_key = batch.run_other, key.compared_with
    if run_other is None or other_key is None:
        return Values(*run(compute_log_probs, tokens, key.temperature, head, with_entropy))
    with torch.no_grad():
        other_hidden = run_other(scored_hidden_states, batch.other_tokens)  # (M, H)

    def with_model(model: Any) -> tuple[Tensor | None, Tensor]:
        hidden, log_probs = scored_hidden_states(model, tokens), None
        if slots is not None:
            log_probs, _ = head_log_probs(model, hidden, tokens.targets, key.temperature, head)
            hidden = hidden[upload(slots, hidden.device, torch.long)]

        def with_other(other: Any) -> Tensor:
            ours = ModelHead(model, key.temperature)
            theirs = ModelHead(other, other_key.temperature, other_key.exchanged)
            return head_divergence(ours, hidden, theirs, other_hidden, key.divergence, head)

        return log_probs, with_other(model) if batch.shares_head else run_other(with_other)

    log_probs, divergences = run(with_model)
    return Values(log_probs, None, divergences)


def keep_values(step: StepBatch, entries: Sequence[RowPass], values: Values) -> None:
    """Put a micro-batch's values into the token columns, and let the step check that they are finite."""
    log_probs, divergences = list[Tensor](), list[Tensor]()
    if values.log_probs is not None:
        log_probs += values.log_probs.split([scoring.num_scored for _, scoring in entries])
    if values.divergences is not None:
        slots = [scoring.find_slots(scoring.compared) for _, scoring in entries]
        divergences += values.divergences.split([slot.stop - slot.start for slot in slots])
    kept: dict[str, list[tuple[int, Tensor]]] = {}  # by what they are
    for number, (row, scoring) in enumerate(entries):
        if row is None:
            continue
        for name in scoring.scored:
            is_compared = name == scoring.compared
            value = divergences[number] if is_compared else log_probs[number][scoring.find_slots(name)]
            step.tokens.setdefault(name, {})[row] = value
            kept.setdefault(scoring.describe(name), []).append((step.row_number(row), value))
    for what, parts in kept.items():
        column = torch.cat([value for _, value in parts])
        step.checks.add(column, [len(value) for _, value in parts], what, [number for number, _ in parts])


def measure_lengths(entries: Sequence[RowPass]) -> list[SequenceLengths]:
    """Return the lengths by which sequences are planned: of both models' where two are compared."""
    pairs = [(scoring, scoring.compared_with or scoring) for _, scoring in entries]
    return [
        SequenceLengths(
            ours.family, max(len(ours.prefix), len(theirs.prefix)), max(len(ours.rest), len(theirs.rest))
        )
        for ours, theirs in pairs
    ]


def require_context(run: RunModel, step: StepBatch, passes: Sequence[RowPass]) -> None:
    """Check that retokenized completions fit into a model's context.

    Completions that the models read in the same tokens were checked before the run.

    Raises:
        InputError: If one does not; it names the row.
    """
    retokenized = [(row, len(scoring.mask)) for row, scoring in passes if scoring.retokenized]
    if not retokenized:
        return
    context: int = call_model(run, lambda model: read_context_length(model.config))
    for row, length in retokenized:
        if length > context and row is not None:
            rollout = step.rollout(row)
            raise InputError(
                f"What the student reads must fit into its context of {context} tokens, but row "
                f"{rollout.problem.row}, with a completion of {len(rollout.completion.token_ids)} tokens of "
                f"the teacher, has {length} tokens of the student. Lower "
                "rollouts.sampling.max_completion_length or, for given traces, data.max_length."
            )
