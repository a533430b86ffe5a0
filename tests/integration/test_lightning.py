"""Lightning's own parts work: an unmodified Trainer, its checkpoints, optimizers and schedulers by name."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from inspect import isabstract
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml
from commands import ROOT, rlt, run_python, run_rlt
from fits import assert_one_clear_line, metrics
from hooks import EveryHook
from lightning.pytorch import Callback
from parsed import parser_of
from safetensors.torch import load_file

from rlt_lightning import (
    EvaluationDataModule,
    OptimizerConfig,
    RLTModule,
    RolloutCallback,
    Sampling,
    StudentSFTData,
    TeacherRLData,
    Trainer,
)
from rlt_lightning.callbacks import ModelExporter, ResponseCallback
from rlt_lightning.datamodules import StudentOPDData
from rlt_lightning.modules import EvaluationModule, OPDModule, SFTModule

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
PAGE = (ROOT / "docs" / "extend.md").read_text()
[PLAIN] = re.findall(r'^```python title="plain.py"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)


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
    done = run_python(PLAIN, tmp_path)
    assert "reward/val_mean" in done.stdout
    assert (tmp_path / "model" / "model.safetensors").exists()


class WithSGD(RLTModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.parametrize("kind", [RLTModule, WithSGD])
def test_lightnings_checkpoint_resumes_exactly_and_loads(kind: type[RLTModule], tmp_path: Path) -> None:
    trainer(tmp_path / "whole", max_steps=3).fit(module(kind), data())
    first = trainer(tmp_path / "part")
    first.fit(module(kind), data())
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    trainer(tmp_path / "resumed", max_steps=3).fit(module(kind), data(), ckpt_path=path)
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


# Callbacks


def test_callbacks_log_and_read_in_every_hook(tmp_path: Path, recwarn: Any) -> None:
    rows: dict[str, Any] = {
        "student_system_prompt": "",
        "num_embedded_rows": 9,
        "val_rows": 3,
        "prompts_per_step": 2,
    }
    rows |= {"val_batch_size": 2}
    own = {"teacher_system_prompt": "", "tags": "r1"}
    sampling = Sampling(max_completion_length=48)
    small = OptimizerConfig(lr=1e-3)
    runs: dict[str, tuple[Any, Any]] = {
        "rlt": (module(), TeacherRLData("chains", **rows)),
        "sft": (SFTModule("miniature", small), StudentSFTData("chains", **rows)),
        "opd": (OPDModule("miniature", optimizer=small), StudentOPDData("chains", **rows, **own)),
    }
    called = set()
    for name, (trained, source) in runs.items():
        hooks, rollouts = EveryHook(), RolloutCallback(sampling=sampling)
        options: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu"}
        runner = Trainer(
            tmp_path / name, max_steps=2, val_check_interval=2, callbacks=[hooks, rollouts], **options
        )
        runner.fit(trained, source)
        logged = runner.callback_metrics
        assert logged["hooks/on_train_batch_end/reward"].isfinite()
        # Of the three held-out rows two are in the first batch.
        assert logged["hooks/on_validation_batch_end/first"] == pytest.approx(2 / 3)
        [figures] = runner.validate(trained, source, verbose=False)
        mean = figures["hooks/on_validation_batch_end/reward"]
        assert mean != 0
        if name == "rlt":
            assert mean == pytest.approx(figures["reward/val_mean"], rel=1e-5)
            runner.predict(trained, source, return_predictions=False)
        called |= hooks.called
    hooks = EveryHook()
    evaluation = EvaluationDataModule({"chains": None}, max_rows=3, batch_size=2)
    asked = ResponseCallback(sampling=sampling)
    runner = Trainer(tmp_path / "test", callbacks=[hooks, asked], **options)
    [figures] = runner.test(EvaluationModule("miniature"), evaluation, verbose=False)
    assert figures["hooks/on_test_batch_end/first"] == pytest.approx(2 / 3)
    missing = {name for name in dir(Callback) if name.startswith("on_")} - called - hooks.called
    # There is no sanity check by default, and Lightning knows of no zero_grad that a module calls.
    unused = {"on_sanity_check_start", "on_sanity_check_end", "on_before_zero_grad"}
    assert missing == unused | {"on_exception", "on_load_checkpoint"}
    assert not [warning for warning in recwarn if "batch_size" in str(warning.message)]


def test_two_ranks_weigh_what_callbacks_log(tmp_path: Path) -> None:
    options = ["--data.num_embedded_rows=12", "--data.val_rows=6", "--data.val_batch_size=4"]
    options += ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.devices=2"]
    options += ["--data.prompts_per_step=2", "--trainer.callbacks+=hooks.EveryHook"]
    options += ["--rollouts.sampling.max_completion_length=8", "--model.group_size=2"]
    run = run_rlt("fit", "--config=laptop/rlt", *options, f"--output_dir={tmp_path / 'run'}")
    assert "batch_size" not in run.stderr
    [*_, last] = metrics(tmp_path / "run").values()
    assert last["hooks/on_validation_batch_end/first"] == pytest.approx(2 / 3)


NEEDED = {  # arguments that have no default
    "EarlyStopping": {"monitor": "step"},
    "GradientAccumulationScheduler": {"scheduling": {"0": 1}},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "OnExceptionCheckpoint": {"dirpath": "x"},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ThroughputMonitor": {"batch_size_fn": "builtins.len"},
}


def test_every_callback_of_lightning_is_saved() -> None:
    kinds = [kind for kind in vars(lightning.pytorch.callbacks).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, Callback) and not isabstract(kind)}
    assert {"Timer", "ModelCheckpoint", "EarlyStopping"} <= names
    callbacks = [
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": NEEDED.get(name, {})}
        for name in sorted(names)
    ]
    parser = parser_of("fit")
    words = [f"--trainer.callbacks+={json.dumps(callback)}" for callback in callbacks]
    saved = parser.dump(parser.parse_args(["fit", "--config=laptop/sft", *words]), skip_validation=True)
    [*_, settings] = yaml.safe_load(saved).values()
    found = [callback["class_path"].split(".")[-1] for callback in settings["trainer"]["callbacks"]]
    assert found == sorted(names)
    assert parser.parse_string(saved)


# Optimizers


def test_a_named_optimizer_trains_and_resumes_exactly(tmp_path: Path) -> None:
    options = ["--config=laptop/sft", "--config=add/lora", "--optimizer=Muon", "--optimizer.lr=1e-3"]
    options += ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=4", "--data.num_embedded_rows=16"]
    options += ["--data.prompts_per_step=2", "--checkpoint.every_n_train_steps=1"]
    for folder, steps in (("whole", 3), ("part", 2), ("part", 3)):
        run_rlt(
            *("fit", *options, f"--trainer.max_steps={steps}", "--resume=true"),
            f"--output_dir={tmp_path / folder}",
        )
    rates = [row["policy/lr"] for row in metrics(tmp_path / "part").values()]
    assert rates == pytest.approx([1e-3 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(3)])
    assert equal(exported(tmp_path / "part"), exported(tmp_path / "whole"))
    state = tmp_path / "part" / "checkpoints" / "step=000003.ckpt"
    assert (state / "momentum_buffer").is_dir()  # Muon's
    other = ["--optimizer=SGD", "--optimizer.lr=1e-3", "--trainer.max_steps=4", "--resume=true"]
    refused = rlt("fit", *options[:2], *options[6:], *other, f"--output_dir={tmp_path / 'part'}")
    assert refused.returncode == 2
    assert "must have the same optimizer" in refused.stderr
    # Weights that are no matrices.
    refused = rlt("fit", options[0], *options[2:4], *options[6:], f"--output_dir={tmp_path / 'vectors'}")
    assert_one_clear_line(refused, "optimizer: Muon")
