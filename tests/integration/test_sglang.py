"""The engine of examples/sglang_engine.py trains against a pretended SGLang server with a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from commands import ROOT, rlt
from fake_sglang import FakeSGLang
from fits import metrics
from grpo import Witness, data, module, rollout_callback
from sglang_engine import SGLangEngine
from trainers import bare_trainer

from rlt_lightning.engines import EngineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def fit(server: FakeSGLang, model: str, folder: Path, steps: int = 2, timeout_s: float = 30.0) -> Witness:
    witness = Witness()
    engine = SGLangEngine(server.url, request_timeout_s=timeout_s)
    trainer = bare_trainer(folder, rollout_callback(6, engine=engine), witness, steps=steps)
    trainer.fit(module(model), datamodule=data(model, folder))
    return witness


def test_a_run_trains_on_what_sglang_samples(tiny_model: str, tmp_path: Path) -> None:
    with FakeSGLang(tiny_model) as server:
        engine = {"class_path": "sglang_engine.SGLangEngine", "init_args": {"url": server.url}}
        config = tmp_path / "sglang.yaml"
        config.write_text(yaml.safe_dump({"rollouts": {"engine": engine}}))
        run = tmp_path / "run"
        words = ["fit", "--config=tests/rlt.yaml", f"--config={config}", f"--output_dir={run}"]
        words += [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}", "--trainer.max_steps=3"]
        words += ["--rollouts.sampling.max_completion_length=6", "--model.optimizer.lr=1e-2"]
        result = rlt(*words, PYTHONPATH=str(ROOT / "examples"))
    assert result.returncode == 0, result.stderr
    rows = metrics(run)
    assert len(rows) == 3
    # Each step sampled with its own weights, which the server read from the folder that was pushed.
    assert list(dict.fromkeys(server.sampled_with)) == ["0", "1", "2"]
    assert server.sampled_with.count("1") == server.sampled_with.count("2") > 0
    for row in rows.values():
        assert row["rollout/mismatch_max"] < 1e-4
    assert not list(run.glob("weights/*"))


def test_weights_that_were_not_loaded_are_noticed(tiny_model: str, tmp_path: Path) -> None:
    with (
        FakeSGLang(tiny_model, ignores_pushes=True) as server,
        pytest.raises(EngineError, match="later pushes have not arrived"),
    ):
        fit(server, tiny_model, tmp_path)
    assert set(server.sampled_with) == {"0"}
