"""Run the forwards that rewards and losses declare: merge, pack and run them, and unpack the values.

A `ScoringPass` (rollouts/step.py) declares what a model is to compute of one completion.

    run       passes of each row ─▶ items: equal or nested sequences of a model run once ─▶ groups, in one
              order on all ranks ─▶ micro-batches, equally many on ranks that wait for each other ─▶ columns
    updates   the policy's passes of each loss term ─▶ micro-batches, equally many on all ranks ─▶ `forward`,
              with gradient, in the module's training_step

Two passes over a row become one item if the tokens of one begin with those of the other; passes over
different rows only by `ScoringPass.once`. With sharded weights every forward waits for all ranks: all run the
same groups, and a rank that has nothing in one runs two tokens as a dummy. Scoring draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from rlt_lightning.numerics.packing import (
    Layout,
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    micro_batches,
    split_to,
)
from rlt_lightning.numerics.rewards import NonFiniteError, choose_remedy, require_finite
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards.base import Reward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch, columns_of
from rlt_lightning.types import InputError, Rollout, Rollouts, SFTExample

# Returns the scoring passes of a completion, by the name of the token column.
Declare = Callable[[Rollout], Mapping[str, ScoringPass]]


class Target(NamedTuple):
    """The place of a pass's value."""

    name: str
    rows: list[int]
    scoring: ScoringPass


@dataclass
class Item:
    """One sequence that goes through a model, for all passes whose tokens it holds."""

    scoring: ScoringPass  # the longest
    targets: list[Target]
    compared_with: ScoringPass | None = None

    def add(self, name: str, row: int, scoring: ScoringPass) -> bool:
        """Serve this pass too, if its tokens begin this sequence's, or the other way round."""
        if self.compared_with is not None and scoring.compared_with is not None:
            ours = self.compared
            same = (ours.compared_with, ours.divergence, ours.exchanged, ours.scored)
            if same != (scoring.compared_with, scoring.divergence, scoring.exchanged, scoring.scored):
                return False
        if not begins_with(self.scoring, scoring):
            if not begins_with(scoring, self.scoring):
                return False
            self.scoring = scoring
        self.compared_with = self.compared_with or scoring.compared_with
        self.targets.append(Target(name, [row], scoring))
        return True

    @property
    def mask(self) -> Sequence[int]:
        """Return 1 for each token that a target scores, else 0; made without Python code for each."""
        if self.scoring.mask is not None:
            return self.scoring.mask
        mask = bytearray(len(self.scoring.prefix) + len(self.scoring.rest))
        for target in self.targets:
            first, end = target.scoring.scored
            mask[first:end] = bytes([1]) * (end - first)
        return mask

    def build_sequence(self) -> ScoredSequence:
        """Return the tokens, of which those of all targets are scored."""
        return ScoredSequence(self.scoring.prefix, self.scoring.rest, self.mask)

    def find_place(self, scoring: ScoringPass) -> slice:
        """Return where a target's tokens lie among the item's scored tokens."""
        before = 0 if scoring.mask is not None else self.mask[: scoring.scored[0]].count(1)
        return slice(before, before + scoring.num_scored)

    @property
    def compared(self) -> ScoringPass:
        """Return the pass whose tokens are compared with those of another model."""
        return next(target.scoring for target in self.targets if target.scoring.compared_with is not None)


class Compared(NamedTuple):
    """What a micro-batch is compared with: the tokens of another model, whose head may be the same.

    Attributes:
        packed: Its tokens.
        run: Runs it.
        temperature: Divides its logits.
        divergence: Which divergence from it.
        exchanged: Two of its words that change places.
        shares_head: Whether both are the policy: a model computes one forward at a time.
    """

    packed: PackedSequences
    run: RunModel
    temperature: float
    divergence: Divergence
    exchanged: tuple[int, int] | None
    shares_head: bool


class Packed(NamedTuple):
    """A micro-batch: its sequences by their indices, what they are compared with, its weight."""

    indices: list[int]
    packed: PackedSequences
    compared: Compared | None
    weight: float
    is_last: bool


class Micro(NamedTuple):
    """A micro-batch of an update: rows of a loss term's passes, in one packed row.

    Attributes:
        step: The step.
        term: The loss term.
        rows: The rows of the step.
        passes: The policy's pass over each.
        packed: Their tokens.
        compared: What the policy is compared with; None: nothing.
        temperature: Divides the logits.
        scale: The factor of the loss: the strategy averages gradients over ranks, so each rank's part
            counts world_size times. 0: computed only because other ranks compute one.
        num_sequences: Rows of the whole update, of all ranks.
        num_tokens: Their tokens.
        num_scored: Tokens that the term scores in the whole update.
    """

    step: StepBatch
    term: Any
    rows: list[int]
    passes: list[ScoringPass]
    packed: PackedSequences
    compared: Compared | None
    temperature: float
    scale: float
    num_sequences: float
    num_tokens: float
    num_scored: float


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
    compared_with: str = ""
    other_temperature: float = 0.0
    divergence: Divergence = Divergence()
    exchanged: tuple[int, int] | None = None

    def build_dummy(self) -> Item:
        """Return a sequence for a rank that has none in this group."""
        scoring = ScoringPass(self.model, [], [0, 0], (1, 2), temperature=self.temperature)
        compared_with = None
        if self.compared_with:
            compared_with = replace(scoring, model=self.compared_with, temperature=self.other_temperature)
            scoring = replace(
                scoring, compared_with=compared_with, divergence=self.divergence, exchanged=self.exchanged
            )
        return Item(scoring, [Target("", [], scoring)], compared_with)


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
        recompute: Ask the policy also where the engine reported log-probs.
    """

    models: Mapping[str, Model]
    device: torch.device
    head: HeadOptions = HeadOptions()
    micro_batch_tokens: int = 16384
    layout: Layout = "auto"
    ranks: Ranks = field(default_factory=Ranks)
    splits: bool = True
    recompute: bool = False

    @torch.no_grad()
    def run(
        self,
        step: StepBatch,
        rows: Sequence[int],
        declare: Declare,
        stats: PhaseStats | None = None,
        recompute: bool | None = None,
    ) -> None:
        """Fill token columns of the step for these rows, which are this rank's, or a dummy.

        Where other ranks have rows of the step too, values that are not finite stay in `step.checks`, and
        what `declare` raises, or a completion without room in a context, in `step.failure`: all ranks raise
        together what failed on one of them (`Ranks.raise_together`).

        Args:
            step: The step.
            rows: Rows of it.
            declare: Returns what is read of a row, by the name of the column.
            stats: Counts the tokens that models compute.
            recompute: Replaces `self.recompute`.

        Raises:
            NonFiniteError: If a log-prob is NaN or infinite, naming the rows and the value; see above.
            InputError: If a retokenized completion does not fit into a model's context; see above.
        """
        rollouts = {row: step.rollout(row) for row in rows}
        declared = {row: declare_passes(step, rollout, declare) for row, rollout in rollouts.items()}
        names = list(dict.fromkeys(name for passes in declared.values() for name in passes))
        # Name by name: which sequences share a forward, and so the rounding, depends on the order.
        passes = [(name, row, declared[row][name]) for name in names for row in rows if name in declared[row]]
        if not (self.recompute if recompute is None else recompute):
            passes = self.take_sampled(step, rollouts, passes)
        items = self.merge(step, passes)
        groups: dict[PassKey, list[Item]] = {}
        for item in items:
            groups.setdefault(self.build_key(item, step), []).append(item)
        keys = list(groups)
        if self.ranks.sharded:
            keys = sorted({key for part in self.ranks.gather(keys) for key in part}, key=repr)
        for key in keys:
            self.run_group(step, key, groups.get(key) or [key.build_dummy()], stats)
        if step.shards is None:
            step.checks.require()

    def find_temperature(self, scoring: ScoringPass, step: StepBatch) -> float:
        """Return the temperature of a pass."""
        return scoring.temperature or step.temperature or 1.0

    def build_key(self, item: Item, step: StepBatch) -> PassKey:
        """Return the group in which a sequence goes through its model."""
        key = PassKey(item.scoring.model, self.find_temperature(item.scoring, step))
        if item.compared_with is None:
            return key
        temperature, scoring = self.find_temperature(item.compared_with, step), item.compared
        return PassKey(*key[:2], item.compared_with.model, temperature, scoring.divergence, scoring.exchanged)

    def take_sampled(
        self, step: StepBatch, rollouts: dict[int, Rollout], passes: list[tuple[str, int, ScoringPass]]
    ) -> list[tuple[str, int, ScoringPass]]:
        """Take the log-probs that the engine reported, in one copy; return the other passes."""
        served = [
            (name, row, scoring)
            for name, row, scoring in passes
            if scoring.sampled
            and not scoring.compared_with
            and self.find_temperature(scoring, step) == step.temperature
        ]
        # Asked whatever is served: rows of another rank may have declared other passes.
        if self.lacks_log_probs(step, rollouts) or not served:
            return passes
        values: list[float] = []
        for _, row, scoring in served:
            log_probs = rollouts[row].completion.log_probs
            assert log_probs is not None
            assert scoring.sampled is not None
            values += log_probs[slice(*scoring.sampled)]
        flat = upload(values, self.device, torch.float32)
        counts = [scoring.num_scored for *_, scoring in served]
        for (name, row, _), part in zip(served, flat.split(counts), strict=True):
            step.tokens.setdefault(name, {})[row] = part
        left = {id(scoring) for *_, scoring in served}
        return [entry for entry in passes if id(entry[2]) not in left]

    def lacks_log_probs(self, step: StepBatch, rollouts: dict[int, Rollout]) -> bool:
        """Return whether the engine did not report the log-probs of a completion; all ranks decide alike.

        They know all completions of a step that they share. Elsewhere they must only agree where they run
        forwards together.
        """
        if step.shards is not None:
            return step.lacks_log_probs
        if any(isinstance(rollout, SFTExample) for rollout in rollouts.values()):
            return True  # no engine has sampled them
        unknown = any(rollout.completion.log_probs is None for rollout in rollouts.values())
        return self.ranks.any(unknown) if self.ranks.sharded else unknown

    def merge(self, step: StepBatch, passes: list[tuple[str, int, ScoringPass]]) -> list[Item]:
        """Return the sequences that must be run, group by group; fill in values that the step already has."""
        items: dict[tuple[str, float], list[Item]] = {}
        of_row: dict[Hashable, list[Item]] = {}
        shared: dict[Hashable, Item] = {}  # by `once`
        for name, row, scoring in passes:
            model = (scoring.model, self.find_temperature(scoring, step))
            once = None if scoring.once is None else (*model, scoring.once)
            if once in step.known:
                step.tokens.setdefault(name, {})[row] = step.known[once]
                continue
            if once is not None and once in shared:
                targets = shared[once].targets
                same = [t for t in targets if t.name == name and t.scoring.once == scoring.once]
                if same:
                    same[0].rows.append(row)
                else:
                    targets.append(Target(name, [row], scoring))
                continue
            of_this_row = of_row.setdefault((*model, row), [])
            item = next((item for item in of_this_row if item.add(name, row, scoring)), None)
            if item is None:
                item = Item(scoring, [Target(name, [row], scoring)], scoring.compared_with)
                items.setdefault(model, []).append(item)
                of_this_row.append(item)
            if once is not None:
                shared[once] = item
        return [item for of_model in items.values() for item in of_model]

    def run_group(self, step: StepBatch, key: PassKey, items: list[Item], stats: PhaseStats | None) -> None:
        """Run a model over sequences, or two models of which one is compared with the other."""
        with ExitStack() as stack:
            run = stack.enter_context(self.models[key.model].loaded_on(self.device))
            try:
                require_room(run, step, items)
            except InputError as error:
                step.keep_failure(error)
                items = [key.build_dummy()]  # other ranks may wait for this one's forward
            sequences = [item.build_sequence() for item in items]
            whole, counts = [item.scoring for item in items], [sum(sequence.scored) for sequence in sequences]
            passes = [item.compared for item in items] if key.compared_with else []
            for batch in self.pack(key, whole, sequences, passes, self.ranks.sharded, stats):
                if stats is not None and batch.compared is not None:
                    stats.tokens += batch.compared.packed.input_ids.shape[1]
                chosen = [(items[i], counts[i]) for i in batch.indices]
                places: list[int] = []
                before = 0
                for item, count in chosen if batch.compared else ():
                    place = item.find_place(item.compared)
                    places += range(before + place.start, before + place.stop)
                    before += count
                values = compute(run, batch.packed, key.temperature, self.head, False, batch.compared, places)
                assert values.log_probs is not None
                log_probs = values.log_probs.split([count for _, count in chosen])
                divergences: Sequence[Tensor] = ()
                if values.divergences is not None:
                    divergences = values.divergences.split([passes[i].num_scored for i in batch.indices])
                targets: list[tuple[Target, Tensor]] = []
                for number, (item, _) in enumerate(chosen):
                    for target in item.targets:
                        is_compared = target.scoring.compared_with is not None
                        of_target = log_probs[number][item.find_place(target.scoring)]
                        targets.append((target, divergences[number] if is_compared else of_target))
                for target, value in targets:
                    for row in target.rows:
                        step.tokens.setdefault(target.name, {})[row] = value
                    if target.scoring.once is not None:
                        step.known[(key.model, key.temperature, target.scoring.once)] = value
                add_checks(step, targets)

    def pack(
        self,
        key: PassKey,
        passes: Sequence[ScoringPass],
        sequences: Sequence[ScoredSequence],
        compared: Sequence[ScoringPass],
        all_ranks: bool,
        stats: PhaseStats | None,
    ) -> Iterator[Packed]:
        """Yield the micro-batches of a group's sequences, each in one row.

        Args:
            key: The group.
            passes: The pass of each sequence, which names its family.
            sequences: The sequences.
            compared: The pass of each that has another model's; empty without one.
            all_ranks: Whether all ranks get equally many.
            stats: Counts the tokens.
        """
        others = [scoring.compared_with.build_sequence() for scoring in compared if scoring.compared_with]
        planned = self.plan(measure_lengths(passes, sequences, others or sequences), all_ranks)
        with ExitStack() as stack:
            other = self.models[key.compared_with] if key.compared_with else None
            # Once for all micro-batches: the model may lie in main memory.
            run_other = stack.enter_context(other.loaded_on(self.device)) if other else None
            for number, (micro_batch, weight) in enumerate(planned, 1):
                packed = PackedSequences.from_sequences(sequences, micro_batch.families, self.device)
                against = None
                if other is not None and run_other is not None:
                    against = Compared(
                        PackedSequences.from_sequences(others, micro_batch.families, self.device),
                        run_other,
                        key.other_temperature,
                        key.divergence,
                        key.exchanged,
                        shares_head=other.is_policy and self.models[key.model].is_policy,
                    )
                if stats is not None:
                    stats.tokens += packed.input_ids.shape[1]
                yield Packed(micro_batch.indices, packed, against, weight, number == len(planned))

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
        self, step: StepBatch, rows: Sequence[int], terms: Sequence[Any], stats: PhaseStats
    ) -> Iterator[Micro]:
        """Yield the micro-batches of all loss terms, each inside the strategy's context for its backward.

        All ranks get equally many: the last backward of an update sums gradients over ranks.

        Args:
            step: The step.
            rows: This rank's part of the rows that the update learns from.
            terms: The terms of the loss (`LossTerm`).
            stats: Counts the tokens that the policy computes.
        """
        rollouts, keys = step.rollouts(rows), list[PassKey]()
        try:
            passes_of_terms = [[term.scoring_pass(rollout) for rollout in rollouts] for term in terms]
            for term, passes in zip(terms, passes_of_terms, strict=True):
                keys.append(self.find_key(term, passes, step))
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
            sequences = [scoring.build_sequence() for scoring in passes]
            compared = passes if key.compared_with else []
            for batch in self.pack(key, passes, sequences, compared, True, stats):
                with self.ranks.micro_batch(last=batch.is_last and number == len(terms) - 1):
                    yield Micro(
                        step,
                        term,
                        [rows[i] for i in batch.indices],
                        [passes[i] for i in batch.indices],
                        batch.packed,
                        batch.compared,
                        key.temperature,
                        batch.weight * self.ranks.world_size,
                        totals[0],
                        totals[1],
                        totals[2 + number],
                    )

    def find_key(self, term: Any, passes: Sequence[ScoringPass], step: StepBatch) -> PassKey:
        """Return the settings that all of a term's passes share, so that any go into the same micro-batch.

        Raises:
            InputError: If not all are the policy's, at one temperature, compared with one model in one way.
        """
        items = (Item(scoring, [Target("", [], scoring)], scoring.compared_with) for scoring in passes)
        keys = list(dict.fromkeys(self.build_key(item, step) for item in items))
        if len(keys) > 1 or any(key.model != POLICY for key in keys):
            raise InputError(
                f"{type(term).__name__}.scoring_pass must be a pass of the policy, at one temperature and "
                f"compared with one model in one way, but returned {', '.join(map(str, keys))}. Write a term "
                "of the loss for each."
            )
        return keys[0]


def declare_passes(step: StepBatch, rollout: Rollout, declare: Declare) -> Mapping[str, ScoringPass]:
    """Return the scoring passes of a completion; none if `declare` fails, whose error the step keeps."""
    try:
        return declare(rollout)
    except Exception as error:  # of a user's class: any
        step.keep_failure(error)
        return {}


@torch.no_grad()
def score_rollouts(
    runner: PassRunner,
    reward: Reward,
    student: Student,
    rollouts: Rollouts,
    declare: Declare | None = None,
    recompute: bool | None = None,
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
    rows, maker = [step.row_number(row) for row in range(len(step))], type(reward).__name__
    try:
        require_finite(step.rewards, f"reward of {maker}", rows, choose_remedy(reward))
    except NonFiniteError:
        for name, values in columns_of(step.table, "term").items():
            require_finite(values, f"term '{name}' of {maker}", rows, choose_remedy(reward))
        raise


def forward(run: RunModel, micro: Micro, head: HeadOptions) -> Values:
    """Run the policy on a micro-batch, with gradient, and the model that it is compared with, without."""
    return compute(run, micro.packed, micro.temperature, head, micro.term.with_entropy, micro.compared)


def compute(
    run: RunModel,
    packed: PackedSequences,
    temperature: float,
    head: HeadOptions,
    with_entropy: bool = False,
    compared: Compared | None = None,
    places: Sequence[int] | None = None,
) -> Values:
    """Run a model on a packed row, and the one that it is compared with, which gets no gradient.

    Args:
        run: Runs the model.
        packed: Its tokens.
        temperature: Divides its logits.
        head: How its head is computed.
        with_entropy: Whether entropies are wanted, where nothing is compared.
        compared: The other model; None: none.
        places: The scored tokens that are compared, where log-probs are wanted too; None: all are compared.
    """
    if compared is None:
        return Values(*run(compute_log_probs, packed, temperature, head, with_entropy))
    with torch.no_grad():
        other_hidden = compared.run(scored_hidden_states, compared.packed)  # (M, H)

    def with_model(model: Any) -> tuple[Tensor | None, Tensor]:
        hidden, log_probs = scored_hidden_states(model, packed), None
        if places is not None:
            log_probs, _ = head_log_probs(model, hidden, packed.targets, temperature, head)
            hidden = hidden[upload(places, hidden.device, torch.long)]

        def with_other(other: Any) -> Tensor:
            ours, theirs = ModelHead(model, temperature), ModelHead(other, compared.temperature)
            return head_divergence(
                ours, hidden, theirs, other_hidden, compared.divergence, compared.exchanged, head
            )

        return log_probs, with_other(model) if compared.shares_head else compared.run(with_other)

    log_probs, divergences = run(with_model)
    return Values(log_probs, None, divergences)


def add_checks(step: StepBatch, targets: Sequence[tuple[Target, Tensor]]) -> None:
    """Let the step check that the values of targets are finite; a dummy's values are ignored."""
    kinds: dict[str, list[tuple[int, Tensor]]] = {}
    for target, values in targets:
        if target.rows:
            row = step.row_number(target.rows[0])
            kinds.setdefault(target.scoring.what, []).append((row, values))
    for what, parts in kinds.items():
        values = torch.cat([values for _, values in parts])
        step.checks.add(values, [len(values) for _, values in parts], what, [row for row, _ in parts])


def begins_with(longer: ScoringPass, shorter: ScoringPass) -> bool:
    """Return whether the tokens of a pass begin with those of another one."""
    if longer.mask is not None or shorter.mask is not None:
        return longer is shorter
    if longer.prefix == shorter.prefix:
        return longer.rest[: len(shorter.rest)] == shorter.rest
    tokens = shorter.prefix + shorter.rest
    return (longer.prefix + longer.rest)[: len(tokens)] == tokens


def measure_lengths(
    passes: Sequence[ScoringPass], sequences: Sequence[ScoredSequence], others: Sequence[ScoredSequence]
) -> list[SequenceLengths]:
    """Return the lengths by which sequences are planned: of both models' where two are compared."""
    return [
        SequenceLengths(
            scoring.family,
            max(len(sequence.prefix), len(other.prefix)),
            max(len(sequence.rest), len(other.rest)),
        )
        for scoring, sequence, other in zip(passes, sequences, others, strict=True)
    ]


def require_room(run: RunModel, step: StepBatch, items: Sequence[Item]) -> None:
    """Check that retokenized completions fit into a model's context.

    Completions that the models read in the same tokens were checked before the run.

    Raises:
        InputError: If one does not; it names the row.
    """
    items = [item for item in items if item.scoring.retokenized]
    if not items:
        return
    context: int = call_model(run, lambda model: read_context_length(model.config))
    for item in items:
        length = len(item.scoring.prefix) + len(item.scoring.rest)
        if length > context and item.targets[0].rows:
            rollout = step.rollout(item.targets[0].rows[0])
            raise InputError(
                f"What the student reads must fit into its context of {context} tokens, but row "
                f"{rollout.problem.row}, with a completion of {len(rollout.completion.token_ids)} tokens of "
                f"the teacher, has {length} tokens of the student. Lower "
                "rollouts.sampling.max_completion_length or, for given traces, data.max_length."
            )
