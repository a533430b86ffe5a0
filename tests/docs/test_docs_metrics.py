"""docs/metrics.md names every metric and column that runs log, and no others."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from metric_names import names_of

from rlt_lightning.callbacks import (
    DistillationWriter,
    DynamicSampling,
    EvaluateEvery,
    EvaluationWriter,
    MetricsCSV,
    ResponseCallback,
    RolloutCallback,
    RolloutRecorder,
)
from rlt_lightning.datamodules import (
    EvaluationDataModule,
    ScoringData,
    StratosDataModule,
    StudentLikelihoodData,
    StudentOPDData,
    StudentRLData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.engines import Sampling
from rlt_lightning.modules import EvaluationModule, OPDModule, RLTModule, SFTModule
from rlt_lightning.numerics import TruncatedImportanceSampling
from rlt_lightning.rewards import CorrectnessReward, LogProbReward, NOVERReward, RLTReward


def data(model: str, kind: type[StratosDataModule] = TeacherRLData, **options: object) -> StratosDataModule:
    size = {"num_embedded_rows": 6, "prompts_per_step": 2}
    return kind(tokenizer=model, **(size | options))  # type: ignore[arg-type]


def trainer(folder: Path, *callbacks: Callback) -> Trainer:
    folder.mkdir()
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=1,
        max_epochs=-1,
        val_check_interval=1,
        log_every_n_steps=1,
        logger=MetricsCSV(str(folder)),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


def logged(folder: Path) -> set[str]:
    with open(folder / "metrics.csv", newline="") as file:
        return set(next(csv.reader(file)))


def first_row(path: Path) -> dict[str, object]:
    return json.loads(path.read_text().splitlines()[0])


def test_the_page_names_every_metric_and_no_other(tiny_model: str, tmp_path: Path) -> None:
    rlt, sft, opd, answers, other = (tmp_path / name for name in ("rlt", "sft", "opd", "answers", "other"))
    thinking_runs = [tmp_path / "log_prob", tmp_path / "nover"]
    rollouts = RolloutCallback(sampling=Sampling(max_completion_length=6))
    reward = RLTReward(baseline="empty")
    masks = TruncatedImportanceSampling(mode="mask")
    teacher = RLTModule(tiny_model, tiny_model, group_size=2, reward=reward, importance_sampling=masks)
    trainer(rlt, rollouts, RolloutRecorder()).fit(teacher, datamodule=data(tiny_model, val_rows=1))
    of_other = RLTModule(teacher=tiny_model, student="miniature", group_size=2)
    short = {"teacher_system_prompt": "", "student_system_prompt": "", "prompts_per_step": 2}
    trainer(other, rollouts).fit(of_other, TeacherRLData("chains", num_embedded_rows=6, **short))  # type: ignore[arg-type]
    distilled = StudentOPDData("chains", num_embedded_rows=6, val_rows=1, **short)  # type: ignore[arg-type]
    trainer(opd, rollouts, RolloutRecorder()).fit(OPDModule("miniature"), distilled)
    thinking = StudentLikelihoodData(
        "chains",
        num_embedded_rows=6,
        val_rows=1,
        **short,  # type: ignore[arg-type]
    )
    pairs = RolloutCallback(sampling=rollouts.sampling, val_completions=2)
    for run, reward in zip(thinking_runs, (LogProbReward(), NOVERReward()), strict=True):
        likelihood = RLTModule("miniature", "policy", reward=reward, group_size=2)
        trainer(run, pairs, RolloutRecorder()).fit(likelihood, thinking)
    student = RLTModule(tiny_model, student=None, group_size=2, reward=CorrectnessReward())
    own_answers = data(tiny_model, kind=StudentRLData, val_rows=1)
    questions = EvaluateEvery(1, {"arithmetic": None}, rollouts.sampling, max_rows=2)
    sampler = RolloutCallback(sampling=rollouts.sampling, dynamic_sampling=DynamicSampling())
    trainer(answers, questions, sampler, RolloutRecorder()).fit(student, own_answers)
    trainer(sft).fit(SFTModule(tiny_model), datamodule=data(tiny_model, kind=TeacherSFTData, val_rows=1))

    sections = (
        "Columns",
        "reward/",
        "student/",
        "policy/",
        "distill/",
        "rollout/",
        "perf/",
        "data/",
        "eval/",
    )
    found = logged(rlt) | logged(other) | logged(answers) | logged(sft) | logged(opd)
    found |= set().union(*map(logged, thinking_runs))
    named = names_of(*sections)
    found = {name.replace("eval/arithmetic", "eval/SET") for name in found}
    assert found - named == set(), "logged, but not in docs/metrics.md"
    assert named - found == set(), "in docs/metrics.md, but not logged"
    for prefix in sections[1:]:
        assert all(name.startswith(prefix) for name in names_of(prefix)), prefix
    recorded = [run / "rollouts.jsonl" for run in (rlt, answers, opd, *thinking_runs)]
    rows = [json.loads(line) for path in recorded for line in path.open()]
    written = {name for row in rows for name in row}
    assert written == names_of("rollouts.jsonl")


def test_the_page_names_every_column_of_the_scores(tiny_model: str, tmp_path: Path) -> None:
    teacher = RLTModule(teacher=tiny_model, student=tiny_model)
    scoring = data(tiny_model, kind=ScoringData, num_embedded_rows=2)
    trainer(tmp_path / "run", DistillationWriter(per_token=True)).predict(
        teacher, scoring, return_predictions=False
    )

    row = first_row(tmp_path / "run" / "scores.jsonl")
    source = {"question", "solution", "reasoning_trace", "answer"}
    scored = "reward|solution_|kl_|format_|thought_"
    terms = {name for name in names_of("rollouts.jsonl") if re.match(scored, name)}
    assert len(terms) == 12
    assert row.keys() == source | terms


def test_the_page_names_every_figure_of_an_evaluation(tiny_model: str, tmp_path: Path) -> None:
    sampler = ResponseCallback(sampling=Sampling(max_completion_length=4))
    questions = EvaluationDataModule({"arithmetic": None, "math500": "arithmetic"}, tiny_model, max_rows=1)
    run = tmp_path / "run"
    trainer(run, sampler, EvaluationWriter()).test(EvaluationModule(tiny_model), questions, verbose=False)

    found = {name.replace("arithmetic", "SET") for name in logged(run) if "math500" not in name}
    overall = {name for name in found if name.startswith("eval/overall/")}
    assert found - overall - {"step"} == names_of("eval/")
    assert overall == {
        f"eval/overall/{name}" for name in ("pass_at_1", "standard_error", "pass_at_k", "maj_at_k")
    }
    assert first_row(run / "responses.jsonl").keys() == names_of("responses.jsonl")
