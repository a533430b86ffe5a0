"""`rlt check` says before a stage whether its run can teach anything."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cases import full
from commands import ROOT, rlt
from rows_of import write_rows

from rlt_lightning.callbacks import Alarms
from rlt_lightning.commands.check import CLOSED, advise
from rlt_lightning.tasks.stepwise import chain_rows

FEW = ("--check.rows=4", "--check.completions=2")


def read_checks(result: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Return status and text of each check by its name."""
    assert result.returncode in (0, 1), result.stderr
    *lines, last = result.stdout.splitlines()
    assert last.startswith(f"{len(lines)} checks: ")
    found = {name: (status, text) for status, name, text in (line.split(maxsplit=2) for line in lines)}
    assert result.returncode == int(any(status == "fail" for status, _ in found.values()))
    return found


def test_rows_without_traces_are_told_what_stage_0_needs(tmp_path: Path) -> None:
    rows = [{name: row[name] for name in ("question", "solution")} for row in chain_rows(64, seed=4)]
    source = "--data.source=" + write_rows(tmp_path / "rows.jsonl", rows)
    result = rlt("check", "--config=laptop/rlt", source, *FEW, "--model.teacher=miniature")
    found = read_checks(result)
    told = "rows without traces: of 2 explanations one is closed and without tags for 100 ± 0 %"
    assert found["stage0"][1].startswith(told)
    # The base closes what it writes: 1.5 times the longest that ends is a limit.
    proposed = re.search(r"1\.5 times the longest that ends is (\d+)", found["closed"][1])
    assert proposed is not None
    assert 16 < int(proposed[1]) <= 72
    result = rlt("check", "--config=laptop/warmup", source)
    assert result.returncode == 2
    assert "lacks reasoning_trace" in result.stderr


def test_a_stage_with_a_reward_gets_all_checks() -> None:
    found = read_checks(rlt("check", "--config=laptop/rlt", "--check.rows=12"))
    assert [*found] == ["rows", "lengths", "steps", "closed", "spread", "begin"]
    begin = found["begin"][1]
    assert re.match(
        r"the student is right in \d+ ± \d+ % of its own samples, in \d+ of 12 groups of 8 not", begin
    )
    # 22 % of the warm-up teacher's explanations have all steps right; 54 % gain 0.2 nats over filler.
    useful = re.search(r"(\d+) ± \d+ % of 48 explanations bring the student 60 % of the way", begin)
    assert useful is not None
    assert 10 <= int(useful[1]) <= 40


# Figures of 16 groups of 8 answers, of which so many are right in the first groups, and of 64 explanations.
@pytest.mark.parametrize(
    ("right", "useful", "figure", "way"),
    [
        (52, 0, "right in 41 ± 4 % of its own samples, in 9 of 16", "GRPO or its own right answers need no"),
        (26, 64, "right in 20 ± 4 % of its own samples, in 12 of 16", "GRPO or its own right answers"),
        (
            18,
            8,
            "right in 14 ± 3 % of its own samples, in 13 of 16",
            "expert iteration by the threshold; else",
        ),
        (0, 8, "12 ± 4 % of 64 explanations", "expert iteration by the threshold; else the best quarter by"),
        (0, 5, "8 ± 3 % of 64 explanations", "expert iteration by the threshold; else"),
        (0, 4, "6 ± 3 % of 64 explanations", "expert iteration by the threshold, then RLT"),
        (0, 2, "3 ± 2 % of 64 explanations", "expert iteration by the threshold, then RLT"),
        (0, 1, "2 ± 2 % of 64 explanations", "expert iteration by the threshold, or a warm-up on the best"),
        (1, 0, "right in 1 ± 1 % of its own samples, in 15 of 16", "none is useful: a warm-up first"),
    ],
)
def test_advice_follows_from_the_two_shares(right: int, useful: int, figure: str, way: str) -> None:
    answers = [number < right for number in range(128)]
    groups = [answers[i : i + 8] for i in range(0, 128, 8)]
    begin = advise(groups, [number < useful for number in range(64)])
    assert begin.status == "pass"  # advice fails no run
    assert figure in begin.figure
    assert f": {way}" in begin.figure


def test_rows_that_cannot_be_judged_are_named(tmp_path: Path) -> None:
    rows = [row | {"answer": None, "solution": "So it is, as one sees."} for row in chain_rows(32, seed=4)]
    source = "--data.source=" + write_rows(tmp_path / "rows.jsonl", rows)
    found = read_checks(rlt("check", "--config=laptop/rlt", source, *FEW))
    assert found["begin"][1].startswith("these rows have no answer that can be judged")


def test_a_model_that_does_not_know_the_format_fails(tiny_model: str) -> None:
    models = (f"--model.teacher={tiny_model}", f"--model.student={tiny_model}")
    words = ("--config=tests/rlt.yaml", *models, "--rollouts.sampling.max_completion_length=6")
    result = rlt("check", *words, "--data.num_embedded_rows=8", *FEW)
    found = read_checks(result)
    status, text = found["closed"]
    assert (status, result.returncode) == ("fail", 1)
    assert text.startswith("0 ± 0 % of 8 completions close the format; 100 % reach the limit of 6 tokens")


@pytest.mark.parametrize("page", ["task", "data", "metrics"])
def test_closed_has_one_threshold_everywhere(page: str) -> None:
    assert CLOSED[1] == 1 - Alarms().truncated_above
    text = (ROOT / f"docs/{page}.md").read_text()
    [line] = re.findall(r"^\| `(?:rollout/closed_frac|closed)` .*$", text, re.MULTILINE)
    assert re.search(rf"\b{CLOSED[1]:g}\b|\b{100 * CLOSED[1]:g} %", line)


def test_rows_that_limits_leave_out_are_counted(tmp_path: Path) -> None:
    rows = chain_rows(64, seed=1)
    for row in rows[:16]:
        row["question"] = "start 1, " + "add 1, " * 200 + "add 1?"
    source = "--data.source=" + write_rows(tmp_path / "long.jsonl", rows)
    found = read_checks(rlt("check", "--config=laptop/warmup", source))
    assert found["lengths"][0] == "fail"
    assert found["lengths"][1].startswith("16 of 64 rows are too long and left out, 0 are cut")
    # Such a run, of five stages, ended without an alarm, and its student was worse than the base.
    assert found["steps"][0] == "fail"
    assert found["steps"][1].startswith("3 optimizer steps, 3 in an epoch of 48 items (at least 20)")
    assert {name for name, (status, _) in found.items() if status == "cannot"} == {"closed"}


@pytest.mark.parametrize(
    ("config", "status"),
    [("laptop/grpo", "pass"), ("laptop/likelihood", "cannot"), full("laptop/opd", "cannot")],
)
def test_answers_that_a_reward_judges_are_sampled(config: str, status: str, tmp_path: Path) -> None:
    rows = chain_rows(64)
    if config == "laptop/grpo":  # needs answers only
        rows = [{name: row[name] for name in ("question", "answer")} for row in rows]
    source = "--data.source=" + write_rows(tmp_path / "rows.jsonl", rows)
    found = read_checks(rlt("check", f"--config={config}", source, *FEW))
    assert found["closed"][0] == status
