"""The engine of examples/sglang_engine.py trains against a pretended SGLang server with a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT, run_rlt
from fake_sglang import FakeSGLang
from fits import metrics, small_fit
from grpo import data, module, rollout_callback
from sglang_engine import SGLangEngine
from trainers import bare_trainer

from rlt_lightning.engines import EngineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_a_run_trains_on_what_sglang_samples(tiny_model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with FakeSGLang(tiny_model) as server:
        words = ["--rollouts.engine=sglang_engine.SGLangEngine", f"--rollouts.engine.url={server.url}"]
        words += ["--rollouts.sampling.max_completion_length=6", "--trainer.max_steps=3"]
        words += ["--model.optimizer.lr=1e-2"]
        run_rlt(*small_fit(tiny_model, run, *words), PYTHONPATH=str(ROOT / "examples"))
    rows = metrics(run)
    assert len(rows) == 3
    # Each step sampled with its own weights, which the server read from the folder that was pushed.
    assert list(dict.fromkeys(server.sampled_with)) == ["0", "1", "2"]
    assert server.sampled_with.count("1") == server.sampled_with.count("2") > 0
    for row in rows.values():
        assert row["rollout/mismatch_max"] < 1e-4
    assert not list(run.glob("weights/*"))


def test_weights_that_were_not_loaded_are_noticed(tiny_model: str, tmp_path: Path) -> None:
    with FakeSGLang(tiny_model, ignores_pushes=True) as server:
        trainer = bare_trainer(tmp_path, rollout_callback(6, engine=SGLangEngine(server.url)), steps=2)
        with pytest.raises(EngineError, match="later pushes have not arrived"):
            trainer.fit(module(tiny_model), datamodule=data(tiny_model, tmp_path))
    assert set(server.sampled_with) == {"0"}
