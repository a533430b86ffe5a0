"""Slow work is announced before it begins, on rank 0 only; quick work is not announced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from rlt_lightning import console
from rlt_lightning.models import load as pretrained
from rlt_lightning.models import packed, weights

Captured = pytest.CaptureFixture[str]


def test_sizes_count_whole_weights_as_they_travel() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16)]
    assert weights.weights_size(tensors) == 6 * 4 + 4 * 2
    assert weights.weights_size(tensors, torch.bfloat16) == (6 + 4) * 2
    assert pretrained.model_size("/no/such/folder") == "of unknown size"


def test_only_rank_zero_announces(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    console.announce("loading")
    assert capsys.readouterr() == ("", "")


def test_many_rows_are_counted_while_they_are_read(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert list(console.show_count(iter(range(5000)), "tokenising")) == list(range(5000))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "COUNT_EVERY_S", 0.0)
    assert list(console.show_count(iter(range(5000)), "tokenising")) == list(range(5000))
    assert "tokenising: 4,999 rows so far" in capsys.readouterr().err.splitlines()


def test_only_large_files_and_weights_are_announced(tmp_path: Path, capsys: Captured) -> None:
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.touch()
    with large.open("wb") as file:
        file.truncate(123_456_789)
    checkpoint = tmp_path / "step=000002.ckpt"
    for moment in ("weights", "exp_avg"):
        (checkpoint / moment).mkdir(parents=True)
        with (checkpoint / moment / "model.safetensors").open("wb") as file:
            file.truncate(6 * 10**8)
    for path in (small, large, checkpoint):
        console.announce_reading(path)
    console.announce_writing(tmp_path / "model", 10**9)
    console.announce_writing(tmp_path / "model", 42 * 10**9)
    packed.announce_check("tiny", torch.nn.Linear(2, 2))
    packed.announce_check("big", torch.nn.Linear(10**5, 10**5, device="meta"))
    named = [(str(large), "123.5 MB"), (str(checkpoint), "1.2 GB"), ("model", "42.0 GB"), ("big", "40.0 GB")]
    for line, (what, size) in zip(capsys.readouterr().err.splitlines(), named, strict=True):
        assert what in line
        assert size in line
