"""What a fit has learned: its last line, and the result that a script reads."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from rlt_lightning import Trainer
from rlt_lightning.datamodules import TeacherSFTData
from rlt_lightning.judging.answers import ends_with_answer
from rlt_lightning.metrics import catalogue
from rlt_lightning.metrics.result import Change, read_fit_result
from rlt_lightning.modules import SFTModule
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


def test_first_and_last_are_means(tmp_path: Path) -> None:
    # Of 8 steps each end is a quarter: (0 + 2) / 2 = 1 and (8 + 10) / 2 = 9.
    result = read_fit_result(write_run(tmp_path, reward__mean=[0, 2, 3, 4, 5, 6, 8, 10]))
    assert result.changes == {"reward/mean": Change(1, 9, 2)}
    assert result.line() == "reward 1 → 9"


def test_the_line_names_terms_and_held_out_figures(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        policy__loss=[0.1, 0.2],
        reward__mean=[-1.0, -0.5],
        reward__solution=[-0.7, -0.3],
        reward__kl=[-0.3, -0.2],
        reward__val_mean=[-0.9, -0.6],
        eval__chains__pass_at_1=[0.2, 0.9],
        eval__chains__standard_error=[0.01, 0.02],
    )
    result = read_fit_result(tmp_path)
    assert result.line() == (
        "reward -1 → -0.5, solution term -0.7 → -0.3, KL term -0.3 → -0.2, "
        "held-out reward -0.9 → -0.6, accuracy on chains 20.0 → 90.0 %"
    )
    assert result.held_out["eval/chains/pass_at_1"] == Change(0.2, 0.9)


def test_the_line_has_the_terms_of_a_reward_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "entries", dict(catalogue.entries))
    catalogue.register(catalogue.reward_term("brevity", "Brevity", "minus the words"))
    catalogue.write_entries(tmp_path)
    monkeypatch.setattr(catalogue, "entries", {metric.name: metric for metric in catalogue.OURS})
    write_run(
        tmp_path,
        reward__mean=[-1.0, -0.5],
        reward__group_std=[0.1, 0.2],
        reward__val_brevity=[-9.0, -8.0],
        reward__hurdles=[-0.3, -0.1],
        reward__brevity=[-0.7, -0.4],
    )
    result = read_fit_result(tmp_path)
    assert result.line() == "reward -1 → -0.5, hurdles term -0.3 → -0.1, brevity -0.7 → -0.4"


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
    assert f"\nFirst and last figures: {read_fit_result(finished_run).line()}.\n" in output


def test_python_gets_what_a_fit_has_learned(tiny_model: str, tmp_path: Path) -> None:
    data = TeacherSFTData(source=chain_rows(8), prompts_per_step=4, max_length=2048)
    trainer = Trainer(tmp_path / "run", max_epochs=1, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(SFTModule(tiny_model), data)
    result = read_fit_result(tmp_path / "run")
    assert result.steps == 2
    assert result.changes["policy/loss"].first > 0
