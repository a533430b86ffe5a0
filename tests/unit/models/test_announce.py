"""Slow work is announced before it begins, on rank 0 only; quick work is not announced."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from rlt_lightning import console
from rlt_lightning.models import load as pretrained
from rlt_lightning.models import weights

Captured = pytest.CaptureFixture[str]


def test_a_model_is_named_with_its_size_before_it_is_loaded(miniature: str, capsys: Captured) -> None:
    pretrained.announce_model("miniature", "bfloat16")
    pretrained.announce_model(miniature, "auto", "the frozen student")
    pretrained.announce_model("nobody/nothing", "float32")
    first, second, third = capsys.readouterr().err.splitlines()
    assert all(word in first for word in ("miniature", "0.7 MB", "bfloat16"))
    assert all(word in second for word in (miniature, "0.7 MB", "the frozen student"))
    assert "nobody/nothing" in third


def test_sizes_count_whole_weights_as_they_travel() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16)]
    assert weights.weights_size(tensors) == 6 * 4 + 4 * 2
    assert weights.weights_size(tensors, torch.bfloat16) == (6 + 4) * 2
    assert pretrained.model_size("/no/such/folder") == "of unknown size"


def test_only_rank_zero_announces(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    console.announce("loading")
    assert capsys.readouterr() == ("", "")
