"""On-policy distillation as runs: strategies, engines, layouts, evaluation, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from commands import run_rlt
from compared import largest_difference, weights
from distillation import HINT, Witness, data, fit, module, teacher  # noqa: F401
from fake_worker import worker_of
from fits import metrics
from miniatures import PIECES
from ranks import run
from rows_of import read
from torch import Tensor
from trainers import bare_trainer
from transformers import AutoModelForCausalLM

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules.views import View
from rlt_lightning.engines import IPCPush, Sampling, VLLMEngine
from rlt_lightning.modules import OPDModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics import TruncatedImportanceSampling
from rlt_lightning.types import InputError, Rollout

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FIGURES = ("distill/divergence", "policy/loss", "policy/grad_norm", "distill/judged_frac")
TEMPERATURE = 0.7


# Several processes


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        full("ddp", "named"),
        full("fsdp2", "own"),
        full("zero3", "live"),
        full("fsdp2", "averaged"),
        full("zero3", "sampled"),
        full("fsdp2", "lora"),
    ],
)
def test_two_processes_divide_uneven_answers_and_train_as_one(
    strategy: str, setting: str, tiny_model: str, tmp_path: Path
) -> None:
    opd: dict[str, Any] = {
        "named": {"teacher": tiny_model},
        "own": {},
        "live": {"teacher_weights": "live"},
        "averaged": {"teacher_weights": "averaged"},
        "sampled": {"teacher": tiny_model, "estimator": "sampled"},
        "lora": {},
    }[setting]
    options = {"tokens": 500, "uneven": True, "steps": 3, "opd": opd, "lora": setting == "lora"}
    for name in ("single", strategy):
        run(tiny_model, tmp_path / name, name, **options)
    assert largest_difference(weights(tmp_path / strategy), weights(tmp_path / "single")) < 1e-5
    steps = [json.loads((tmp_path / name).with_suffix(".json").read_text()) for name in (strategy, "single")]
    assert len(steps[0]) == 3
    for ours, whole in zip(*steps, strict=True):
        assert whole["distill/divergence"] != 0
        for name in FIGURES:
            assert ours[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    counts = [json.loads((tmp_path / strategy).with_suffix(f".rank{r}.json").read_text()) for r in (0, 1)]
    assert all(min(pair) >= 1 for pair in zip(*counts, strict=True))


# One process


@pytest.mark.parametrize("estimator", ["full", full("sampled")])
def test_a_step_in_which_nothing_can_be_judged_moves_nothing(
    estimator: Any, tiny_model: str, tmp_path: Path
) -> None:
    witness = Witness()  # random weights write no tags
    fit(tmp_path, module(tiny_model, estimator=estimator, group_size=2, micro_batch_tokens=200), witness)
    [metrics] = witness.metrics
    assert float(metrics["distill/unjudged_frac"]) == 1
    assert float(metrics["policy/loss"]) == float(metrics["policy/grad_norm"]) == 0
    [batch] = witness.batches
    assert not batch.step.rewards.any()


def log_probs(model: Any, prompt: list[int], rest: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([prompt + rest])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(rest)[:, None]).squeeze(1)


def slow_span_loss(student: Any, judge: Any, row: Rollout) -> Tensor:
    """Of each judged token -A log p_S, (T,), with A the log-ratio of the token's span."""
    view = row.require_view()
    assert view.spans is not None
    start, end = view.start, view.start + view.num_tokens
    own = log_probs(student, row.problem.teacher_prompt, row.completion.token_ids[:end])[start:]
    with torch.no_grad():
        theirs = log_probs(judge, row.problem.teacher_view, view.token_ids)
    terms, i, j = [], 0, 0
    for num_teacher, num_student in view.spans:
        a = theirs[i : i + num_teacher].sum() - own[j : j + num_student].sum().detach()
        terms += [-a * value for value in own[j : j + num_student]]
        i, j = i + num_teacher, j + num_student
    return torch.stack(terms)


@pytest.mark.parametrize("view", ["explanation", HINT], ids=["explanation", "hint"])
def test_another_tokenizer_by_spans_equals_plain_forwards(view: View, miniature: str, tmp_path: Path) -> None:
    witness = Witness()
    opd = module(miniature, teacher=PIECES, estimator="sampled", micro_batch_tokens=300)
    fit(tmp_path, opd, witness, view=view)
    student = AutoModelForCausalLM.from_pretrained(miniature, dtype=torch.float64)
    judge = AutoModelForCausalLM.from_pretrained(PIECES, dtype=torch.float64)
    [batch] = witness.batches
    assert batch.rollouts is not None
    judged = [row for row in batch.rollouts.rollouts if row.view]
    assert any(max(span) > 1 for row in judged for span in row.require_view().spans or [])
    torch.cat([slow_span_loss(student, judge, row) for row in judged]).mean().backward()
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        difference = (witness.gradients[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 1e-4, (name, difference)  # log-ratios of some nats, in fp32


@pytest.mark.parametrize(
    ("estimator", "asynchronous", "weighted"),
    [
        ("full", False, False),
        full("full", True, False),
        full("sampled", False, True),
        ("sampled", True, False),
    ],
)
def test_an_engine_outside_the_process(
    estimator: Any, asynchronous: bool, weighted: bool, tiny_model: str, tmp_path: Path
) -> None:
    witness = Witness()
    opd = OPDModule(
        tiny_model,
        estimator=estimator,
        max_staleness=int(asynchronous),
        optimizer=OptimizerConfig(lr=1e-3),
        mismatch_limit=None,  # the worker makes its log-probs up
    )
    with worker_of(tiny_model) as worker:
        engine = VLLMEngine([worker.url], push=IPCPush(timeout_s=2.0), call_timeout_s=2.0)
        rollouts = RolloutCallback(engine, Sampling(max_completion_length=8), asynchronous=asynchronous)
        bare_trainer(tmp_path, witness, rollouts, steps=3).fit(opd, datamodule=data(tmp_path, HINT))
    assert [float(step["rollout/staleness"]) for step in witness.metrics] == [0, asynchronous, asynchronous]
    assert (opd.importance_weights is not None) == weighted
    assert all(float(step["policy/grad_norm"]) > 0 for step in witness.metrics)
    assert ("rollout/mismatch_mean" in witness.metrics[0]) == (estimator == "sampled")


# Refusals


def test_weights_of_tokens_need_the_sampled_form() -> None:
    with pytest.raises(InputError, match="weighs sampled tokens"):
        OPDModule(importance_sampling=TruncatedImportanceSampling())


# The command line


def test_a_run_validates_evaluates_exports_and_is_tested_as_it_was_trained(tmp_path: Path) -> None:
    small = ["--data.num_embedded_rows=24", "--data.prompts_per_step=4", "--data.val_rows=3"]
    asked = {"sets": {"chains": None}, "max_rows": 6, "every_n_steps": 2, "seed": 3}
    asked["sampling"] = {"temperature": 0.7, "max_completion_length": 72}
    evaluate = {"class_path": "rlt_lightning.callbacks.EvaluateEvery", "init_args": asked}
    command = ["fit", "--config=laptop/opd", *small, "--trainer.max_steps=2", f"--output_dir={tmp_path}"]
    command += ["--trainer.val_check_interval=1", f"--trainer.callbacks+={json.dumps(evaluate)}"]
    result = run_rlt(*command)
    assert "rlt test --config " in result.stdout + result.stderr  # what to do next
    rows = [row for row in metrics(tmp_path).values() if "policy/loss" in row]  # not the first evaluation
    assert len(rows) == 2
    assert all(row["distill/val_divergence"] > 0 for row in rows)
    recorded = read(tmp_path / "rollouts.jsonl")
    assert len(recorded) == 8
    for row in recorded:
        assert row["reward"] <= 0 < row["judged_tokens"] <= row["num_tokens"]
    # The model's own record decides how it is asked.
    test = ["test", "--config=recipe_7b/evaluate", f"--model.pretrained={tmp_path / 'model'}"]
    test += ["--data.sets={chains: null}", "--data.max_rows=6", "--seed=3", "--trainer.accelerator=cpu"]
    test += ["--rollouts.sampling.temperature=0.7", "--rollouts.sampling.max_completion_length=72"]
    run_rlt(*test, f"--output_dir={tmp_path / 'test'}")
    found = json.loads((tmp_path / "test" / "evaluation.json").read_text())
    assert found["sets"]["chains"]["pass_at_1"] == pytest.approx(rows[-1]["eval/chains/pass_at_1"])
