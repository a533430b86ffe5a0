"""Torchmetrics of figures over batches and ranks, against values worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import call
from torch.distributed import distributed_c10d

from rlt_lightning.metrics import AnswerFigures, HeldOutFigures, StepMeans, WeightedMean


class Ranks:
    """What the figures use of a Trainer."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.global_rank, self.local_rank, self.world_size = rank, rank, world_size
        self.is_global_zero = rank == 0


def record(problem: str, correct: bool, answer: int | None = 0, length: int = 5) -> dict[str, Any]:
    return {
        "id": problem, "correct": correct, "formatted": True, "timed_out": False, "same_answer": answer,
        "num_tokens": length, "finish_reason": "length",
    }  # fmt: skip


def test_means_weigh_tokens_and_rows_by_themselves() -> None:
    # (4 * 2 + 2 * 2) / 4 and (1 * 6 + 5 * 2) / 8.
    held_out = HeldOutFigures()
    for means, count in (({"length": 4.0}, 2), ({"kl.a": 1.0}, 6), ({"length": 2.0}, 2), ({"kl.a": 5.0}, 2)):
        held_out.add(means, count, {})
    one: Any = Ranks(0, 1)
    assert held_out.compute(one) == {"length": 3.0, "kl.a": 2.0}
    assert held_out.compute(one) == {}  # it has begun again


def test_a_mean_over_nothing_is_zero() -> None:
    mean = WeightedMean()
    mean.update(math.pi, 0)
    assert float(mean.compute()) == 0.0


def test_a_steps_figures_are_what_was_given() -> None:
    means = StepMeans()
    means.update({"a": torch.tensor(0.5), "b": 3, "c": torch.tensor([2.0])})
    assert {name: float(value) for name, value in means.compute().items()} == {"a": 0.5, "b": 3.0, "c": 2.0}


def compare_with_one_rank(rank: int) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    step = StepMeans()
    step.update({"a": torch.tensor(1.0 + rank), "b": 10.0 * rank})
    assert {name: float(value) for name, value in step.compute().items()} == {"a": 1.5, "b": 5.0}

    held_out = HeldOutFigures()
    held_out.add({"loss": 2.0 + rank}, 3 - 2 * rank, {"largest": 7.0 - rank})
    if rank == 0:  # nothing of the other one could be compared
        held_out.add({}, 1, {"mismatch": 4.0})
    ranks: Any = Ranks(rank, 2)
    with patch.object(distributed_c10d, "all_gather", wraps=distributed_c10d.all_gather) as gather:
        # (2 * 3 + 3 * 1) / 4
        assert held_out.compute(ranks) == {"loss": 2.25, "largest": 7.0, "mismatch": 4.0}
    assert gather.call_count == 2  # of lengths and of all states

    answers = AnswerFigures({"own/0": "own", "own/1": "own", "own/2": "own", "more/0": "more"})
    own = [[record("own/0", True), record("own/2", False), record("more/0", True)], [record("own/1", True)]]
    answers.update(own[rank])
    figures, _ = answers.compute()
    assert (figures["own"]["num_problems"], figures["own"]["pass_at_1"]) == (3, pytest.approx(2 / 3))
    assert figures["overall"]["pass_at_1"] == pytest.approx(5 / 6)

    answers = AnswerFigures({"own/0": "own"})
    answers.update([record("own/0", True)] if rank == 0 else [])  # of one of them all
    assert answers.compute()[0]["own"]["pass_at_1"] == 1


def test_two_ranks_have_the_figures_of_both(tmp_path: Path) -> None:
    call(compare_with_one_rank, tmp_path)
