"""The order of an epoch: by weights of sources, by difficulty of rows, and the same after a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonargparse import ArgumentParser

from rlt_lightning.datamodules import StratosDataModule, StudentSFTData, TeacherRLData
from rlt_lightning.datamodules.loader import Difficulty, EpochOrder, Shuffled, StepLoader, Weighted
from rlt_lightning.datamodules.sources import WeightedSource
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
    sources = (WeightedSource(small, 1), WeightedSource(large, 3))
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


def test_weights_are_of_all_sources_or_of_none(tiny_model: str) -> None:
    with pytest.raises(InputError, match=r"'b' has none. Write it as \{source: b, weight: 1\}"):
        TeacherRLData([WeightedSource("a", 1), "b"])
    for weight in (0, -1, float("inf"), float("nan"), "2"):
        with pytest.raises(InputError, match=r"weight of a source must be a number above 0, but 'a' has"):
            WeightedSource("a", weight)
    with pytest.raises(InputError, match="but not both"):
        TeacherRLData([WeightedSource("a", 1)], order=Difficulty())
    with pytest.raises(InputError, match=r"data\.val_source take no weights"):
        TeacherRLData("a", val_source=[WeightedSource("a", 1)])


def test_weights_and_order_on_the_command_line() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(TeacherRLData, "data")
    words = ["--data.source=[{source: a.jsonl, weight: 2}, {source: 'b:main', weight: 0.5}]"]
    data = parser.instantiate(parser.parse_args(words)).data
    assert (data.sources, data.weights) == (["a.jsonl", "b:main"], [2.0, 0.5])
    words = ["--data.source=[a.jsonl, b]", "--data.order={column: reward, first: hard}"]
    data = parser.instantiate(parser.parse_args([*words, "--data.token_cache=false"])).data
    assert (data.sources, data.weights, data.token_cache) == (["a.jsonl", "b"], [], False)
    assert data.order == Difficulty("reward", "hard")


@pytest.mark.parametrize("column", ["pass_rate", "reward"])
def test_rows_come_by_difficulty(make_data: Callable[..., Any], tmp_path: Path, column: str) -> None:
    values = [0.5, 1, 0.25, 0.5, 0, 0.5, 0.75, 0.5]
    rows = [row | {column: value} for row, value in zip(rows_of("q", 8), values, strict=True)]
    source = write_rows(tmp_path / "rows.jsonl", rows)

    def epochs(first: str) -> list[list[float]]:
        loader = make_data(source, order=Difficulty(column, first)).train_dataloader()  # type: ignore[arg-type]
        return [[p.columns[column] for batch in loader for p in batch.problems] for _ in range(2)]

    assert epochs("easy") == [sorted(values, reverse=True)] * 2
    assert epochs("hard") == [sorted(values)] * 2
    loader = make_data(source, order=Difficulty(column)).train_dataloader()
    orders = [[p.row for batch in loader for p in batch.problems] for _ in range(3)]
    assert len({tuple(order) for order in orders}) > 1  # equal ones are shuffled
    assert [order[:2] for order in orders] == [[2, 7]] * 3
    state = loader.state_dict()
    with pytest.raises(InputError, match=f"order was easy first, by {column} and is hard first"):
        make_data(source, order=Difficulty(column, "hard")).step_loader().load_state_dict(state)


def test_examples_of_fine_tuning_come_by_difficulty_too(
    make_data: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [row | {"reasoning_trace": "t", "reward": i} for i, row in enumerate(rows_of("q", 8))]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    data = make_data(source, kind=StudentSFTData, order=Difficulty("reward", "hard"))
    assert [e.row for batch in data.train_dataloader() for e in batch.examples] == list(range(1, 9))
