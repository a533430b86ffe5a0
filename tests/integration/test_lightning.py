"""Lightning's own parts work: an unmodified Trainer, its checkpoints, optimizers and schedulers by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from commands import ROOT, python, rlt
from safetensors.torch import load_file

from rlt_lightning import (
    OptimizerConfig,
    RLTModule,
    RolloutCallback,
    Sampling,
    TeacherRLData,
)
from rlt_lightning.callbacks import ModelExporter

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
PAGE = (ROOT / "docs" / "extend.md").read_text()
[PLAIN] = re.findall(r'^```python title="plain.py"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
SGD = ["--optimizer=torch.optim.SGD", "--optimizer.lr=0.5", "--optimizer.momentum=0.9"]
COSINE = ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=10"]


def data(**options: Any) -> TeacherRLData:
    options = {"num_embedded_rows": 16, "prompts_per_step": 4, "student_system_prompt": ""} | options
    return TeacherRLData("chains", **options)


def module(kind: type[RLTModule] = RLTModule, **options: Any) -> RLTModule:
    options = {"group_size": 2, "optimizer": OptimizerConfig(lr=1e-3)} | options
    return kind("miniature-teacher", "miniature", **options)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    options = {"max_steps": 2, "accelerator": "cpu", "enable_progress_bar": False} | options
    rollouts = RolloutCallback(sampling=Sampling(max_completion_length=16))
    return lightning.Trainer(default_root_dir=folder, callbacks=[rollouts, ModelExporter()], **options)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.docs
def test_the_page_trains_with_an_unmodified_trainer(tmp_path: Path) -> None:
    done = python(PLAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reward/val_mean" in done.stdout
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_lightnings_checkpoint_resumes_exactly_and_loads(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", max_steps=3).fit(module(), data())
    first = trainer(tmp_path / "part")
    first.fit(module(), data())
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    trainer(tmp_path / "resumed", max_steps=3).fit(module(), data(), ckpt_path=path)
    assert equal(exported(tmp_path / "resumed"), exported(tmp_path / "whole"))
    made = {"teacher": "miniature-teacher", "student": "miniature", "group_size": 2}
    loaded = RLTModule.load_from_checkpoint(path, **made)
    weights = exported(tmp_path / "part")
    assert equal({name: loaded.policy.state_dict()[name] for name in weights}, weights)
    # It validates and predicts as the module that was trained.
    again = trainer(tmp_path / "again")
    rows = data(val_rows=4)
    [figures] = again.validate(loaded, rows, verbose=False)
    [expected] = trainer(tmp_path / "other").validate(module(), rows, verbose=False, ckpt_path=path)
    assert figures["reward/val_mean"] == expected["reward/val_mean"]
    assert len(again.predict(loaded, data()) or []) == 4


class WithSGD(RLTModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def fit_command(folder: Path, *options: str) -> None:
    words = ["--data.num_embedded_rows=16", "--data.prompts_per_step=4", "--model.group_size=2"]
    words += ["--checkpoint.every_n_train_steps=1", "--rollouts.sampling.max_completion_length=16"]
    done = rlt("fit", "--config=laptop/rlt", *words, *options, f"--output_dir={folder}")
    assert done.returncode == 0, done.stderr


def test_an_optimizer_and_a_scheduler_by_name_train_and_resume_exactly(tmp_path: Path) -> None:
    fit_command(tmp_path / "whole", *SGD, *COSINE, "--trainer.max_steps=3")
    fit_command(tmp_path / "part", *SGD, *COSINE, "--trainer.max_steps=2")
    config = f"--config={tmp_path / 'part' / 'config.yaml'}"
    fit_command(tmp_path / "part", config, "--trainer.max_steps=3", "--resume=true")
    assert equal(exported(tmp_path / "part"), exported(tmp_path / "whole"))
    # A module that makes the same two itself takes the same steps.
    rows = data(num_embedded_rows=16)
    options: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1.0), "micro_batch_tokens": 4096}
    own = trainer(tmp_path / "own", max_steps=3)
    own.callbacks[0].sampling = Sampling(0.7, max_completion_length=16)  # type: ignore[attr-defined]
    own.fit(module(WithSGD, **options), rows)
    assert own.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        0.5 * 0.5 * (1 + torch.tensor(0.3 * torch.pi).cos())
    )


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_3", "deepspeed_stage_1"])
def test_an_optimizer_by_name_resumes_exactly_on_two_ranks(tmp_path: Path, strategy: str) -> None:
    ranks = [f"--trainer.strategy={strategy}", "--trainer.devices=2", *SGD, *COSINE]
    fit_command(tmp_path / "whole", *ranks, "--trainer.max_steps=3")
    fit_command(tmp_path / "part", *ranks, "--trainer.max_steps=2")
    fit_command(tmp_path / "part", *ranks, "--trainer.max_steps=3", "--resume=true")
    assert equal(exported(tmp_path / "part"), exported(tmp_path / "whole"))


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_stage_3"])
def test_an_unmodified_trainer_on_two_ranks(tmp_path: Path, strategy: str) -> None:
    options = f"accelerator='cpu', devices=2, strategy='{strategy}', max_steps"
    code = PLAIN.replace("max_steps", options) + "trainer.predict(module, data, return_predictions=False)\n"
    (tmp_path / "plain.py").write_text(code)
    words = [sys.executable, "plain.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()
