"""On-policy distillation of miniatures: module, data, and a callback that records its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpo
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from trainers import bare_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import StratosDataModule, StudentOPDData
from rlt_lightning.datamodules.rows import ParsedRow
from rlt_lightning.datamodules.views import TeacherViews, View
from rlt_lightning.engines import Sampling
from rlt_lightning.modules import OPDModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.types import Completion, Rollout

TEMPERATURE = 0.7


EXPLANATION, HINT = "explanation", "hint"


@pytest.fixture(scope="module")
def teacher(miniature: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a teacher that differs from the miniature."""
    folder = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(miniature, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(miniature).save_pretrained(folder)
    return str(folder)


def data(folder: Path, view: View = EXPLANATION, **options: Any) -> StratosDataModule:
    prompts = {"teacher_system_prompt": "", "student_system_prompt": ""}
    settings = dict(source="chains", num_embedded_rows=8, prompts_per_step=4, tags="r1")
    settings |= prompts | {"view": view, "output_dir": str(folder)} | options
    return StudentOPDData(**settings)


def fit(folder: Path, opd: OPDModule, *callbacks: Callback, view: View = EXPLANATION, steps: int = 1) -> None:
    rollouts = RolloutCallback(sampling=Sampling(temperature=TEMPERATURE, max_completion_length=48))
    trainer = bare_trainer(folder, *callbacks, rollouts, steps=steps)
    trainer.fit(opd, datamodule=data(folder, view))


def module(miniature: str, **options: Any) -> OPDModule:
    return OPDModule(miniature, optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0), **options)


class Witness(grpo.Witness):
    """Keeps each step's metrics too."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.metrics.append(dict(pl_module.step_metrics))


def parsed(question: str, solution: str) -> ParsedRow:
    return ParsedRow(question, solution, {}, None, None)


def answered(made: TeacherViews, text: str, closed: bool = True) -> Rollout:
    texts = parsed("3 +4", "\n7\n")
    problem = made.build_problem(1, texts, None, {})
    ids = made.student.tokenizer.encode(text, add_special_tokens=False)
    ids = [*ids, made.student.tokenizer.eos_token_id] if closed else ids
    return made.build_rollout(problem, Completion(ids, None, "eos" if closed else "length"))
