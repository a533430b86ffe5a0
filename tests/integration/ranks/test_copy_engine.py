"""Engines of every rank with a copy of the weights, examples/copy_engine.py, sample as the model itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from commands import ROOT, run_rlt
from compared import largest_difference
from copy_engine import CopyEngine
from fits import explanation, metrics, small_fit, weights
from launchers import STRATEGIES
from safetensors.torch import load_file
from torch.distributed import get_rank

from rlt_lightning.engines import EngineError
from rlt_lightning.models.load import load_model
from rlt_lightning.models.packed import sequence_log_probs

ENGINES = {"own": "HFEngine", "copy": "copy_engine.CopyEngine"}


def train(engine: str, folder: Path, model: str, strategy: str) -> None:
    words = ["--trainer.max_steps=3", "--trainer.val_check_interval=1", "--data.val_rows=2"]
    words += ["--trainer.devices=2", *STRATEGIES[strategy], "--model.importance_sampling=null"]
    words += ["--rollouts.sampling.max_completion_length=16", f"--rollouts.engine={engine}"]
    places = [ROOT / "examples", ROOT / "tests/support", Path(__file__).parent]
    run_rlt(*small_fit(model, folder, *words), PYTHONPATH=os.pathsep.join(map(str, places)))


@pytest.mark.parametrize("strategy", [full("ddp"), "fsdp2"])
def test_a_copy_per_rank_samples_and_trains_the_same(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    rows: dict[str, Any] = {}
    for name, engine in ENGINES.items():
        train(engine, tmp_path / name, tiny_model, strategy)
        rows[name] = [explanation(line) for line in (tmp_path / name / "rollouts.jsonl").open()]
    assert len(rows["own"]) > 0
    assert rows["copy"] == rows["own"]
    own, copy = (weights(tmp_path / name) for name in ENGINES)
    assert largest_difference(own, load_file(Path(tiny_model) / "model.safetensors")) > 1e-4
    assert largest_difference(copy, own) < (1e-5 if strategy == "fsdp2" else 1e-9)
    for row in metrics(tmp_path / "copy").values():
        assert row["rollout/mismatch_max"] < 1e-4  # each step sampled with its own weights


class Forgetful(CopyEngine):
    """Loses the weights of step 1 once, on the last rank."""

    def health(self) -> None:
        super().health()
        if self.policy_version == 1 and not self.unverified and get_rank() == 1:
            self.policy_version, self.unverified = -1, True


@pytest.mark.full
def test_all_ranks_gather_for_one_that_lost_its_copy(tiny_model: str, tmp_path: Path) -> None:
    for engine in ("copy_engine.CopyEngine", "test_copy_engine.Forgetful"):
        train(engine, tmp_path / engine, tiny_model, "fsdp2")
    kept, lost = map(weights, sorted(tmp_path.iterdir()))
    assert largest_difference(kept, lost) < 1e-9


def test_a_copy_without_the_weights_is_found(tiny_model: str, tmp_path: Path) -> None:
    model, text = load_model(tiny_model), [5, 6, 7, 8, 9]
    engine = CopyEngine()
    engine.start(model, None, tmp_path)
    engine.update_weights([*model.named_parameters()], 1)
    current = {1: sequence_log_probs(model, text).tolist()}
    engine.verify(text, current)
    with torch.no_grad():
        next(engine.model.parameters()).mul_(1.5)
    with pytest.raises(EngineError, match="trainer's weights"):
        engine.verify(text, current)
