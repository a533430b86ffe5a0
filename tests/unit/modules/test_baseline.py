"""`reward.baseline: empty`: r_SS as the gain over saying nothing, with the gradient of r_SS itself."""

from __future__ import annotations

import json
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from compared import largest_difference, weights
from grpo import TEMPERATURE, Witness, module, rollout_callback, slow_log_probs
from ranks import run
from trainers import bare_trainer

from rlt_lightning.datamodules import StratosDataModule, TeacherRLData
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.rewards import RLTReward, explanations
from rlt_lightning.rewards.explanations import build_empty_view
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import REWARD, Level, Record
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.types import ModelView, Problem, Rollouts

EMPTY = RLTReward(baseline="empty")


def chains(folder: Path, student: str) -> StratosDataModule:
    prompts = {"teacher_system_prompt": "", "student_system_prompt": ""}
    size = {"num_embedded_rows": 8, "prompts_per_step": 2}
    options: Any = {"tokenizer": "miniature", "student_tokenizer": student, "output_dir": str(folder)}
    return TeacherRLData(source="chains", **prompts, **size, **options)


def slow_baseline(student: Any, empty: ModelView, reward: RLTReward = EMPTY) -> float:
    """r_SS of an empty explanation, written out."""
    problem = empty.problem
    context = problem.student_prefix + problem.think_prefix + empty.token_ids + problem.student_suffix
    with torch.no_grad():
        log_probs = slow_log_probs(student, context, problem.solution_ids, 0.7)
    return float(log_probs.mean() + reward.min_coef * log_probs.min())


def test_r_ss_of_the_empty_explanation_is_subtracted_as_it_would_enter() -> None:
    # Explanation: p = 1/2 and 1/8, so r_SS = -2 ln 2 - 0.01 * 3 ln 2 = -2.03 ln 2.
    # Empty: p = 1/4 and 1/64, so r_SS = -4 ln 2 - 0.01 * 6 ln 2 = -4.06 ln 2. The gain is 2.03 ln 2.
    after, before = torch.tensor([[1 / 2, 1 / 8, 1 / 9]]).log(), torch.tensor([[1 / 4, 1 / 64, 1 / 9]]).log()
    mask, no_kl = torch.tensor([[True, True, False]]), torch.zeros(1, 0)
    columns = after, mask, no_kl, no_kl.bool(), torch.tensor([True]), None, before
    terms = RLTReward(solution_weight=5, baseline="empty")(*columns)
    torch.testing.assert_close(terms[Level("baseline")], torch.tensor([-4.06 * log(2)]))
    torch.testing.assert_close(terms[REWARD], torch.tensor([5 * 2.03 * log(2)]))
    # The level stays visible: -2.03 ln 2.
    level = terms[Record("solution_log_prob_mean")] + 0.01 * terms[Record("solution_log_prob_min")]
    torch.testing.assert_close(level, torch.tensor([-2.03 * log(2)]))
    # Clipped at -5 ln 2 the empty one's tokens are p = 1/4 and 1/32: as probabilities 9/64 + 0.01/32.
    processed = RLTReward(normalise_log_probs="exp", clip_log_probs=-5 * log(2), baseline="empty")(*columns)
    torch.testing.assert_close(processed[Level("baseline")], torch.tensor([9 / 64 + 0.01 / 32]))
    torch.testing.assert_close(processed[REWARD], torch.tensor([5 / 16 + 0.01 / 8 - 9 / 64 - 0.01 / 32]))
    assert set(terms) - set(RLTReward()(*columns)) == {Level("baseline")}


@pytest.mark.parametrize("student", [full("miniature"), "other"])
def test_a_step_reads_each_problems_empty_explanation_once(
    student: str, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(problem: Problem, chat_format: Any, text: str = "") -> ModelView:
        read.append(problem.row)
        return build_empty_view(problem, chat_format, text)

    monkeypatch.setattr(explanations, "build_empty_view", counted)
    student = tiny_model if student == "other" else student  # of another tokenizer: it reads text
    witness, rlt = Witness(), module("miniature", reward=EMPTY)
    rlt.student = Student.of(student)
    data = chains(tmp_path, student)
    bare_trainer(tmp_path, rollout_callback(), witness).fit(rlt, data)
    step, rows = witness.one_step()
    assert read == [rows[0].problem.row, rows[4].problem.row]
    levels = step.table[Level("baseline")]
    [model] = [entry.model for entry in rlt.models.values()]
    slow = [slow_baseline(model, build_empty_view(row.problem, data.format)) for row in rows]
    assert levels.tolist() == pytest.approx(slow, abs=1e-5)

    # In chunks: the second and third bring nothing of a problem that the first did not have.
    step, packed = StepBatch.of_rollouts(Rollouts(rows, 4, 0, TEMPERATURE)), PhaseStats()
    declare, counts = partial(rlt.reward.scoring_passes, student=rlt.student), []
    for places in ([1, 6], [0, 4, 5], [2, 3, 7]):
        rlt.build_runner().run(step, places, declare, packed)
        counts.append(len(step.known))
    assert counts == [2, 2, 2]
    with torch.no_grad():
        chunks = rlt.reward.measure(step, range(len(rows)), rlt.student)
    torch.testing.assert_close(chunks[Level("baseline")], levels, atol=1e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", full("fsdp2"), full("zero3")])
def test_ranks_train_with_it_as_one_without(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    # Uneven completions travel between ranks, and each step is scored in two chunks, the second of one.
    options: dict[str, Any] = {"uneven": True, "tokens": 100, "steps": 2}
    run(tiny_model, tmp_path / "single", "single", **options)
    run(tiny_model, tmp_path / "ranks", strategy, early=True, baseline="empty", **options)
    assert largest_difference(weights(tmp_path / "ranks"), weights(tmp_path / "single")) < 1e-5
    steps = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("single", "ranks")]
    for plain, step in zip(*steps, strict=True):
        gain = plain["reward/solution"] - step["reward/baseline"]
        assert step["reward/solution"] == pytest.approx(gain, abs=1e-5)
        assert step["reward/group_std"] == pytest.approx(plain["reward/group_std"], rel=1e-5)
