"""What a fit has learned: the line at its end, what `Trainer.fit` returns, and its warnings."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from commands import rlt

from rlt_lightning import Trainer
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.judging.answers import ends_with_answer
from rlt_lightning.modules import SFTModule
from rlt_lightning.run.result import RIGHT, Change, FitResult, format_figure, read_fit_result, read_last_rows
from rlt_lightning.tasks.countdown import solve_row
from rlt_lightning.tasks.stepwise import chain_rows


def write_run(folder: Path, **curves: list[float]) -> Path:
    """A run folder with these metrics, named with __ for the slash."""
    names = {name.replace("__", "/"): values for name, values in curves.items()}
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *names])
        writer.writeheader()
        for i in range(max(map(len, names.values()))):
            writer.writerow({"step": i + 1, **{n: v[i] for n, v in names.items() if i < len(v)}})
    return folder


def write_rollouts(folder: Path, *iterations: list[dict[str, Any]]) -> None:
    rows = [
        {"step": step, "row": 1, "question": "1 + 2?", "solution": "\\boxed{3}", **row}
        for step, own in enumerate(iterations, 1)
        for row in own
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_first_and_last_are_means_with_errors(tmp_path: Path) -> None:
    # Of 8 steps each end is a quarter: (0 + 2) / 2 = 1 and (8 + 10) / 2 = 9; std sqrt(2), over sqrt(2) is 1.
    result = read_fit_result(write_run(tmp_path, reward__mean=[0, 2, 3, 4, 5, 6, 8, 10]))
    change = result.changes["reward/mean"]
    assert change == Change(1, 9, pytest.approx(1), pytest.approx(1), 2)
    assert change.error == pytest.approx(math.sqrt(2))
    assert change.has_risen
    assert result.line() == "reward 1.0 ± 1.0 → 9.0 ± 1.0"


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-0.35, 0.01, "-0.350 ± 0.010"),
        (-0.64213, 0.0447, "-0.642 ± 0.045"),
        (0.5, 0.0996, "0.50 ± 0.10"),
        (28.9, 0.48, "28.90 ± 0.48"),
        (1234.5, 67.8, "1234 ± 68"),
        (0.5, 0.0, "0.5"),
        (0.12345, math.nan, "0.123"),
    ],
)
def test_a_figure_has_the_decimals_of_its_error(value: float, error: float, text: str) -> None:
    assert format_figure(value, error) == text


def test_the_line_names_terms_accuracy_and_right_explanations(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        reward__mean=[-1.0, -0.5],
        reward__solution=[-0.7, -0.3],
        reward__kl=[-0.3, -0.2],
        reward__val_mean=[-0.9, -0.6],
        eval__chains__pass_at_1=[0.2, 0.9],
        eval__chains__standard_error=[0.01, 0.02],
    )
    texts = ("1 plus 2 is 3.", "one goes on.", "it is 4.", "3")
    first, last = (
        [{"explanation": texts[i], "reward": -i} for i in (0, 1)],
        [{"explanation": texts[i], "reward": -i} for i in (0, 3)],
    )
    write_rollouts(tmp_path, first, last)
    result = read_fit_result(tmp_path)
    assert result.line() == (
        "reward -1 → -0.5 (r_SS -0.7 → -0.3, r_KL -0.3 → -0.2), held-out reward -0.9 → -0.6, "
        "accuracy on chains 20.0 → 90.0 %, explanations that end with the answer 50.0 → 100.0 %"
    )
    assert math.isnan(result.changes[RIGHT].first_error)  # of a single problem
    assert result.held_out["eval/chains/pass_at_1"] == Change(0.2, 0.9, 0.01, 0.02)
    assert result.before is not None
    assert (result.before["explanation"], result.before["step"]) == ("1 plus 2 is 3.", 1)


def test_right_answers_have_the_window_of_the_reward_and_errors_over_problems(tmp_path: Path) -> None:
    write_run(tmp_path, reward__mean=[-1.0] * 8)  # windows of two iterations
    right, wrong = {"explanation": "it is 3.", "reward": 0.0}, {"explanation": "it is 4.", "reward": -1.0}
    # Problem 1 has 4 of 4 right ones, problem 2 has 1 of 2, problem 3 none of 2.
    first = [right | {"row": 1}] * 2 + [right | {"row": 2}, wrong | {"row": 2}]
    second = [right | {"row": 1}] * 2 + [wrong | {"row": 3}] * 2
    write_rollouts(tmp_path, first, second, *[[wrong]] * 4, [right] * 4, [right, wrong])
    change = read_fit_result(tmp_path).changes[RIGHT]
    # p = 5/8; residuals 4 - 20/8 = 3/2, 1 - 10/8 = -1/4, 0 - 10/8 = -5/4; their squares add up to 31/8.
    assert change.first == pytest.approx(5 / 8)
    assert change.first_error == pytest.approx(math.sqrt(3 / 2 * 31 / 8) / 8)
    assert (change.last, change.num_steps) == (pytest.approx(5 / 6), 2)


def test_iterations_that_are_not_recorded_leave_the_nearest_ones(tmp_path: Path) -> None:
    write_run(tmp_path, reward__mean=[-1.0] * 8)
    write_rollouts(tmp_path, *([{"explanation": f"it is {n}.", "step": 3 * n}] for n in (1, 2)))
    change = read_fit_result(tmp_path).changes[RIGHT]
    assert change == Change(
        0.0, 0.0, pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True)
    )


def test_groups_without_spread_are_counted_at_the_end(tmp_path: Path) -> None:
    write_run(tmp_path, reward__mean=rising(), reward__zero_std_groups=[0.0] * 40)
    alike, mixed = (
        [{"row": row, "explanation": "3", "reward": -1.0 * i * slope} for i in (0, 1)]
        for row, slope in ((1, 0), (2, 1))
    )
    write_rollouts(
        tmp_path, *[mixed] * 30, *[alike + mixed] * 5, *[alike + [r | {"row": 3} for r in alike]] * 5
    )
    result = read_fit_result(tmp_path)
    # Of the last 20 groups 5 + 10 are alike.
    assert result.limits == ["75 % of the last groups have no spread"]
    [warning] = result.warnings
    assert warning.startswith("in 75 % of the last groups all completions earned the same: little is left")


def rising(num_steps: int = 40) -> list[float]:
    return [0.1 * i for i in range(num_steps)]


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ({"policy__loss": [3.0 - 0.1 * i for i in range(9)]}, "9 optimizer steps teach hardly anything"),
        ({"reward__mean": rising(), "reward__group_std": [0.0] * 21 + [1.0] * 19}, "in 21 of 40 iterations"),
        ({"reward__mean": rising(), "policy__entropy": [1.0] * 30 + [0.01] * 10}, "sampling has collapsed"),
        ({"reward__mean": rising(), "rollout__closed_frac": [1.0] * 20 + [0.5] * 20}, "that are closed fell"),
        ({"reward__mean": rising(), "rollout__length_mean": [90.0] * 20 + [9.0] * 20}, "from 90 to 9 tokens"),
        ({"reward__mean": rising(), "reward__correct": [0.9] * 20 + [0.2] * 20}, "right answers fell, 90.0"),
        ({"reward__mean": rising(), "reward__solution": [-1.0] * 20 + [-2.0] * 20}, "while r_SS fell"),
        ({"reward__mean": rising(), "reward__val_mean": [-1.0, -2.0]}, "held-out rows fell"),
        ({"policy__loss": rising()}, "the loss has risen, 0.450 ± 0.096 → 3.45"),
        ({"policy__loss": rising()[::-1], "eval__s__pass_at_1": [0.3, 0.1]}, "accuracy on s has fallen"),
    ],
)
def test_a_run_that_cannot_have_taught_anything_is_warned_of(
    curves: dict[str, list[float]], said: str, tmp_path: Path
) -> None:
    [warning] = read_fit_result(write_run(tmp_path, **curves)).warnings
    assert said in warning


def test_a_run_that_learned_has_no_warning(tmp_path: Path) -> None:
    healthy = {"reward__group_std": [0.4] * 40, "policy__entropy": [0.9] * 40, "reward__solution": rising()}
    assert read_fit_result(write_run(tmp_path, reward__mean=rising(), **healthy)).warnings == []


def test_the_last_iteration_is_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlt_lightning.run.result.FIRST_BYTES", 100)
    write_rollouts(
        tmp_path, *([{"explanation": f"{step} {i} é", "reward": 0.0} for i in range(9)] for step in range(4))
    )
    path = tmp_path / "rollouts.jsonl"
    last = [f"3 {i} é" for i in range(9)]
    assert [row["explanation"] for row in read_last_rows(path)] == last
    assert [row["explanation"] for row in read_last_rows(path, since=3)] == [
        f"2 {i} é" for i in range(9)
    ] + last
    assert len([*read_last_rows(path, since=0)]) == 36


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        ("2 add 1 is 3.", {"solution": "\\boxed{3}"}, True),
        ("so it is 1,200.", {"answer": "1200"}, True),
        ("we get \\boxed{3.0} from 7", {"answer": "3"}, True),
        ("3 is not it, 4 is", {"answer": "3"}, False),
        ("so it is 7", {"answer": "17"}, False),
        ("clear", {"answer": "3"}, False),
        ("x + 1", {"answer": "x + 1"}, None),
        ("B", {"answer": "B", "kind": "choice"}, None),
        ("3 * 8 = 24, so \\boxed{3 * 8 - 5}", solve_row([3, 5, 8], 19), True),
        ("so it is: 8 * 3 - 5 = 19", {"question": solve_row([3, 5, 8], 19)["question"]}, True),
        ("<think>3</think><solution>\n8 + 5 + 3\n</solution>", solve_row([3, 5, 8], 16), True),
        ("3 * 8 = 24", solve_row([3, 5, 8], 19), False),  # 5 is not used
        ("hard", solve_row([3, 5, 8], 19), False),
    ],
)
def test_a_text_ends_with_the_answer(text: str, row: dict[str, Any], expected: bool | None) -> None:
    assert ends_with_answer(text, row) is expected


def test_a_fit_ends_with_what_it_learned(finished_run: Path) -> None:
    output = (finished_run.parent / "stdout").read_text()
    [line] = [line for line in output.splitlines() if line.startswith("No clear change: ")]
    number = r"-?[\d.]+(e-\d+)?"
    assert re.match(rf"No clear change: reward {number} → {number} \(r_SS {number} → ", line)
    assert line == f"No clear change: {read_fit_result(finished_run).line()}."
    assert "Warning: 2 optimizer steps teach hardly anything" in output


def test_150_rows_of_ones_own_are_too_few_and_fit_says_so(tmp_path: Path) -> None:
    # The case of a new user: 150 warm-up rows, 16 a step, 9 optimizer steps, and no alarm in five stages.
    path = tmp_path / "warmup.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chain_rows(150, seed=1)))
    words = ["--config=miniature_warmup", f"--data.source={path}", f"--output_dir={tmp_path / 'run'}"]
    result = rlt("fit", *words)
    assert result.returncode == 0, result.stderr
    assert "Warning: 9 optimizer steps teach hardly anything: have at least 20." in result.stdout
    assert "\nNo clear change: loss" in result.stdout


def test_python_gets_what_a_fit_has_learned(tiny_model: str, tmp_path: Path) -> None:
    data = StratosDataModule(task="teacher_sft", source=chain_rows(8), prompts_per_step=4, max_length=2048)
    trainer = Trainer(tmp_path / "run", max_epochs=1, accelerator="cpu", enable_progress_bar=False)
    result = trainer.fit(SFTModule(tiny_model), data)
    assert isinstance(result, FitResult)
    assert result.steps == 2
    assert result.changes["policy/loss"].first > 0
    assert result.before is None
    assert result.warnings[0].startswith("2 optimizer steps")
