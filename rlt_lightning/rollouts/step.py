"""`StepBatch`: a step's completions and their values; nothing else carries a step.

ScoringPass  what a model is to compute of one completion: rewards and losses declare it (rewards/base.py)
tokens       what the models computed, (T,) per row: on the rank that ran them, which has these rows as shard
table        what a reward made of these tokens and of texts: a number per row, (N,), shared by all ranks.
             A column's kind says what becomes of it (columns.py)

Every rank has all completions of a step. Those that it computes are its shard; all ranks get about equally
many tokens, and each finds all shards by itself:

    completions 0 … N-1, alike on every rank ─▶ Shards.balance, by tokens ─▶ this rank's rows
                                                                              │ student, reference, update
      table of all of them ◀═ one sum over ranks ═ table of its rows ◀────────┘

Completions that come in chunks are divided chunk by chunk. With sharded weights every forward waits for all
ranks, so a rank without a part of a chunk computes another's completion as a dummy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor

from rlt_lightning.numerics.advantages import zero_std_groups
from rlt_lightning.numerics.balance import balance_shards, imbalance
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.finite import FiniteChecks, NonFiniteError, choose_remedy
from rlt_lightning.numerics.packing import ScoredSequence, to_padded
from rlt_lightning.numerics.transfers import download, upload
from rlt_lightning.rollouts.columns import REWARD, Column, Table
from rlt_lightning.rollouts.dynamic_sampling import RefillCounts
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.types import InputError, Rollout, Rollouts, SFTExample

# The models that are no frozen ones by name: the weights that train, and the initial ones.
POLICY, REFERENCE = "policy", "reference"


@dataclass(frozen=True)
class ScoringPass:
    """A sequence that a model reads for one completion, and the ranges of its tokens that are scored.

    Example:
        `ScoringPass("policy", prompt, completion, {"begin": (len(prompt), len(prompt) + 3)})` fills the token
        column "begin" with the log-probs of the first three tokens of a completion.

    Attributes:
        model: "policy", "reference" or the name of a frozen model.
        prefix: Tokens with which all passes of this `family` begin.
        rest: The tokens after them.
        scored: Which tokens of prefix + rest are scored, first and end, by the token column that gets them.
        family: Names the prefix, such as the problem's row.
        temperature: Divides the logits; None: that of sampling, or 1 where that is 0.
        once: Rows with the same one share the values, such as that of an empty explanation.
        asks_engine: Whether `rest` are sampled tokens, of which the engine's log-probs will do: where it
            reported them at this temperature, no model is asked. Such a pass has one column.
        compared_with: Another model's pass with one of these columns, of as many tokens: its values are then
            not log-probs, but the divergence between both models before each of them.
        divergence: Which, where `compared_with` is set; its student is `model`.
        exchanged: Two words that change places in this model's distribution, if another is compared with it.
        retokenized: Whether the model has other tokens than the policy: no earlier check knows their number.
    """

    model: str
    prefix: list[int]
    rest: list[int]
    scored: Mapping[str, tuple[int, int]]
    family: Hashable = None
    temperature: float | None = None
    once: Hashable = None
    asks_engine: bool = False
    compared_with: ScoringPass | None = None
    divergence: Divergence = Divergence("forward")
    exchanged: tuple[int, int] | None = None
    retokenized: bool = False

    @cached_property
    def mask(self) -> bytearray:
        """Return 1 for each token that a column has, else 0; made without Python code for each."""
        mask = bytearray(len(self.prefix) + len(self.rest))
        for first, end in self.scored.values():
            mask[first:end] = bytes([1]) * (end - first)
        return mask

    @property
    def num_scored(self) -> int:
        """Return how many tokens are scored."""
        return self.mask.count(1)

    @property
    def sampled(self) -> slice:
        """Return which tokens of `rest` are scored, of a pass with one column."""
        [(first, end)] = self.scored.values()
        return slice(first - len(self.prefix), end - len(self.prefix))

    @property
    def compared(self) -> str:
        """Return the column that has divergences; '' without one."""
        return "" if self.compared_with is None else next(iter(self.compared_with.scored))

    def find_slots(self, column: str) -> slice:
        """Return where a column's tokens lie among all scored tokens."""
        first, end = self.scored[column]
        return slice(before := self.mask[:first].count(1), before + end - first)

    def build_sequence(self) -> ScoredSequence:
        """Return the tokens with the mask of those that are scored."""
        return ScoredSequence(self.prefix, self.rest, self.mask)

    def describe(self, column: str) -> str:
        """Return a name of a column's values, for messages."""
        return f"{'divergence' if column == self.compared else 'log-prob'} '{column}' of {self.model}"


class Shards:
    """Divides a step's completions over ranks.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        group_size: Completions of a problem.
        shares_prefix: Whether the completions of a problem compute its prompt once.
    """

    def __init__(self, rank: int, world_size: int, group_size: int, shares_prefix: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group_size = group_size
        self.shares_prefix = shares_prefix
        self.loads = [0] * world_size  # tokens that each rank has
        self.lengths: list[int] = []  # tokens of each completion, of all ranks

    def balance(self, lengths: Mapping[int, tuple[int, int]]) -> list[int]:
        """Divide completions over the ranks, after those of earlier calls; return this rank's, ascending.

        Args:
            lengths: The tokens of prompt and completion, by the completion's number. The same on every rank.
        """
        numbers = sorted(lengths)
        tokens = [self._count(*lengths[number]) for number in numbers]
        families: dict[int, list[int]] = {}
        for index, number in enumerate(numbers):
            families.setdefault(number // self.group_size, []).append(index)
        parts = balance_shards(list(families.values()), tokens, self.world_size, self.loads)
        for rank, part in enumerate(parts):
            self.loads[rank] += sum(tokens[i] for i in part)
        self.lengths += [num_completion for _, num_completion in lengths.values()]
        return [numbers[i] for i in parts[self.rank]]

    def _count(self, num_prompt: int, num_completion: int) -> int:
        """Return the tokens that a completion costs, with its part of the prompt."""
        return (-(-num_prompt // self.group_size) if self.shares_prefix else num_prompt) + num_completion

    @property
    def imbalance(self) -> float:
        """Return the heaviest rank's tokens as a multiple of the mean, at least 1."""
        return imbalance(self.loads)


@dataclass
class StepBatch:
    """Completions and their values; row `i` is completion `i % group_size` of its group.

    Example:
        4 problems with 2 completions each on 2 ranks: rank 1 logs the rows 4 to 7, those of its problems,
        and may have the shard 0, 5, 7 if completion 0 is short.

    Attributes:
        sources: Where each row comes from: a request and its number there, or a rollout or example itself.
        group_size: Completions of a problem, in adjacent rows.
        temperature: The temperature of sampling.
        policy_version: Optimizer steps of the weights that sampled.
        shards: Divides rows over ranks; None: all rows are this rank's and nobody else has them (held-out).
        shard: The rows that this rank computes, ascending.
        logged: The rows of this rank's problems, which the loader gave it: it logs them.
        measured: The rows whose tokens and texts this rank has measured: it records them.
        tokens: By name a value per scored token, (T,), by row; of measured rows.
        texts: By name what a reward found in a text, by row; of measured rows.
        table: By column one number per row, (N,); once it is shared alike on every rank.
        known: The first row that has the values which several share, by `ScoringPass.once`.
        counts: The cost of dynamic sampling.
        replaced: The sources of the completions that dynamic sampling replaced.
        advantages: One per row, (N,).
        metrics: Those of the update, added up over its micro-batches.
        mismatches: How far each worker and the trainer differ, by micro-batch; see `measure_mismatch`.
        checks: Values of models, which must be finite before they are used.
        failure: This rank's error; all ranks raise it together at the next `raise_together`.
        lacks_log_probs: Whether the engine did not report the log-probs of a completion, of any rank's.
    """

    sources: list[tuple[RolloutRequest, int] | Rollout | SFTExample]
    group_size: int
    temperature: float
    policy_version: int
    shards: Shards | None = None
    shard: list[int] = field(default_factory=list)
    logged: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    tokens: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    texts: dict[str, dict[int, Any]] = field(default_factory=dict)
    table: Table = field(default_factory=dict)
    known: dict[Hashable, int] = field(default_factory=dict)
    counts: RefillCounts = field(default_factory=lambda: RefillCounts(0))
    replaced: list[tuple[RolloutRequest, int] | Rollout | SFTExample] = field(default_factory=list)
    advantages: Tensor | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    mismatches: dict[str, list[Tensor]] = field(default_factory=dict)
    checks: FiniteChecks = field(default_factory=FiniteChecks)
    failure: Exception | None = None
    lacks_log_probs: bool = False

    @classmethod
    def of_request(cls, request: RolloutRequest, shards: Shards) -> StepBatch:
        """Return the step of a request, which may lack completions still."""
        size, num_problems = request.num_completions, len(request.rows)
        return cls(
            [(request, number) for number in range(num_problems * size)],
            size,
            request.sampling.temperature,
            request.policy_version,
            shards,
            logged=request.logged_numbers,
            counts=RefillCounts(num_problems),
        )

    @classmethod
    def of_rollouts(cls, rollouts: Rollouts) -> StepBatch:
        """Return the step of held-out, predicted or given completions, which no other rank has."""
        rows = list(range(len(rollouts.rollouts)))
        version, temperature = rollouts.policy_version, rollouts.temperature
        sources: list[Any] = list(rollouts.rollouts)
        return cls(sources, rollouts.group_size, temperature, version, shard=rows, logged=list(rows))

    @classmethod
    def of_examples(cls, examples: Sequence[SFTExample]) -> StepBatch:
        """Return the step of examples, which no other rank has, in place of completions."""
        return cls.of_rollouts(Rollouts(cast(list[Any], examples), 1, 0, 1.0))

    def __len__(self) -> int:
        return len(self.sources)

    # Rows

    def rollout(self, row: int) -> Rollout:
        """Return a completion attached to its problem; a rank builds only what it needs."""
        source = self.sources[row]
        return source[0].build_rollout(source[1]) if isinstance(source, tuple) else cast(Rollout, source)

    def rollouts(self, rows: Iterable[int]) -> list[Rollout]:
        """Return completions attached to their problems."""
        return [self.rollout(row) for row in rows]

    def list_rollouts(self, rows: Iterable[int]) -> Rollouts:
        """Return completions with their shared figures, as callbacks get those of this rank's problems."""
        return Rollouts(self.rollouts(rows), self.group_size, self.policy_version, self.temperature)

    def row_number(self, row: int) -> int:
        """Return the number in the data of the problem that a row belongs to."""
        source = self.sources[row]
        if isinstance(source, tuple):
            return source[0].rows[source[1] // source[0].num_completions]
        return source.problem.row if isinstance(source, Rollout) else source.row

    def token_ids(self, row: int) -> list[int]:
        """Return the tokens of a completion."""
        source = self.sources[row]
        if isinstance(source, tuple):
            return source[0].completions[source[1]].token_ids
        return source.completion.token_ids if isinstance(source, Rollout) else source.token_ids

    def list_workers(self) -> list[str]:
        """Return the workers that sampled, alike on every rank; '' for the trainer's process."""
        requested = [source for source in self.sources if isinstance(source, tuple)]
        return sorted({request.completions[number].worker or "" for request, number in requested})

    def divide(self, rows: Sequence[int]) -> list[int]:
        """Add rows to the ranks' shards, by tokens; return this rank's part."""
        assert self.shards is not None
        lengths = {}
        for row in rows:
            source = self.sources[row]
            assert isinstance(source, tuple)
            lengths[row] = source[0].count_tokens(source[1])
            self.lacks_log_probs |= source[0].completions[source[1]].log_probs is None
        part = self.shards.balance(lengths)
        self.shard = sorted([*self.shard, *part])
        return part

    def split(self, number: int, build_shards: Callable[[], Shards]) -> list[list[int]]:
        """Divide all rows into mini-batches of whole groups, and each of these over the ranks.

        Returns:
            This rank's rows of each mini-batch.
        """
        num_groups, parts = len(self) // self.group_size, []
        lengths: list[int] = []
        self.shard = []
        for i in range(number):
            first, end = (part * num_groups // number * self.group_size for part in (i, i + 1))
            self.shards = build_shards()
            parts.append(self.divide(range(first, end)))
            lengths = self.shards.lengths = lengths + self.shards.lengths
        return parts

    # Failures

    def keep_failure(self, error: Exception) -> None:
        """Keep an error of a user's class until all ranks raise it; raise it now where no rank waits."""
        if self.shards is None or self.shards.world_size == 1:
            raise error
        self.failure = self.failure or error

    def find_failed(self) -> Tensor:
        """Return whether this rank has failed, or has computed NaN or an infinity; the host does not wait."""
        return self.checks.find_bad() if self.failure is None else torch.tensor(True, device="cpu")

    def find_failure(self) -> Exception | None:
        """Return this rank's error; a value that is not finite comes first, as a cause."""
        try:
            self.checks.require()
        except NonFiniteError as error:
            return error
        return self.failure

    # Columns

    def pad(self, name: str, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a token column of measured rows, (n, T), padded with 0, and its mask."""
        return pad_rows([self.read_tokens(name, row) for row in rows])

    def read_tokens(self, name: str, row: int) -> Tensor:
        """Return a token column of a measured row, (T,)."""
        if name not in self.tokens:
            raise InputError(
                f"A credit asks for the token column '{name}', but there are {', '.join(self.tokens)}. "
                "Correct its name, or let the reward's `measure` call `step.put_tokens`."
            )
        return self.tokens[name][row]

    def put_numbers(self, rows: Sequence[int], values: Mapping[Column, Tensor]) -> None:
        """Write numbers of rows that this rank has measured; none of a dummy, but columns and types."""
        rows_on = cache(lambda device: upload(list(rows), device))  # once for all columns
        for column, numbers in values.items():
            if column not in self.table:
                self.table[column] = numbers.new_zeros(len(self))
            if rows:
                self.table[column] = self.table[column].index_copy(0, rows_on(numbers.device), numbers)
        self.measured = sorted({*self.measured, *rows})

    def share(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Let all ranks have the whole table: one sum over ranks, to which each brings its rows.

        Equal completions of a problem get the numbers of the first one: elsewhere in a packed row, or from
        the engine, the same tokens have log-probs that differ by rounding.

        Args:
            sum_over_ranks: Returns the sum of a tensor over ranks, (columns, N), float64.
        """
        columns = sorted(self.table, key=repr)
        if not columns:
            return
        table = sum_over_ranks(torch.stack([self.table[column].double() for column in columns]))
        firsts: dict[tuple[int, ...], int] = {}
        rows = [
            firsts.setdefault((row // self.group_size, *self.token_ids(row)), row) for row in range(len(self))
        ]
        table = table[:, upload(rows, table.device)]
        for column, numbers in zip(columns, table, strict=True):
            self.table[column] = numbers.to(self.table[column].dtype)

    def put_tokens(self, name: str, rows: Sequence[int], values: Sequence[Tensor]) -> None:
        """Keep a reward's values of each sampled token of these rows, (T,) each.

        Raises:
            InputError: If a completion has another number of tokens.
        """
        for row, column in zip(rows, values, strict=True):
            if len(column) != (num_tokens := len(self.token_ids(row))):
                raise InputError(
                    f"The token column {name} of a reward must have a value for each sampled token, but has "
                    f"{len(column)} for a completion of {num_tokens}. Correct the reward's `measure`."
                )
            self.tokens.setdefault(name, {})[row] = column

    def share_tokens(self, names: Iterable[str], sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Let all ranks have token columns that `put_tokens` has kept, for rows that are divided again."""
        lengths = [len(self.token_ids(row)) for row in range(len(self))]
        for name in names:
            measured = {row: self.read_tokens(name, row).double().cpu() for row in self.measured}
            nothing = torch.zeros(max(lengths), dtype=torch.float64, device="cpu")
            parts = [measured.get(row, nothing[:length]) for row, length in enumerate(lengths)]
            self.tokens[name] = dict(enumerate(sum_over_ranks(torch.cat(parts)).split(lengths)))

    def check_finite(self, values: Tensor, what: str, source: object, rows: Sequence[int]) -> None:
        """Let all ranks check together an object's values of n rows, (n,)."""
        numbers, what = [self.row_number(row) for row in rows], f"{what} of {type(source).__name__}"
        self.checks.add(values, [1] * len(rows), what, numbers, choose_remedy(source))

    def bring_to_host(self, rows: Sequence[int]) -> None:
        """Move the token columns of these rows to main memory; the host waits for the device once."""
        entries = [(column, row) for column in self.tokens.values() for row in rows if row in column]
        moved = download([column[row] for column, row in entries])
        for (column, row), values in zip(entries, moved, strict=True):
            column[row] = values

    # Rewards

    @property
    def rewards(self) -> Tensor:
        """Return the rewards, (N,)."""
        return self.table[REWARD]

    def set_scores(self, table: Table) -> None:
        """Keep the table with the rewards of whole groups.

        Raises:
            InputError: If a key is no column, or the reward is missing.
        """
        if REWARD not in table or not all(isinstance(column, Column) for column in table):
            raise InputError(
                "A reward's table must have REWARD and, if any, further columns such as Term(name), all of "
                f"rlt_lightning.rollouts.columns, but has {', '.join(map(repr, table))}. Correct what its "
                "`measure` or `score` returns."
            )
        self.table = table

    def choose(self, rows: Sequence[int]) -> Table:
        """Return the table of some rows, in this order."""
        rows_on = cache(lambda device: upload(list(rows), device))  # once for all columns
        return {column: values[rows_on(values.device)] for column, values in self.table.items()}

    # The update

    def add_loss(self, micro: Any, source: object, values: Tensor, output: Any) -> None:
        """Add the figures of a micro-batch; one with scale 0 ran only because another rank ran one.

        Args:
            micro: The micro-batch.
            source: The object that an error names if the loss is not finite.
            values: The policy's values, (M,), checked before the optimizer steps. They are kept as a token
                column, but leave what the reward or an earlier update has put there.
            output: The LossOutput.
        """
        counts, [column] = [scoring.num_scored for scoring in micro.passes], micro.passes[0].scored
        numbers = [self.row_number(row) for row in micro.rows]
        self.checks.add(values, counts, micro.passes[0].describe(column), numbers)
        self.check_finite(output.loss.expand(len(micro.rows)), "loss", source, micro.rows)
        parts = values.detach().split(counts)
        self.tokens[column] = dict(zip(micro.rows, parts, strict=True)) | self.tokens.get(column, {})
        for name, value in output.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + micro.scale * value
        for worker, mismatch in output.mismatch.items() if micro.scale else ():
            self.mismatches.setdefault(worker, []).append(mismatch)

    # Dynamic sampling

    def find_flat_groups(self) -> list[int]:
        """Return the slots of the groups whose rewards are all equal."""
        flat = zero_std_groups(self.rewards, self.group_size)
        return [slot for slot, is_flat in enumerate(flat.tolist()) if is_flat]

    def replace(self, others: StepBatch, slots: Sequence[int]) -> None:
        """Put the groups of another step into these slots; how many there are stays the same."""
        size = self.group_size
        target = [slot * size + i for slot in slots for i in range(size)]
        self.replaced += [self.sources[row] for row in target]
        self.counts.dropped_tokens += sum(len(self.token_ids(row)) for row in target)
        for row, source in zip(target, others.sources, strict=True):
            self.sources[row] = source
        replaced = set(target)
        for mine, theirs in ((self.tokens, others.tokens), (self.texts, others.texts)):
            for name in mine.keys() | theirs.keys():
                kept = {row: value for row, value in mine.get(name, {}).items() if row not in replaced}
                new = {target[row]: value for row, value in theirs.get(name, {}).items()}
                mine[name] = kept | new
        self.measured = sorted({*self.measured} - replaced | {target[row] for row in others.measured})
        for column, values in self.table.items():
            self.table[column] = values.index_copy(0, upload(target, values.device), others.table[column])
        self.counts.rounds += 1
        self.counts.dropped_groups += len(slots)


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack rows of different lengths; return values (N, T), padded with 0, and their token_mask."""
    return to_padded(torch.cat(list(rows)), [len(row) for row in rows])
