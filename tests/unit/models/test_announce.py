"""Slow work is announced before it begins, on rank 0 only; quick work is not announced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from rlt_lightning import console
from rlt_lightning.models import kernels, packed, weights
from rlt_lightning.models import load as pretrained

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


@pytest.mark.parametrize(
    ("device", "types", "has", "advice"),
    [
        (
            "cpu",
            {"trainer.precision": "bf16-mixed", "model.dtype": "float32"},
            False,
            "to 32-true.",
        ),
        ("cpu", {"trainer.precision": "32-true", "model.dtype": "bfloat16"}, False, "to float32."),
        ("cpu", {"trainer.precision": "32-true", "model.dtype": "float32"}, False, ""),
        ("cpu", {"trainer.precision": "bf16-mixed"}, True, ""),
        ("cuda", {"trainer.precision": "bf16-mixed"}, False, ""),
    ],
)
def test_a_cpu_that_is_slow_in_bfloat16_is_told(
    device: str,
    types: dict[str, str],
    has: bool,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    found = {"architecture": "x86_64", "avx512_bf16": has, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    kernels.announce_slow_bfloat16(torch.device(device), types)
    said = capsys.readouterr().err
    assert said.strip().endswith(advice)
    assert bool(said) == bool(advice)
