"""The loaders: what each rank gets, and that a resumed run sees what an uninterrupted one would."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlt_lightning.datamodules.loader import OrderedLoader, StepLoader
from rlt_lightning.types import InputError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ROWS = list(range(11))


def make_loader(**options: Any) -> StepLoader[int, list[int]]:
    return StepLoader(ROWS, **{"batch_size": 3, "collate": list, "seed": 5, **options})


def test_an_epoch_is_full_batches_of_different_rows():
    loader = make_loader()
    first, second = list(loader), list(loader)
    assert len(first) == len(loader) == 3  # 11 rows, 2 dropped
    for epoch in (first, second):
        rows = [row for batch in epoch for row in batch]
        assert len(set(rows)) == 9
    assert first != second
    assert list(make_loader()) == first
    assert list(make_loader(seed=6)) != first
    assert sorted(loader.list_epoch(0)) == ROWS


def test_ranks_share_the_batch_that_one_process_would_have():
    whole = list(make_loader(batch_size=4))
    ranks = [list(make_loader(batch_size=4, rank=rank, world_size=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole


def stream(loader: StepLoader[int, list[int]], count: int) -> list[list[int]]:
    """Take batches of as many epochs as it needs; only the first, resumed at its end, may be empty."""
    batches = list(islice((batch for _ in range(count + 2) for batch in loader), count))
    assert len(batches) == count
    return batches


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 7])
def test_the_state_of_one_rank_restores_any_other(taken: int):
    expected = stream(make_loader(batch_size=4, rank=1, world_size=2), 9)[taken:]
    other = make_loader(batch_size=4, rank=0, world_size=2)
    stream(other, taken)
    resumed = make_loader(batch_size=4, rank=1, world_size=2)
    resumed.load_state_dict(other.state_dict())
    assert stream(resumed, 9 - taken) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_peek_shows_the_batch_that_comes_next_and_moves_nothing(rank: int):
    loader, other = (make_loader(batch_size=4, rank=rank, world_size=2) for _ in range(2))
    for _ in range(2):  # over the end of an epoch
        for batch in loader:
            state = loader.state_dict()
            upcoming = loader.peek()
            assert loader.peek() == upcoming
            assert loader.state_dict() == state
            assert other.peek() == batch
            other.load_state_dict(state)
            assert other.peek() == upcoming


def test_rewind_brings_the_same_batch_again():
    whole = stream(make_loader(), 9)
    for taken in range(1, 8):
        loader = make_loader()
        stream(loader, taken)
        loader.rewind()
        resumed = make_loader()
        resumed.load_state_dict(loader.state_dict())
        assert resumed.peek() == whole[taken - 1]
        assert stream(resumed, 10 - taken) == whole[taken - 1 :]


def test_more_brings_the_next_rows_and_later_batches_follow():
    # Epochs of nine rows; e and f are the orders of the first two.
    loader = make_loader()
    e, f = (loader.list_epoch(epoch)[:9] for epoch in (0, 1))
    batches = iter(loader)
    assert next(batches) == e[:3]
    assert loader.take_more(2) == e[3:5]
    assert loader.peek() == next(batches) == e[5:8]
    # One row is left of e; then rows of f that this step has had are passed over.
    had = {*e[5:8], e[8]}
    new = [row for row in f if row not in had]
    assert loader.take_more(3) == [e[8], *new[:2]]
    rest = f[f.index(new[1]) + 1 :]
    if len(rest) < 3:
        rest = loader.list_epoch(2)[:9]
    assert next(batches) == rest[:3]
    with pytest.raises(StopIteration):  # an epoch of the run is three steps, whatever they have taken
        next(batches)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_loader_continues_after_more(rank: int):
    def serve(loader: StepLoader[int, list[int]], steps: range) -> list[list[int]]:
        found: list[list[int]] = []
        for step, batch in zip(steps, (b for _ in range(20) for b in loader), strict=False):
            found += [batch, loader.take_more(step % 4)]
            states.append(loader.state_dict())
        return found

    states: list[dict[str, Any]] = []
    whole = serve(make_loader(batch_size=4, rank=rank, world_size=2), range(9))
    for stop in (1, 2, 3, 6):
        resumed = make_loader(batch_size=4, rank=rank, world_size=2)
        resumed.load_state_dict(states[stop - 1])
        assert serve(resumed, range(stop, 9)) == whole[2 * stop :]
    # `take_more` is the same on all ranks.
    other = serve(make_loader(batch_size=4, rank=1 - rank, world_size=2), range(9))
    assert other[1::2] == whole[1::2]


def test_rewind_takes_back_what_more_has_brought():
    loader = make_loader()
    batches = iter(loader)
    next(batches)
    loader.take_more(1)
    before = loader.state_dict()
    second = next(batches)
    loader.take_more(3)
    loader.rewind()
    assert loader.state_dict() == before
    assert loader.peek() == second


def test_a_checkpoint_of_other_data_is_refused():
    state = make_loader().state_dict()
    for changed, message in {
        StepLoader(ROWS[:10], 3, list, seed=5): "num_rows was 11 and is 10",
        make_loader(batch_size=4): "prompts_per_step was 3 and is 4",
        make_loader(seed=6): "seed was 5 and is 6",
    }.items():
        with pytest.raises(InputError, match=message):
            changed.load_state_dict(state)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 20])
def test_ordered_loader_gives_every_row_once(world_size: int, batch_size: int):
    loaders = [OrderedLoader(ROWS, batch_size, list, rank, world_size) for rank in range(world_size)]
    batches = [list(loader) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(rank) for rank in batches]
    assert sorted(row for rank in batches for batch in rank for row in batch) == ROWS
    assert all(batch for rank in batches for batch in rank)
    assert list(loaders[0]) == batches[0]  # again from the start


def test_ordered_loader_keeps_file_order_and_the_smaller_last_batch():
    assert list(OrderedLoader(ROWS, 4, list)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


# Under Lightning's fit


class Recorder(LightningModule):
    """Notes the batches it is given; manual optimization, as in our modules."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[int], batch_idx: int) -> None:
        self.seen.append(batch)
        optimizer: Any = self.optimizers()
        self.manual_backward(self.weight.sum())
        optimizer.step()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, max_steps: int, resume: Path | None = None) -> list[list[int]]:
    module = Recorder()
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    options: Any = {"max_steps": max_steps, "max_epochs": -1, "accelerator": "cpu", "callbacks": [checkpoint]}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}
    trainer = Trainer(logger=False, **options)
    trainer.fit(module, make_loader(), ckpt_path=None if resume is None else str(resume))
    return module.seen


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_a_resumed_fit_sees_the_remaining_batches(tmp_path: Path, stop: int):
    # Three batches per epoch: stops in the middle and at the end of the first and second one.
    whole = fit(tmp_path / "whole", 8)
    assert len(whole) == 8
    first = fit(tmp_path / "stopped", stop)
    rest = fit(tmp_path / "resumed", 8, resume=tmp_path / "stopped" / f"step={stop}.ckpt")
    assert first + rest == whole
