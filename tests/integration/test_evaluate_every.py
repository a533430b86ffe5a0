"""EvaluateEvery reports what `rlt test` does, changes no training, resumes, and picks the best checkpoint."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import run_rlt
from fake_worker import worker_of
from fits import read_metrics
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from trainers import bare_trainer

from rlt_lightning.callbacks import (
    Checkpoint,
    EvaluateEvery,
    MetricsCSV,
    ModelExporter,
    ResponseCallback,
    RolloutCallback,
)
from rlt_lightning.callbacks.evaluate_every import require_student
from rlt_lightning.datamodules import (
    EvaluationDataModule,
    ScoringData,
    StratosDataModule,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.engines import IPCPush, Sampling, VLLMEngine
from rlt_lightning.modules import EvaluationModule, RLTModule, SFTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.types import InputError

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
CHAINS = {"tags": "r1", "student_system_prompt": ""}
SAMPLING = Sampling(temperature=0.7, max_completion_length=72)
ASKED: dict[str, Any] = {"sets": {"chains": None}, "max_rows": 13, "num_samples": 2, "seed": 5}
STEPS = 6


class Losses(Callback):
    """Keeps the loss and the gradient norm of every step."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        metrics = module.step_metrics
        self.losses.append((float(metrics["policy/loss"]), float(metrics["policy/grad_norm"])))


def evaluations(every: int = 2, **options: Any) -> EvaluateEvery:
    return EvaluateEvery(every, sampling=SAMPLING, **{**ASKED, **options})


def trainer_of(folder: Path, *callbacks: Callback, steps: int = STEPS, **options: Any) -> Trainer:
    """A trainer with the callbacks in the command line's order."""
    folder.mkdir(exist_ok=True)
    missing = [] if any(isinstance(part, RolloutCallback) for part in callbacks) else [RolloutCallback()]
    options = {"logger": MetricsCSV(str(folder)), "log_every_n_steps": 1} | options
    return bare_trainer(folder, *callbacks, *missing, steps=steps, **options)


def data_of(model: str, **options: Any) -> StratosDataModule:
    settings = {"source": "chains:right", "kind": StudentSFTData, "num_embedded_rows": 40, "seed": 2}
    settings |= {"prompts_per_step": 8}
    options = {**settings, **CHAINS, **options}
    return options.pop("kind")(tokenizer=model, **options)


def fit(model: str, folder: Path, *callbacks: Callback, resume: Path | None = None, **options: Any) -> Losses:
    """Fine-tune the miniature on right chains."""
    losses = Losses()
    trainer = trainer_of(folder, *callbacks, losses, **options)
    module = SFTModule(model, OptimizerConfig(lr=1e-3), gradient_checkpointing=True)
    trainer.fit(module, datamodule=data_of(model), ckpt_path=None if resume is None else str(resume))
    return losses


def rows_of(folder: Path, prefix: str = "eval/") -> dict[int, dict[str, float]]:
    """The figures in metrics.csv by step, of the steps that have any."""
    steps = read_metrics(folder).items()
    found = {step: {n: v for n, v in row.items() if n.startswith(prefix)} for step, row in steps}
    return {step: row for step, row in found.items() if row}


def figures_of_test(model: str | Path, folder: Path, **options: Any) -> dict[str, float]:
    """What an evaluation of a model folder logs, with the same seeds."""
    asked = {**ASKED, **CHAINS, **options}
    sampler = ResponseCallback(sampling=SAMPLING, num_samples=asked["num_samples"], seed=asked["seed"])
    module, data = EvaluationModule(str(model)), EvaluationDataModule(tokenizer=str(model), **asked)
    trainer_of(folder, sampler).test(module, data, verbose=False)
    return {f"eval/{name}/{f}": v for name, own in module.figures.items() for f, v in own.items()}


def best_checkpoint(mode: str = "max", every: int = 2) -> ModelCheckpoint:
    """Lightning's callback, which keeps the checkpoint of the best accuracy."""
    metric, name = "eval/chains/pass_at_1", "best-{step}"
    return ModelCheckpoint(monitor=metric, mode=mode, filename=name, every_n_train_steps=every)


def find_best(folder: Path) -> tuple[Path, int]:
    """The checkpoint that it has left, and its step."""
    [path] = (folder / "checkpoints").glob("best-step=*.ckpt")
    return path, int(path.stem.rpartition("=")[2])


@pytest.fixture(scope="module")
def finished(miniature: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Losses]:
    """A fine-tuned miniature with all checkpoints, evaluated at steps 0, 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    return folder, fit(miniature, folder, evaluations(), Checkpoint(1, save_top_k=-1), best_checkpoint())


def test_its_prompts_are_those_of_the_exported_model(miniature: str, tmp_path: Path) -> None:
    answer = "<|begin_of_thought|>\n\nAdd.\n\n<|end_of_thought|>\n\n"
    answer += "<|begin_of_solution|>\n\n2\n\n<|end_of_solution|>"
    rows = [
        {
            "system": prompt,
            "conversations": [{"from": "user", "value": f"{n} + 1?"}, {"from": "assistant", "value": answer}],
        }
        for n, prompt in enumerate(["Be brief.", "Be brief.", "Be kind.", "Be brief."])
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    callback = evaluations(9, max_rows=2, at_start=False)
    data = StudentSFTData(str(tmp_path / "rows.jsonl"), tokenizer=miniature, prompts_per_step=2)
    trainer_of(tmp_path / "run", callback, ModelExporter(), steps=1).fit(
        SFTModule(miniature), datamodule=data
    )
    model = str(tmp_path / "run" / "model")
    tested = EvaluationDataModule(ASKED["sets"], model, max_rows=2, seed=ASKED["seed"])
    tested.setup("test")
    assert [p.prompt for p in callback.questions.problems] == [p.prompt for p in tested.problems]
    asked = tested.chat_format.tokenizer.decode(tested.problems[0].prompt)
    assert "Be brief." in asked  # the commonest of the rows, and not ours


def test_training_is_the_same_without_it(
    finished: tuple[Path, Losses], miniature: str, tmp_path: Path
) -> None:
    folder, losses = finished
    assert fit(miniature, tmp_path, Checkpoint()).losses == losses.losses
    ours, without = (
        load_file(run / "checkpoints" / f"step={STEPS:06d}.ckpt" / "weights" / "model.safetensors")
        for run in (folder, tmp_path)
    )
    assert all(torch.equal(ours[name], without[name]) for name in without)
    assert "perf/generate_s" not in (folder / "metrics.csv").read_text()  # its phases are no step's
    assert list(rows_of(folder, "perf/evaluate_s")) == [0, 2, 4, 6]


def test_a_resumed_run_repeats_its_evaluations(
    finished: tuple[Path, Losses], miniature: str, tmp_path: Path
) -> None:
    folder, _ = finished
    run, found = tmp_path / "run", rows_of(folder)
    shutil.copytree(folder, run)
    for step in (5, 6):
        shutil.rmtree(run / "checkpoints" / f"step={step:06d}.ckpt")
    # As a kill leaves it that comes right after the checkpoint of step 4.
    with open(run / "metrics.csv", newline="") as file:
        whole = {row["step"]: row for row in csv.DictReader(file)}
    with open(run / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(whole["0"]), restval="")
        writer.writeheader()
        writer.writerows(whole[step] for step in "01234")
    for last, step in ((5, 4), (6, 5)):
        start = run / "checkpoints" / f"step={step:06d}.ckpt"
        callbacks = [evaluations(), Checkpoint(1, save_top_k=-1), best_checkpoint()]
        fit(miniature, run, *callbacks, resume=start, steps=last)
    assert rows_of(run) == found
    assert rows_of(run, "policy/") == rows_of(folder, "policy/")


def test_the_best_checkpoint_is_the_one_of_the_best_accuracy(
    finished: tuple[Path, Losses], miniature: str, tmp_path: Path
) -> None:
    scores = {step: row["eval/chains/pass_at_1"] for step, row in rows_of(finished[0]).items() if step}
    assert find_best(finished[0])[1] == max(scores, key=lambda step: scores[step])
    # By the smallest, so that the best is not the newest.
    smallest = min(scores, key=lambda step: scores[step])
    assert smallest < STEPS
    fit(miniature, tmp_path, evaluations(), Checkpoint(), best_checkpoint("min"), log_every_n_steps=100)
    assert list(rows_of(tmp_path)) == [0, 2, 4, 6]  # however rarely Lightning logs
    assert find_best(tmp_path)[1] == smallest


# Traditional RL, and engines


class Trained(Callback):
    """Keeps the tokens that every step was trained on."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        tokens = [rollout.completion.token_ids for rollout in batch.rollouts.rollouts]
        self.steps.append((tokens, float(module.step_metrics["policy/loss"])))


def reinforce(
    model: str,
    folder: Path,
    rollouts: RolloutCallback,
    *callbacks: Callback,
    steps: int = 2,
    source: str = "chains",
) -> Trained:
    trained = Trained()
    data = data_of(model, kind=StudentRLData, source=source, num_embedded_rows=8, prompts_per_step=2)
    reward = CorrectnessReward()
    # An old sampler's tokens may be one step old.
    module = RLTModule(model, None, 2, reward, optimizer=OptimizerConfig(lr=1e-3), max_staleness=1)
    trainer_of(folder, *callbacks, rollouts, trained, steps=steps).fit(module, datamodule=data)
    return trained


def workers_engine(url: str) -> VLLMEngine:
    return VLLMEngine([url], push=IPCPush(timeout_s=2.0))


@pytest.mark.full
def test_an_evaluation_waits_for_rollouts_in_flight(tiny_model: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    short = Sampling(max_completion_length=8)
    for name in ("with", "without"):
        with worker_of(tiny_model) as worker:
            rollouts = RolloutCallback(workers_engine(worker.url), short, asynchronous=True)
            callbacks = [evaluations(max_rows=3)] if name == "with" else []
            options: dict[str, Any] = {"steps": 4, "source": "chains"}
            seen[name] = reinforce(tiny_model, tmp_path / name, rollouts, *callbacks, **options)
            asked = [body for body in worker.bodies if body["max_tokens"] == SAMPLING.max_completion_length]
            # 3 problems, 3 times, two completions that are requests of their own.
            assert len(asked) == (18 if callbacks else 0)
    assert [tokens for tokens, _ in seen["with"].steps] == [tokens for tokens, _ in seen["without"].steps]
    assert list(rows_of(tmp_path / "with")) == [0, 2, 4]


def test_fine_tuning_pushes_its_weights_to_a_worker(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Mock(side_effect=VLLMEngine.start)
    with worker_of(tiny_model) as worker:
        engine = workers_engine(worker.url)
        monkeypatch.setattr(VLLMEngine, "start", lambda *arguments: starts(*arguments))
        rollouts = RolloutCallback(engine)
        fit(tiny_model, tmp_path / "run", evaluations(max_rows=3), rollouts, Checkpoint(), steps=4)
        assert starts.call_count == 1
        # 3 problems, 3 times, each completion a request of its own.
        assert len(worker.bodies) == 18
        assert worker.tensors
    trained = load_file(
        tmp_path / "run" / "checkpoints" / "step=000004.ckpt" / "weights" / "model.safetensors"
    )
    for name, tensor in worker.tensors.items():
        assert torch.equal(tensor, trained[name]), name
    assert rows_of(tmp_path / "run")[4]["eval/chains/truncated_frac"] == 1


# Several ranks, and the command line


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_ranks_share_the_problems_and_agree(strategy: str, miniature: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["fit", "--config=laptop/sft", "--config=add/evaluate_every", f"--config=hardware/{strategy}"]
    command += [f"--model.pretrained={miniature}", "--data.num_embedded_rows=32", "--trainer.max_steps=2"]
    command += ["--trainer.callbacks.init_args.every_n_steps=2", "--trainer.devices=2"]
    command += ["--trainer.callbacks.init_args.max_rows=5", "--checkpoint.every_n_train_steps=2"]
    result = run_rlt(*command, f"--output_dir={run}")
    assert "accuracy after iteration 2: chains" in result.stderr
    [line] = re.findall(r"accuracy after iteration 0: (.*) \(", result.stderr)  # of one rank
    assert line.startswith("chains")
    found = rows_of(run)
    assert list(found) == [0, 2]
    asked = {"max_rows": 5, "num_samples": 1, "seed": 0}
    assert figures_of_test(run / "model", tmp_path / "test", **asked) == found[2]


# Mistakes


@pytest.mark.parametrize("kind", [TeacherRLData, TeacherSFTData, ScoringData])
def test_no_teacher_is_evaluated(kind: type[StratosDataModule]) -> None:
    with pytest.raises(InputError, match=f"asks a student, but {kind.__name__} is for a teacher"):
        require_student(kind())
