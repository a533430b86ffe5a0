"""The order of an epoch: by weights of sources, and the same after a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonargparse import ArgumentParser

from rlt_lightning.datamodules import StratosDataModule, TeacherRLData
from rlt_lightning.datamodules.loader import EpochOrder, Shuffled, StepLoader, Weighted
from rlt_lightning.types import InputError

SIZES, WEIGHTS = (12, 30, 5), (3.0, 1.0, 1.0)
SOURCES = np.repeat(np.arange(len(SIZES)), SIZES)


def loader_of(order: EpochOrder, **options: Any) -> StepLoader[int, list[int]]:
    return StepLoader(range(len(SOURCES)), **{"batch_size": 4, "collate": list, "order": order, **options})


def taken(loader: StepLoader[int, list[int]], count: int) -> list[list[int]]:
    batches: list[list[int]] = []
    while True:
        for batch in loader:
            batches.append(batch)
            if len(batches) == count:
                return batches


# Weights


def test_an_epoch_has_of_each_source_its_share() -> None:
    # Shares 3/5, 1/5, 1/5: the first source is used up by 20 items, of which 12, 4 and 4 are of each.
    order = Weighted(SOURCES, WEIGHTS, seed=0)
    assert order.num_items == 20
    for epoch in range(5):
        found = order.list_epoch(epoch)
        assert Counter(SOURCES[found].tolist()) == {0: 12, 1: 4, 2: 4}
        assert len(set(found)) == 20 or epoch  # within one round nothing comes again


def test_all_rows_of_a_source_come_before_one_comes_again() -> None:
    order = Weighted(SOURCES, WEIGHTS, seed=0)
    epochs = [order.list_epoch(epoch) for epoch in range(15)]  # 60 of the second source, 60 of the third
    seen = Counter(place for epoch in epochs for place in epoch)
    assert {seen[place] for place in range(12)} == {15}
    assert {seen[place] for place in range(12, 42)} == {2}
    assert {seen[place] for place in range(42, 47)} == {12}
    first = [place for epoch in epochs[:7] for place in epoch if 12 <= place < 42]
    assert len(set(first)) == len(first) == 28


def test_rounding_goes_to_the_largest_remainder() -> None:
    sources = np.repeat(np.arange(3), (10, 10, 10))
    # The first is used up by 20 items.
    order = Weighted(sources, (2.0, 1.0, 1.0), seed=0)
    assert (order.num_items, order.counts) == (20, [10, 5, 5])
    assert Weighted(sources, (1.0, 1.0, 1.0), seed=0).num_items == 30
    assert Weighted(np.repeat([0, 1], [10, 90]), (0.1, 0.9), seed=0).counts == [10, 90]
    # Used up by 15.8 items; of 15 they have 9.49 and 5.51, and the second remainder is the larger one.
    assert Weighted(np.repeat([0, 1], [10, 10]), (1.0, 0.58), seed=0).counts == [9, 6]


def test_an_order_depends_on_seed_and_epoch_alone() -> None:
    order, again = Weighted(SOURCES, WEIGHTS, seed=0), Weighted(SOURCES, WEIGHTS, seed=0)
    assert [order.list_epoch(e) for e in (3, 0, 3)] == [again.list_epoch(e) for e in (3, 0, 3)]
    assert order.list_epoch(0) != order.list_epoch(1)
    assert order.list_epoch(0) != Weighted(SOURCES, WEIGHTS, seed=1).list_epoch(0)
    # Written down: a run that resumes after an update of this package has the same order.
    known = [2, 6, 5, 4, 1, 0, 3, 8, 7]
    assert Weighted(np.repeat([0, 1], [3, 6]), (1.0, 2.0), seed=0).list_epoch(0) == known


@pytest.mark.parametrize("number", [0, 1, 4, 5, 7, 11])
def test_a_resumed_run_continues_a_mixture_exactly(number: int) -> None:
    order = Weighted(SOURCES, WEIGHTS, seed=3)
    expected = taken(loader_of(order, seed=3), 17)
    stopped = loader_of(order, seed=3)
    if number:
        taken(stopped, number)
    resumed = loader_of(Weighted(SOURCES, WEIGHTS, seed=3), seed=3)
    resumed.load_state_dict(stopped.state_dict())
    assert taken(resumed, 17 - number) == expected[number:]


def test_ranks_share_the_batches_of_a_mixture() -> None:
    order = Weighted(SOURCES, WEIGHTS, seed=0)
    whole = taken(loader_of(order), 7)
    ranks = [taken(loader_of(order, rank=rank, world_size=2), 7) for rank in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole


def test_a_checkpoint_of_another_order_is_refused() -> None:
    state = loader_of(Weighted(SOURCES, WEIGHTS, seed=0)).state_dict()
    with pytest.raises(InputError, match=r"order was weight 3 of 12 items.* and is weight 1 of 12 items"):
        loader_of(Weighted(SOURCES, (1.0, 1.0, 1.0), seed=0)).load_state_dict(state)
    with pytest.raises(InputError, match=r"and is shuffled"):
        loader_of(Shuffled(len(SOURCES), 0)).load_state_dict(state)


def test_a_source_that_gives_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"an epoch has 17 items, of which source 2 gives none"):
        Weighted(SOURCES, (1000.0, 1.0, 1000.0 * 5 / 12), seed=0)
    for empty, other in ((1, 1), (2, 0)):
        with pytest.raises(InputError, match=rf"a row to train on, but source {empty} of 2 has none"):
            Weighted(np.full(5, other), (1.0, 1.0), seed=0)


# In the datamodule


@pytest.fixture
def make_data(tiny_model: str) -> Callable[..., StratosDataModule]:
    def make(*sources: Any, **options: Any) -> StratosDataModule:
        settings = {"tokenizer": tiny_model, "prompts_per_step": 4, "kind": TeacherRLData, **options}
        data = settings.pop("kind")(list(sources), **settings)
        data.setup("fit")
        return data

    return make


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(name: str, number: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"question": f"{name}{i}?", "solution": "s"} | columns for i in range(number)]


def test_the_datamodule_mixes_its_sources(make_data: Callable[..., Any], tmp_path: Path) -> None:
    small = write_rows(tmp_path / "small.jsonl", rows_of("small", 10))
    large = write_rows(tmp_path / "large.jsonl", [{}, *rows_of("large", 50)])
    sources = ({"source": small, "weight": 1}, {"source": large, "weight": 3})
    data = make_data(*sources, max_bad_frac=0.1, val_rows=4)
    held_out = Counter(item.question[:5] for item in data.val_items)
    asked = Counter(p.question[:5] for batch in data.train_dataloader() for p in batch.problems)
    assert asked["small"] <= 10 - held_out["small"]
    assert asked["large"] / asked["small"] == pytest.approx(3, rel=0.3)
    assert data.source == f"{small}, {large}"
    questions = {p.question for p in data.val_items}
    assert all(p.question not in questions for batch in data.step_loader() for p in batch.problems)


def test_rows_in_memory_may_have_weights(make_data: Callable[..., Any]) -> None:
    parts = [{"source": rows_of("a", 4), "weight": 1}, {"source": rows_of("b", 40), "weight": 3}]
    data = make_data(*parts)
    assert (data.source, data.weights) == ("4 rows in memory, 40 rows in memory", [1, 3])
    asked = Counter(p.question[0] for batch in data.train_dataloader() for p in batch.problems)
    assert asked == {"a": 4, "b": 12}


def test_weights_are_of_all_sources_or_of_none() -> None:
    weighted = {"source": "a", "weight": 1}
    for other in ("b", *({"source": "b", "weight": w} for w in (0, -1, float("inf"), float("nan"), "2"))):
        with pytest.raises(InputError, match="or each has a number above 0"):
            TeacherRLData([weighted, other])
    with pytest.raises(InputError, match=r"data\.val_source take no weights"):
        TeacherRLData("a", val_source=[weighted])


def test_weights_on_the_command_line() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(TeacherRLData, "data")
    words = ["--data.source=[{source: a.jsonl, weight: 2}, {source: 'b:main', weight: 0.5}]"]
    data = parser.instantiate(parser.parse_args(words)).data
    assert (data.sources, data.weights) == (["a.jsonl", "b:main"], [2.0, 0.5])
