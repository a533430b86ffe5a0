"""Scored data: groups by reward, comparison of two traces, a warning of foreign traces, kills."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import rlt

from rlt_lightning.rewards import RLTReward
from rlt_lightning.run.ranking import split_into_groups, write_comparison_page, write_groups
from rlt_lightning.types import InputError

TERMS = RLTReward().columns()


def test_groups_have_equal_size_and_fall_in_reward() -> None:
    assert split_into_groups([0.1, 5.0, -2.0, 3.0, 3.0, 4.0], 3) == [[1, 5], [3, 4], [0, 2]]
    rewards = [random.Random(0).gauss(0, 1) for _ in range(1000)]
    groups = split_into_groups(rewards, 16)
    assert sorted(i for group in groups for i in group) == list(range(1000))
    assert {len(group) for group in groups} == {62, 63}
    for better, worse in pairwise(groups):
        assert min(rewards[i] for i in better) >= max(rewards[i] for i in worse)


def test_groups_replace_those_of_an_earlier_division(tmp_path: Path) -> None:
    terms = dict.fromkeys(("solution_reward", "kl_reward", "format_reward"), 0.0)
    rows = [{"reward": float(i), **terms} for i in range(5)]
    for num_groups in (5, 2):
        write_groups(rows, num_groups, TERMS, tmp_path)
    assert sorted(path.name for path in (tmp_path / "groups").iterdir()) == [
        "group-01.jsonl",
        "group-02.jsonl",
    ]


@pytest.mark.parametrize("num_groups", [0, 4])
def test_more_groups_than_rows_are_refused(num_groups: int) -> None:
    with pytest.raises(InputError, match=f"between 1 and the number of scored rows, 3, but is {num_groups}"):
        split_into_groups([1.0, 2.0, 3.0], num_groups)


def test_a_comparison_shows_where_each_trace_is_ahead() -> None:
    def pair(question: str, ours: float, theirs: float) -> dict[str, Any]:
        terms = {"solution_reward": 0.0, "kl_reward": 0.0, "format_reward": 0.0}
        traces = {
            name: {"reward": reward, **terms, "trace": f"{name} on {question}"}
            for name, reward in (("ours", ours), ("theirs", theirs))
        }
        return {"question": question, "difference": ours - theirs, **traces}

    page = write_comparison_page(
        [pair("A", 3, 0), pair("B", 1, 0), pair("C", 0, 1)], ["ours", "theirs"], TERMS
    )
    # Differences 3, 1, -1: mean 1, standard deviation 2, error 2 / sqrt(3) = 1.155.
    assert "3 problems. Reward of `ours` minus reward of `theirs`: +1.000 ± 1.155" in page
    assert "`ours` is ahead in 2" in page
    ours, theirs = page.split("## Where `theirs` is ahead the most")
    assert ours.index("### +3.000") < ours.index("### +1.000")
    assert "### -1.000" in theirs
    assert "### +" not in theirs


ROWS = [
    {
        "question": f"What is {n} + {n}?",
        "solution": str(2 * n),
        "reasoning_trace": f"{n} and {n}: {2 * n}.",
        "id": n,
    }
    for n in range(1, 10)
]


def command(config: str, model: str, source: Path, folder: Path, *options: str) -> list[str]:
    models = [f"--model.teacher={model}", f"--model.student={model}"]
    where = [f"--data.source={source}", f"--output_dir={folder}"]
    return ["predict", f"--config=recipe_7b/{config}", *models, *where, *options]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def test_ranked_rows_lie_in_files_by_group(tiny_model: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = rlt(*command("rank", tiny_model, source, folder, "--scores.rank_groups=3"))
    assert result.returncode == 0, result.stderr
    assert "not sampled by the teacher" not in result.stderr  # the exact KL holds for any trace
    scores = read(folder / "scores.jsonl")
    figures = json.loads((folder / "groups.json").read_text())
    grouped = [row for figure in figures for row in read(folder / figure["file"])]
    assert grouped == sorted(scores, key=lambda row: -row["reward"])
    assert [figure["num_rows"] for figure in figures] == [3, 3, 3]
    assert figures[0]["reward_max"] == max(row["reward"] for row in scores)


def test_too_many_groups_are_refused_before_anything_is_scored(
    tiny_model: str, source: Path, tmp_path: Path
) -> None:
    result = rlt(*command("rank", tiny_model, source, tmp_path / "run"))
    [line] = result.stderr.strip().splitlines()
    assert result.returncode == 2
    assert "the number of scored rows, 9, but is 16" in line


@pytest.mark.full
def test_foreign_traces_are_warned_of_and_the_teachers_own_are_not(
    tiny_model: str, source: Path, tmp_path: Path
) -> None:
    foreign = rlt(*command("score", tiny_model, source, tmp_path / "foreign"))
    assert "9 of 9 traces were not sampled by the teacher" in foreign.stderr
    source.write_text("".join(json.dumps({**row, "teacher": f"{tiny_model}/"}) + "\n" for row in ROWS))
    own = rlt(*command("score", tiny_model, source, tmp_path / "own"))
    assert own.returncode == foreign.returncode == 0
    assert "not sampled" not in own.stderr


def test_scoring_goes_on_after_the_last_whole_row(tiny_model: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = command("score", tiny_model, source, folder, "--data.prompts_per_step=1")
    assert rlt(*whole).returncode == 0
    scores = folder / "scores.jsonl"
    before = scores.read_text()
    lines = before.splitlines(keepends=True)
    scores.write_text("".join(lines[:4]) + lines[4][:20])
    result = rlt(*whole, "--resume=true")
    assert result.returncode == 0, result.stderr
    assert "predict batch 5/5" in result.stderr  # what is missing, and no more
    assert scores.read_text() == before


def test_two_traces_of_each_problem_are_compared(tiny_model: str, source: Path, tmp_path: Path) -> None:
    rows = [{**row, "other": "Nobody knows what it is."} for row in ROWS]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ROWS[0]]))  # the last lacks one
    folder = tmp_path / "run"
    options = ["--scores.rank_groups=null", "--data.trace_columns=[reasoning_trace, other]"]
    options += ["--data.max_bad_frac=0.2", "--data.prompts_per_step=3"]
    result = rlt(*command("rank", tiny_model, source, folder, *options))
    assert result.returncode == 0, result.stderr
    assert f"1 of 10 rows of '{source}' cannot be used" in result.stderr
    scores = read(folder / "scores.jsonl")
    rewards = {(row["id"], row["trace_column"]): row["reward"] for row in scores}
    assert len(scores) == len(rewards) == 18
    pairs = read(folder / "comparison.jsonl")
    differences = [pair["difference"] for pair in pairs]
    assert differences == sorted(differences, reverse=True)
    assert sorted(differences) == pytest.approx(
        sorted(rewards[n, "reasoning_trace"] - rewards[n, "other"] for n in range(1, 10))
    )
    assert {pair["other"]["trace"] for pair in pairs} == {"Nobody knows what it is."}
    assert "against `other`" in (folder / "comparison.md").read_text()


def test_a_comparison_knows_stratos_rows_and_completions(tiny_model: str, tmp_path: Path) -> None:
    answer = "<|begin_of_thought|>R1's.<|end_of_thought|><|begin_of_solution|>4<|end_of_solution|>"
    turns = [{"from": "user", "value": "Twice 2?"}, {"from": "assistant", "value": answer}]
    rows = [
        {"conversations": turns, "other": "Ours."},
        {
            "problem": "Twice 3?",
            "solution": "6",
            "completion": "Raw.\n\n<|end_of_explanation|>",
            "other": "Ours.",
            "teacher": tiny_model,
        },
    ]
    source, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = rlt(
        *command("score", tiny_model, source, folder, "--data.trace_columns=[reasoning_trace, other]"),
        "--scores.rank_groups=16",  # as in rank.yaml: of no use here, and no obstacle
    )
    assert result.returncode == 0, result.stderr
    assert "3 of 4 traces were not sampled by the teacher" in result.stderr  # `other` names no teacher
    pairs = {pair["question"]: pair for pair in read(folder / "comparison.jsonl")}
    texts = {q: (p["solution"], p["reasoning_trace"]["trace"], p["other"]["trace"]) for q, p in pairs.items()}
    assert texts == {"Twice 2?": ("4", "R1's.", "Ours."), "Twice 3?": ("6", "Raw.", "Ours.")}
    assert not (folder / "groups").exists()


@pytest.mark.full
def test_scores_of_other_rows_or_settings_are_not_gone_on_with(
    tiny_model: str, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    whole = command("score", tiny_model, source, folder)
    assert rlt(*whole).returncode == 0
    before = (folder / "scores.jsonl").read_bytes()
    texts = rlt(*whole, "--resume=true", "--scores.per_token=true")
    assert "scores.per_token was False and is True" in texts.stderr
    for rows in ([{**ROWS[0], "solution": "7"}, *ROWS[1:]], ROWS[:-1]):
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = rlt(*whole, "--resume=true")
        [line] = result.stderr.strip().splitlines()
        assert result.returncode == 2
        assert "has rows of other problems. Restore data.source" in line
    assert (folder / "scores.jsonl").read_bytes() == before
