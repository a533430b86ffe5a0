"""The reward equals that of the code released by the paper's authors, per token and in the sums.

tests/support/golden/rlt_reward.jsonl has its values: six cases, two settings, SmolLM2-135M-Instruct as
teacher and student, fp32 on CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GOLDEN_FOLDER, full
from commands import run_rlt

CASES = [json.loads(line) for line in (GOLDEN_FOLDER / "rlt_reward.jsonl").open()]
TEACHER_SYSTEM_PROMPT = CASES[0]["teacher_prompt"].split("system\n")[1].split("<|im_end|>")[0]
STUDENT_SYSTEM_PROMPT = CASES[0]["student_system_prompt"]
SETTINGS: dict[str, list[str]] = {
    "paper": [],
    "schulman_exp": [
        "--model.reward.solution_weight=5",
        "--model.reward.kl_weight=5",
        "--model.reward.kl_estimator=k3",
        "--model.reward.normalise_log_probs=exp",
        "--model.reward.normalise_kl=one_minus_exp",
        "--model.reward.teacher_temperature=1",
        "--model.reward.student_temperature=1",
    ],
}
COLUMNS = {  # ours -> the released code's
    "reward": "reward",
    "solution_log_prob_mean": "log_prob_mean",
    "solution_log_prob_min": "log_prob_min",
    "kl_mean": "kl_mean",
    "kl_max": "kl_max",
    "format_reward": "match_reward",
    "solution_reward": "solution_log_prob_reward",
    "kl_reward": "kl_reward",
}


def predict(folder: Path, rows: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    """Score rows with the command that users run."""
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["predict", "--config", "configs/recipe_7b/score.yaml"]
    command += [f"--data.source={source}", "--model.teacher=smollm2-135m", "--model.student=smollm2-135m"]
    command += [f"--output_dir={folder / 'run'}", f"--data.teacher_system_prompt={TEACHER_SYSTEM_PROMPT}"]
    command += [
        f"--data.student_system_prompt={STUDENT_SYSTEM_PROMPT}",
        "--distillation.per_token=true",
        *options,
    ]
    run_rlt(*command)
    return [json.loads(line) for line in (folder / "run" / "scores.jsonl").open()]


@pytest.mark.parametrize("setting", ["paper", full("schulman_exp")])
def test_rlt_predict_gives_the_released_codes_rewards(setting: str, smollm2: str, tmp_path: Path) -> None:
    columns = ("id", "question", "solution", "completion")
    rows = [{column: case[column] for column in columns} for case in CASES]
    scores = predict(tmp_path, rows, *SETTINGS[setting])
    assert [score["id"] for score in scores] == [case["id"] for case in CASES]  # input columns are kept
    for score, case in zip(scores, CASES, strict=True):
        for ours, theirs in COLUMNS.items():
            assert score[ours] == pytest.approx(case[setting][theirs], abs=1e-4), (case["id"], ours)
        for ours in {"solution_log_probs", "thought_kl"} & case[setting].keys():
            torch.testing.assert_close(
                torch.tensor(score[ours]), torch.tensor(case[setting][ours]), atol=1e-4, rtol=0
            )


@pytest.mark.full
def test_without_score_given_only_the_given_tokens_are_gone(smollm2: str, tmp_path: Path) -> None:
    columns = ("id", "question", "solution", "completion")
    rows = [{column: case[column] for column in columns} for case in CASES]
    for score, case in zip(predict(tmp_path, rows, "--model.reward.score_given=false"), CASES, strict=True):
        released = case["paper"]
        num_given = len(released["thought_kl"]) - len(score["thought_kl"])
        assert num_given == 2  # the two line breaks behind the opening tag
        kl = released["thought_kl"][num_given:]
        assert score["thought_kl"] == pytest.approx(kl, abs=1e-4)
        assert len(score["thought_tokens"]) == len(kl)
        r_kl = sum(kl) / len(kl) + 0.01 * max(kl)
        r_ss = released["solution_log_prob_reward"]
        assert score["reward"] == pytest.approx(r_ss - 3 * r_kl + released["match_reward"], abs=1e-3)
