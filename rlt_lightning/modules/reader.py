"""Run the forwards that rewards and losses declare: merge, pack and run them, and unpack the values.

A `Read` (rollouts/step.py) declares what a model is to compute of one completion.

    read      reads of each row ─▶ items: equal or nested sequences of a model run once ─▶ passes, in one
              order on all ranks ─▶ micro-batches, equally many on ranks that wait for each other ─▶ columns
    updates   the policy's reads of each loss term ─▶ micro-batches, equally many on all ranks ─▶ `forward`,
              with gradient, in the module's training_step

Two reads of a row become one item if the tokens of one begin with those of the other; reads of different rows
only by `Read.once`. With sharded weights every forward waits for all ranks: all run the same passes, and a
rank that has nothing to read in one runs two tokens as a dummy. Reading draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlt_lightning.models.load import read_context_length
from rlt_lightning.models.packed import (
    HeadOptions,
    ModelHead,
    call_model,
    compute_log_probs,
    head_divergence,
    scored_hidden_states,
    states_and_log_probs,
)
from rlt_lightning.modules.frozen import Model, RunModel
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.packing import MicroBatch, PackedSequences, ScoredSequence, SequenceLengths
from rlt_lightning.numerics.rewards import NonFiniteError, choose_remedy, require_finite
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards.base import Reward
from rlt_lightning.rewards.students import Students
from rlt_lightning.rollouts.step import POLICY, Read, StepBatch, columns_of
from rlt_lightning.types import InputError, Rollout, Rollouts, SFTExample

# Returns the reads of a completion, by the name of the token column.
Declare = Callable[[Rollout], Mapping[str, Read]]


class Target(NamedTuple):
    """The place of a read's value."""

    name: str
    rows: list[int]
    read: Read


@dataclass
class Item:
    """One sequence that goes through a model, for all reads whose tokens it holds."""

    read: Read  # the longest
    targets: list[Target]
    against: Read | None = None

    def add(self, name: str, row: int, read: Read) -> bool:
        """Serve this read too, if its tokens begin this sequence's, or the other way round."""
        if self.against is not None and read.against is not None:
            ours = self.compared
            same = (ours.against, ours.divergence, ours.exchanged, ours.scored)
            if same != (read.against, read.divergence, read.exchanged, read.scored):
                return False
        if not begins_with(self.read, read):
            if not begins_with(read, self.read):
                return False
            self.read = read
        self.against = self.against or read.against
        self.targets.append(Target(name, [row], read))
        return True

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return the scored ranges of all targets, sorted, overlaps joined."""
        joined: list[tuple[int, int]] = []
        for first, end in sorted(target.read.scored for target in self.targets):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((first, end))
        return joined

    def build_sequence(self) -> ScoredSequence:
        """Return the tokens, of which those of all targets are scored."""
        if self.read.mask is not None:
            return self.read.build_sequence()
        mask: list[bool] = []
        for first, end in self.ranges:
            mask += [False] * (first - len(mask)) + [True] * (end - first)
        mask += [False] * (len(self.read.prefix) + len(self.read.rest) - len(mask))
        return ScoredSequence(self.read.prefix, self.read.rest, mask)

    def find_place(self, read: Read) -> slice:
        """Return where a target's tokens lie among the item's scored tokens."""
        if self.read.mask is not None:
            return slice(0, self.read.num_scored)
        before = 0
        for first, end in self.ranges:
            if first <= read.scored[0] and read.scored[1] <= end:
                return slice(before + read.scored[0] - first, before + read.scored[1] - first)
            before += end - first
        raise AssertionError("a target's range is one of the item's")

    @property
    def compared(self) -> Read:
        """Return the read whose tokens are compared with those of `against`."""
        return next(target.read for target in self.targets if target.read.against is not None)


class Micro(NamedTuple):
    """A micro-batch of an update: rows of a loss term's reads, in one packed row.

    Attributes:
        term: The loss term.
        rows: The rows of the step.
        reads: The policy's read of each.
        packed: Their tokens.
        against: The tokens for the model that the policy is compared with; None without one.
        ask: Runs that model.
        shares_head: Whether its head is the policy's.
        temperature: Divides the logits.
        scale: The factor of the loss: the strategy averages gradients over ranks, so each rank's part
            counts world_size times. 0: computed only because other ranks compute one.
        num_sequences: Rows of the whole update, of all ranks.
        num_tokens: Their tokens.
        num_scored: Tokens that the term scores in the whole update.
    """

    term: Any
    rows: list[int]
    reads: list[Read]
    packed: PackedSequences
    against: PackedSequences | None
    ask: RunModel | None
    shares_head: bool
    temperature: float
    scale: float
    num_sequences: float
    num_tokens: float
    num_scored: float


class Values(NamedTuple):
    """The policy's values of a micro-batch's M scored tokens.

    Attributes:
        values: Log-probs, or divergences, (M,), nats: the only ones with gradient.
        entropy: Entropies there, (M,), nats; None if the term asks for none.
        others: Log-probs of the other model, (M,); None if none is wanted.
    """

    values: Tensor
    entropy: Tensor | None = None
    others: Tensor | None = None


class Term(Protocol):
    """A term of the loss, as far as the reader knows it; see `LossTerm` in modules/losses.py."""

    def read(self, row: Any) -> Read:
        """Return what the policy reads of a row with gradient."""


class Trained(Protocol):
    """The part of a PolicyModule that the updates use."""

    sharding: Any
    trainer: Any

    def sum_over_ranks(self, *numbers: float) -> list[float]:
        """Return the sums over all ranks."""

    def raise_together(self, step: StepBatch) -> None:
        """Raise an error on all ranks if one of them has failed."""


class PassKey(NamedTuple):
    """The settings that sequences share which go through a model together."""

    model: str
    temperature: float
    against: str = ""
    against_temperature: float = 0.0
    divergence: Divergence | None = None
    exchanged: tuple[int, int] | None = None

    def build_dummy(self) -> Item:
        """Return a sequence for a rank that has none in this pass."""
        read = Read(self.model, [], [0, 0], (1, 2), temperature=self.temperature)
        against = None
        if self.against:
            against = replace(read, model=self.against, temperature=self.against_temperature)
            read = replace(read, against=against, divergence=self.divergence, exchanged=self.exchanged)
        return Item(read, [Target("", [], read)], against)


@dataclass
class Reader:
    """Runs reads.

    Args:
        models: The models by the names that reads use.
        plan: plan(lengths, all_ranks) divides sequences into micro-batches with weights. If a forward waits
            for all ranks, they get equally many: a rank with fewer repeats one with weight 0.
        device: Where models compute.
        head: How log-probs are computed from hidden states.
        together: Whether the forwards of all ranks meet, because weights are sharded.
        on_any_rank: on_any_rank(flag) is whether any rank has it set; only asked where `together`.
        gather: gather(keys) returns the keys of every rank; only asked where `together`.
        recompute: Ask the policy also where the engine reported log-probs.
    """

    models: Mapping[str, Model]
    plan: Callable[[list[SequenceLengths], bool], list[tuple[MicroBatch, float]]]
    device: torch.device
    head: HeadOptions = HeadOptions()
    together: bool = False
    on_any_rank: Callable[[bool], bool] = bool
    gather: Callable[[list[PassKey]], list[list[PassKey]]] = lambda keys: [keys]
    recompute: bool = False

    @torch.no_grad()
    def read(
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
        together what failed on one of them (`PolicyModule.raise_together`).

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
        declared = {row: declare_reads(step, rollout, declare) for row, rollout in rollouts.items()}
        names = list(dict.fromkeys(name for reads in declared.values() for name in reads))
        # Name by name: which sequences share a forward, and so the rounding, depends on the order.
        reads = [(name, row, declared[row][name]) for name in names for row in rows if name in declared[row]]
        if not (self.recompute if recompute is None else recompute):
            reads = self.take_sampled(step, rollouts, reads)
        items = self.merge(step, reads)
        passes: dict[PassKey, list[Item]] = {}
        for item in items:
            passes.setdefault(self.build_key(item, step), []).append(item)
        keys = list(passes)
        if self.together:
            keys = sorted({key for part in self.gather(keys) for key in part}, key=repr)
        for key in keys:
            self.run_pass(step, key, passes.get(key) or [key.build_dummy()], stats)
        if step.shards is None:
            step.checks.require()

    def find_temperature(self, read: Read, step: StepBatch) -> float:
        """Return the temperature of a read."""
        return read.temperature or step.temperature or 1.0

    def build_key(self, item: Item, step: StepBatch) -> PassKey:
        """Return the pass in which a sequence goes through its model."""
        key = PassKey(item.read.model, self.find_temperature(item.read, step))
        if item.against is None:
            return key
        temperature, read = self.find_temperature(item.against, step), item.compared
        return PassKey(*key[:2], item.against.model, temperature, read.divergence, read.exchanged)

    def take_sampled(
        self, step: StepBatch, rollouts: dict[int, Rollout], reads: list[tuple[str, int, Read]]
    ) -> list[tuple[str, int, Read]]:
        """Take the log-probs that the engine reported, in one copy; return the other reads."""
        served = [
            (name, row, read)
            for name, row, read in reads
            if read.sampled and not read.against and self.find_temperature(read, step) == step.temperature
        ]
        # Asked whatever is served: rows of another rank may have declared other reads.
        if self.lacks_log_probs(step, rollouts) or not served:
            return reads
        values: list[float] = []
        for _, row, read in served:
            log_probs = rollouts[row].completion.log_probs
            assert log_probs is not None
            assert read.sampled is not None
            values += log_probs[slice(*read.sampled)]
        flat = upload(values, self.device, torch.float32)
        counts = [read.num_scored for *_, read in served]
        for (name, row, _), part in zip(served, flat.split(counts), strict=True):
            step.tokens.setdefault(name, {})[row] = part
        left = {id(read) for *_, read in served}
        return [entry for entry in reads if id(entry[2]) not in left]

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
        return self.on_any_rank(unknown) if self.together else unknown

    def merge(self, step: StepBatch, reads: list[tuple[str, int, Read]]) -> list[Item]:
        """Return the sequences that must be run, pass by pass; fill in values that the step already has."""
        items: dict[tuple[str, float], list[Item]] = {}
        of_row: dict[Hashable, list[Item]] = {}
        shared: dict[Hashable, Item] = {}  # by `once`
        for name, row, read in reads:
            model = (read.model, self.find_temperature(read, step))
            once = None if read.once is None else (*model, read.once)
            if once in step.known:
                step.tokens.setdefault(name, {})[row] = step.known[once]
                continue
            if once is not None and once in shared:
                targets = shared[once].targets
                same = [t for t in targets if t.name == name and t.read.once == read.once]
                if same:
                    same[0].rows.append(row)
                else:
                    targets.append(Target(name, [row], read))
                continue
            of_this_row = of_row.setdefault((*model, row), [])
            item = next((item for item in of_this_row if item.add(name, row, read)), None)
            if item is None:
                item = Item(read, [Target(name, [row], read)], read.against)
                items.setdefault(model, []).append(item)
                of_this_row.append(item)
            if once is not None:
                shared[once] = item
        return [item for of_model in items.values() for item in of_model]

    def run_pass(self, step: StepBatch, key: PassKey, items: list[Item], stats: PhaseStats | None) -> None:
        """Run a model over sequences, or two models of which one is compared with the other."""
        with ExitStack() as stack:
            run = stack.enter_context(self.models[key.model].loaded_on(self.device))
            try:
                require_room(run, step, items)
            except InputError as error:
                step.keep_failure(error)
                items = [key.build_dummy()]  # other ranks may wait for this one's forward
            sequences = [item.build_sequence() for item in items]
            others = [item.against.build_sequence() for item in items if item.against is not None]
            lengths = measure_lengths([item.read for item in items], sequences, others or sequences)
            ask = (
                stack.enter_context(self.models[key.against].loaded_on(self.device)) if key.against else None
            )
            for micro_batch, weight in self.plan(lengths, self.together):
                packed = self.pack(sequences, micro_batch, weight, stats)
                chosen = [items[i] for i in micro_batch.indices]
                counts = [sum(sequences[i].scored) for i in micro_batch.indices]
                other = None if ask is None else self.pack(others, micro_batch, 1.0, stats)
                values, compared = self.compute(run, ask, packed, other, chosen, counts, key)
                targets: list[tuple[Target, Tensor]] = []
                for place, (item, of_item) in enumerate(zip(chosen, values.split(counts), strict=True)):
                    for target in item.targets:
                        value = of_item[item.find_place(target.read)]
                        if target.read.against is not None and target.read.divergence is not None:
                            value = compared[place]
                        elif target.read.against is not None:
                            targets.append((target._replace(name=f"{target.name}/against"), compared[place]))
                        targets.append((target, value))
                for target, value in targets:
                    for row in target.rows:
                        step.tokens.setdefault(target.name, {})[row] = value
                    if target.read.once is not None:
                        step.known[(key.model, key.temperature, target.read.once)] = value
                add_checks(step, targets)

    def compute(
        self,
        run: RunModel,
        ask: RunModel | None,
        packed: PackedSequences,
        other: PackedSequences | None,
        items: Sequence[Item],
        counts: list[int],
        key: PassKey,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run a micro-batch of items, which have these numbers of scored tokens.

        Returns:
            The log-probs of all scored tokens, (M,); and of each item the divergence from the other model, or
            that model's log-probs.
        """
        if ask is None or other is None:
            return run(compute_log_probs, packed, key.temperature, self.head)[0], []
        hidden, values = run(states_and_log_probs, packed, key.temperature, self.head)
        reads = [item.compared for item in items]
        places = [item.find_place(read) for item, read in zip(items, reads, strict=True)]

        def choose(scored: Tensor) -> Tensor:
            parts = zip(scored.split(counts), places, strict=True)
            return torch.cat([part[place] for part, place in parts])

        if reads[0].divergence is None:
            other = exchange_targets(other, choose(packed.targets), reads[0].exchanged)
            compared, _ = ask(compute_log_probs, other, key.against_temperature, self.head)
        else:
            compared = self.compare(run, ask, choose(hidden), other, key, reads[0])
        return values, compared.split([read.num_scored for read in reads])

    def compare(
        self, run: RunModel, ask: RunModel, states: Tensor, other: PackedSequences, key: PassKey, read: Read
    ) -> Tensor:
        """Return the divergence of a model, whose states are given, from another one, (M,), nats."""
        assert read.divergence is not None
        divergence, same = (
            read.divergence,
            self.models[key.model].is_policy and self.models[key.against].is_policy,
        )

        def with_other(model: Any) -> Tensor:
            hidden = scored_hidden_states(model, other)
            theirs = ModelHead(model, key.against_temperature)

            def with_first(model: Any) -> Tensor:
                ours = ModelHead(model, key.temperature)
                return head_divergence(ours, states, theirs, hidden, divergence, read.exchanged, self.head)

            # A model computes one forward at a time.
            return with_first(model) if same else run(with_first)

        return ask(with_other)

    # With gradient

    def updates(
        self, step: StepBatch, rows: Sequence[int], terms: Sequence[Term], module: Trained, stats: PhaseStats
    ) -> Iterator[Micro]:
        """Yield the micro-batches of all loss terms, each inside the strategy's context for its backward.

        All ranks get equally many: the last backward of an update sums gradients over ranks.

        Args:
            step: The step.
            rows: This rank's part of the rows that the update learns from.
            terms: The terms of the loss.
            module: The module that trains.
            stats: Counts the tokens that the policy computes.
        """
        rollouts = step.rollouts(rows)
        try:
            reads_of_terms = [[term.read(rollout) for rollout in rollouts] for term in terms]
            for term, reads in zip(terms, reads_of_terms, strict=True):
                self.require_alike(term, reads, step)
        except Exception as error:  # of a user's class: any
            step.keep_failure(error)
            reads_of_terms = [[] for _ in terms]
        counts = [sum(read.num_scored for read in reads) for reads in reads_of_terms]
        # Losses divide by these, so that micro-batches of all ranks add up.
        num_tokens = sum(len(step.token_ids(row)) for row in rows)
        totals = module.sum_over_ranks(len(rows), num_tokens, *counts, step.failure is not None)
        if totals[-1]:
            module.raise_together(step)
        for number, (term, reads) in enumerate(zip(terms, reads_of_terms, strict=True)):
            sequences = [read.build_sequence() for read in reads]
            others = [read.against.build_sequence() for read in reads if read.against is not None]
            planned = self.plan(measure_lengths(reads, sequences, others or sequences), True)
            other = self.models[reads[0].against.model] if reads and reads[0].against is not None else None
            # Once for all micro-batches: the model may lie in main memory.
            with nullcontext() if other is None else other.loaded_on(self.device) as ask:
                for place, (micro_batch, weight) in enumerate(planned):
                    is_last = number == len(terms) - 1 and place == len(planned) - 1
                    packed = self.pack(sequences, micro_batch, weight, stats)
                    with module.sharding.micro_batch(last=is_last):
                        yield Micro(
                            term,
                            [rows[i] for i in micro_batch.indices],
                            [reads[i] for i in micro_batch.indices],
                            packed,
                            self.pack(others, micro_batch) if others else None,
                            ask,
                            other is not None and other.is_policy,
                            self.find_temperature(reads[0], step),
                            weight * module.trainer.world_size,
                            totals[0],
                            totals[1],
                            totals[2 + number],
                        )

    def require_alike(self, term: Term, reads: Sequence[Read], step: StepBatch) -> None:
        """Check that any of a term's reads can go into the same micro-batch.

        Raises:
            InputError: If not all are the policy's, at one temperature, compared with one model in one way.
        """
        items = (Item(read, [Target("", [], read)], read.against) for read in reads)
        keys = dict.fromkeys(self.build_key(item, step) for item in items)
        if len(keys) > 1 or any(key.model != POLICY for key in keys):
            raise InputError(
                f"{type(term).__name__}.read must return reads of the policy, all at one temperature and "
                f"compared with one model in one way, but returned {', '.join(map(str, keys))}. Write a term "
                "of the loss for each."
            )

    def pack(
        self,
        sequences: list[ScoredSequence],
        micro_batch: MicroBatch,
        weight: float = 1.0,
        stats: PhaseStats | None = None,
    ) -> PackedSequences:
        """Return one row with the sequences of a micro-batch, and count its cost."""
        packed = PackedSequences.from_sequences(sequences, micro_batch.families, self.device)
        if stats is not None:
            stats.count(packed, sequences, micro_batch, weight)
        return packed


def declare_reads(step: StepBatch, rollout: Rollout, declare: Declare) -> Mapping[str, Read]:
    """Return the reads of a completion; none if `declare` fails, whose error the step keeps."""
    try:
        return declare(rollout)
    except Exception as error:  # of a user's class: any
        step.keep_failure(error)
        return {}


@torch.no_grad()
def score_rollouts(
    reader: Reader,
    reward: Reward,
    students: Students,
    rollouts: Rollouts,
    declare: Declare | None = None,
    recompute: bool | None = None,
) -> StepBatch:
    """Return completions that no other rank has, with their rewards.

    Args:
        reader: Runs the models.
        reward: The reward.
        students: Its students, with their formats.
        rollouts: The completions.
        declare: Returns the reads; None: those that the reward needs.
        recompute: See `Reader.read`.

    Raises:
        NonFiniteError: If a log-prob or reward is NaN or infinite.
    """
    step = StepBatch.of_rollouts(rollouts)
    declare = declare or (lambda rollout: reward.reads(rollout, students))
    reader.read(step, step.shard, declare, recompute=recompute)
    step.put_numbers(step.shard, reward.measure(step, step.shard, students))
    score_groups(step, reward, students)
    return step


def score_groups(step: StepBatch, reward: Reward, students: Students) -> None:
    """Reward whole groups from the table of their completions.

    Raises:
        NonFiniteError: If a reward is NaN or infinite; it names a term that is, and the class.
    """
    step.set_scores(reward.score(step.table, step.group_size, students))
    rows, maker = [step.row_number(row) for row in range(len(step))], type(reward).__name__
    try:
        require_finite(step.rewards, f"reward of {maker}", rows, choose_remedy(reward))
    except NonFiniteError:
        for name, values in columns_of(step.table, "term/").items():
            require_finite(values, f"term '{name}' of {maker}", rows, choose_remedy(reward))
        raise


def forward(run: RunModel, micro: Micro, head: HeadOptions, with_entropy: bool = False) -> Values:
    """Run the policy on a micro-batch, with gradient, and the model that it is compared with."""
    if micro.against is None:
        return Values(*run(compute_log_probs, micro.packed, micro.temperature, head, with_entropy))
    assert micro.ask is not None
    divergence, exchanged, ask = micro.reads[0].divergence, micro.reads[0].exchanged, micro.ask
    if divergence is None:
        with torch.no_grad():
            other = exchange_targets(micro.against, micro.packed.targets, exchanged)
            others, _ = ask(compute_log_probs, other, micro.temperature, head)
        values, entropy = run(compute_log_probs, micro.packed, micro.temperature, head, with_entropy)
        return Values(values, entropy, others)
    with torch.no_grad():
        other_hidden = ask(scored_hidden_states, micro.against)  # (M, H)

    def with_policy(policy: Any) -> Tensor:
        hidden = scored_hidden_states(policy, micro.packed)  # (M, H)

        def with_other(other: Any) -> Tensor:
            ours, theirs = ModelHead(policy, micro.temperature), ModelHead(other, micro.temperature)
            return head_divergence(ours, hidden, theirs, other_hidden, divergence, exchanged, head)

        return with_other(policy) if micro.shares_head else ask(with_other)

    return Values(run(with_policy))


def exchange_targets(
    packed: PackedSequences, sampled: Tensor, exchanged: tuple[int, int] | None
) -> PackedSequences:
    """Return what another model reads, scored at the M sampled tokens as in a divergence with `exchanged`.

    A student that samples the teacher's own closing tag gets no credit for an end: the exchange holds for
    each of both words, wherever it stands.
    """
    if exchanged is None:
        return packed
    first, second = (sampled == word for word in exchanged)
    targets = torch.where(first, exchanged[1], torch.where(second, exchanged[0], sampled))
    return replace(packed, targets=targets)


def add_checks(step: StepBatch, targets: Sequence[tuple[Target, Tensor]]) -> None:
    """Let the step check that the values of targets are finite; a dummy's values are ignored."""
    kinds: dict[str, list[tuple[int, Tensor]]] = {}
    for target, values in targets:
        if target.rows:
            row = step.row_number(target.rows[0])
            kinds.setdefault(target.read.what, []).append((row, values))
    for what, parts in kinds.items():
        values = torch.cat([values for _, values in parts])
        step.checks.add(values, [len(values) for _, values in parts], what, [row for row, _ in parts])


def begins_with(longer: Read, shorter: Read) -> bool:
    """Return whether the tokens of a read begin with those of another one."""
    if longer.mask is not None or shorter.mask is not None:
        return longer is shorter
    if longer.prefix == shorter.prefix:
        return longer.rest[: len(shorter.rest)] == shorter.rest
    tokens = shorter.prefix + shorter.rest
    return (longer.prefix + longer.rest)[: len(tokens)] == tokens


def measure_lengths(
    reads: Sequence[Read], sequences: Sequence[ScoredSequence], others: Sequence[ScoredSequence]
) -> list[SequenceLengths]:
    """Return the lengths by which sequences are planned: of both models' where two are compared."""
    return [
        SequenceLengths(
            read.family,
            max(len(sequence.prefix), len(other.prefix)),
            max(len(sequence.rest), len(other.rest)),
        )
        for read, sequence, other in zip(reads, sequences, others, strict=True)
    ]


def require_room(run: RunModel, step: StepBatch, items: Sequence[Item]) -> None:
    """Check that retokenized completions fit into a model's context.

    Completions that the models read in the same tokens were checked before the run.

    Raises:
        InputError: If one does not; it names the row.
    """
    items = [item for item in items if item.read.retokenized]
    if not items:
        return
    context: int = call_model(run, lambda model: read_context_length(model.config))
    for item in items:
        length = len(item.read.prefix) + len(item.read.rest)
        if length > context and item.targets[0].rows:
            rollout = step.rollout(item.targets[0].rows[0])
            raise InputError(
                f"What the student reads must fit into its context of {context} tokens, but row "
                f"{rollout.problem.row}, with a completion of {len(rollout.completion.token_ids)} tokens of "
                f"the teacher, has {length} tokens of the student. Lower "
                "rollouts.sampling.max_completion_length or, for given traces, data.max_length."
            )
