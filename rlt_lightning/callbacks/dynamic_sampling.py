"""Replace groups whose rewards are all equal by other problems (DAPO, arXiv:2503.14476, section 3.2).

Such a group has advantage 0 and teaches nothing. A step has a place for each of its problems, counted over
all ranks. Each ═ is a collective, in which all ranks wait:

    sample ─▶ score ═▶ which places have equal rewards? ═▶ none, or no round is left ─▶ train
      ▲                              │
      └─── one problem for each ◀────┘  the next ones of the training order

Every rank knows all places and all problems, so all ranks decide alike. A place belongs to one rank, which
keeps its completions and scores: only new completions travel, to all ranks. A place whose rewards are still
equal after the last round keeps its group, so a step always has its usual size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from rlt_lightning.callbacks.engine_link import EngineLink
from rlt_lightning.callbacks.order import Order
from rlt_lightning.callbacks.together import waiting_for_ranks
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.modules.reading import Reading
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.shares import gather
from rlt_lightning.numerics.advantages import zero_std_groups
from rlt_lightning.types import Completion, InputError, Problem, PromptBatch, Rollouts, Scores

T = TypeVar("T")


@dataclass(frozen=True)
class DynamicSampling:
    """Sample other problems in place of those whose completions all earned the same.

    Args:
        max_rounds: How often a step does so at most. A round samples one problem for each group of equal
            rewards that is left, so a step samples at most 1 + max_rounds times its problems.

    Raises:
        InputError: If max_rounds is below 1.
    """

    max_rounds: int = 3

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise InputError(
                "rollouts.dynamic_sampling.max_rounds must be at least 1, but is "
                f"{self.max_rounds}. Raise it, or set rollouts.dynamic_sampling to null: that is off."
            )


def refill(
    settings: DynamicSampling,
    link: EngineLink,
    trainer: Trainer,
    module: RLTModule,
    batch: PromptBatch,
    order_of: Callable[[list[Problem]], Order],
) -> None:
    """Score a batch, and replace its groups of equal rewards as long as the settings allow.

    The batch keeps its size. What was counted is put into `batch.counts`, over all ranks.

    Args:
        settings: The bound.
        link: The link to the engine.
        trainer: The trainer, whose loader has the next problems.
        module: The module that scores; its `reading`, if there is one, is what the student has read so far.
        batch: The problems and rollouts of this rank's places.
        order_of: Makes an order of problems that all ranks have alike.
    """
    assert batch.rollouts is not None
    reading, module.reading = module.reading, None
    batch.scores = scores_of(trainer, module, batch.rollouts, reading=reading)
    rank, size = trainer.global_rank, batch.rollouts.group_size
    rounds = num_dropped = dropped_tokens = 0
    while True:
        assert batch.scores is not None
        own = zero_std_groups(batch.scores.terms.reward, size).tolist()
        equal = from_all(trainer, own, "the rewards of all ranks")
        num_equal = sum(map(sum, equal))
        left = num_equal if rounds < settings.max_rounds else 0
        problems: list[Problem] = trainer.train_dataloader.more(left) if left else []  # type: ignore[union-attr]
        if not problems:
            break
        rounds, num_dropped = rounds + 1, num_dropped + len(problems)
        groups = sampled(link, trainer, module, order_of(problems))
        places = assigned(equal, len(problems))
        first = size * sum(map(len, places[:rank]))
        dropped_tokens += replace_groups(trainer, module, batch, problems, groups, places[rank], first)
    [all_dropped_tokens] = module.sum_over_ranks(dropped_tokens)
    batch.counts = {
        "rollout/sampled_problems": float(sum(map(len, equal)) + num_dropped),
        "rollout/dropped_groups": float(num_dropped),
        "rollout/dropped_tokens": all_dropped_tokens,
        "rollout/refill_rounds": float(rounds),
        "rollout/kept_equal_groups": float(num_equal),
    }


def assigned(equal: Sequence[Sequence[bool]], num_problems: int) -> list[dict[int, int]]:
    """Return which new problem each place gets, by rank: {place: number of the problem}.

    The problems go to the places of equal rewards in order, rank after rank, until they are used up. So the
    places of several ranks get the same problems as those of a single one.

    Example:
        assigned([[False, True], [True, True]], 2) is [{1: 0}, {0: 1}]: rank 1 keeps what its last place has.

    Args:
        equal: Whether each place has equal rewards, by rank.
        num_problems: New problems, at most as many as there are such places.
    """
    places = [(rank, place) for rank, flags in enumerate(equal) for place, flag in enumerate(flags) if flag]
    found: list[dict[int, int]] = [{} for _ in equal]
    for number, (rank, place) in enumerate(places[:num_problems]):
        found[rank][place] = number
    return found


def sampled(
    link: EngineLink, trainer: Trainer, module: RLTModule, order: Order
) -> dict[int, list[Completion]]:
    """Sample an order that all ranks have alike; return its completions on every rank, by row."""
    own = link.completions_of(trainer, module, order)
    parts = from_all(trainer, own, "the completions of other problems")
    return {row: group for part in parts for row, group in part.items()}


def replace_groups(
    trainer: Trainer,
    module: RLTModule,
    batch: PromptBatch,
    problems: list[Problem],
    groups: dict[int, list[Completion]],
    own: dict[int, int],
    first: int,
) -> int:
    """Score this rank's part of a round and put it into its places; return the tokens that were dropped.

    Args:
        trainer: The trainer.
        module: The module that scores. All ranks call this together, also those without a part.
        batch: The batch with the places.
        problems: The problems of the round.
        groups: Their completions, by row.
        own: The number of the problem that each of this rank's places gets.
        first: Completions of the round in the places of the ranks before.
    """
    assert batch.rollouts is not None
    assert batch.scores is not None
    data, size = stratos_of(trainer), batch.rollouts.group_size
    fresh = [data.rollout(problems[n], c) for n in own.values() for c in groups[problems[n].row]]
    module.phase.phases["generate"].tokens += sum(len(r.completion.token_ids) for r in fresh)
    scores = scores_of(trainer, module, replace(batch.rollouts, rollouts=fresh), first)
    if scores is None:
        return 0
    places, before = list(own), batch.rollouts.rollouts
    num_problems = len(batch.problems)
    rows = with_new(num_problems, places, size)
    others = [problems[number] for number in own.values()]
    batch.problems = chosen(batch.problems, others, with_new(num_problems, places))
    batch.rollouts = replace(batch.rollouts, rollouts=chosen(before, fresh, rows))
    batch.scores = chosen(batch.scores, scores, rows)
    dropped = [before[place * size + i] for place in places for i in range(size)]
    return sum(len(rollout.completion.token_ids) for rollout in dropped)


def scores_of(
    trainer: Trainer,
    module: RLTModule,
    rollouts: Rollouts,
    first: int | None = None,
    reading: Reading | None = None,
) -> Scores | None:
    """Return the scores of this rank's rollouts; None if it has none. All ranks call this together.

    Args:
        trainer: The trainer.
        module: The module that scores.
        rollouts: Whole groups.
        first: The number of the first of them over all ranks; None if all ranks have equally many.
        reading: What the student has said of them already.
    """
    rows = rollouts.rollouts
    # As training_step, with the precision that the models run in.
    with trainer.precision_plugin.train_step_context():
        if reading is None:
            reading = Reading.of(module, rollouts, len(rows), first, with_reference=False)
            reading.add(dict(enumerate(rows)))
        reading = reading.in_order()
        with module.phase("score"):
            found = reading.share.scores_of_own(reading.scores)
            return module.scorer.rewards(rollouts.rollouts, found) if rows else None


def with_new(num_groups: int, places: Sequence[int], size: int = 1) -> list[int]:
    """Return positions in old and new values one after the other: the new groups stand in these places.

    Example:
        with_new(3, [1], size=2) is [0, 1, 6, 7, 4, 5].
    """
    groups = {place: num_groups + number for number, place in enumerate(places)}
    return [groups.get(place, place) * size + i for place in range(num_groups) for i in range(size)]


def chosen(old: Any, new: Any, rows: list[int]) -> Any:
    """Return the values at some positions of two tensors or lists one after the other.

    Of a data class or a dictionary the values of each field; what has no value per row, such as an empty
    list, stays.
    """
    if is_dataclass(old) and not isinstance(old, type):
        names = [field.name for field in fields(old)]
        return replace(old, **{name: chosen(getattr(old, name), getattr(new, name), rows) for name in names})
    if isinstance(old, dict):
        return {name: chosen(values, new[name], rows) for name, values in old.items()}
    if isinstance(old, Tensor):
        return torch.cat([old, new])[rows]
    if isinstance(old, list) and len(old) == len(rows):
        both = [*old, *new]
        return [both[row] for row in rows]
    return old


def from_all(trainer: Trainer, own: T, what: str) -> list[T]:
    """Return what each rank has, in rank order; `what` is waited for."""
    if trainer.world_size == 1:
        return [own]
    with waiting_for_ranks(trainer, what):
        return gather(own, trainer.world_size)
