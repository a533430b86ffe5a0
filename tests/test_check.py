"""`rlt check` says before a stage whether its run can teach anything."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases import full
from commands import rlt

from rlt_lightning.datamodules.rows import ParsedRow
from rlt_lightning.scoring.check import (
    VARIANTS,
    CheckOptions,
    DrawnRow,
    build_variants,
    describe_ranking,
    grade,
)
from rlt_lightning.tasks.stepwise import chain_rows
from rlt_lightning.types import InputError

FEW = ("--check.rows=4", "--check.completions=2")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--data.source={path}"


def read_checks(result: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Return status and text of each check by its name."""
    assert result.returncode in (0, 1), result.stderr
    *lines, last = result.stdout.splitlines()
    assert last.startswith(f"{len(lines)} checks: ")
    found = {name: (status, text) for status, name, text in (line.split(maxsplit=2) for line in lines)}
    assert result.returncode == int(any(status == "fail" for status, _ in found.values()))
    return found


def test_150_warmup_rows_of_ones_own_are_too_few(tmp_path: Path) -> None:
    # Five stages ran without an alarm, and the student was worse than the base.
    source = write_rows(tmp_path / "warmup.jsonl", chain_rows(150, seed=1))
    found = read_checks(rlt("check", "--config=miniature_warmup", source))
    status, text = found["steps"]
    assert status == "fail"
    assert text.startswith(
        "9 optimizer steps, 9 in an epoch of 150 items (at least 20). Add rows, raise trainer"
    )
    assert {name for name, (status, _) in found.items() if status == "cannot"} == {"closed", "ranking"}
    assert found["lengths"][0] == found["rows"][0] == "pass"
    assert not (tmp_path / "runs").exists()


def test_a_stage_with_a_reward_gets_all_checks(tmp_path: Path) -> None:
    rows = chain_rows(64, seed=4, mixture=None)
    for row in rows:
        row["bad_trace"] = f"clearly it must be {row['answer']}."
    source = write_rows(tmp_path / "pairs.jsonl", rows)
    columns = "--data.trace_columns=[reasoning_trace, bad_trace]"
    found = read_checks(rlt("check", "--config=quickstart", source, columns, *FEW))
    assert [*found] == ["rows", "lengths", "steps", "traces", "closed", "right", "spread", "ranking"]
    assert found["traces"] == (
        "pass",
        "100 ± 0 % of the rows' traces end with the right answer (at least 10 %)",
    )
    assert "of 8 completions close the format" in found["closed"][1]
    assert "of 16 pairs: " in found["ranking"][1]
    assert " % over bad_trace" in found["ranking"][1]  # one's own worse traces


def test_a_model_that_does_not_know_the_format_fails(tiny_model: str) -> None:
    models = (f"--model.teacher={tiny_model}", f"--model.student={tiny_model}")
    words = ("--config=tests/rlt.yaml", *models, "--rollouts.sampling.max_completion_length=6")
    result = rlt("check", *words, "--data.num_embedded_rows=8", *FEW)
    found = read_checks(result)
    status, text = found["closed"]
    assert (status, result.returncode) == ("fail", 1)
    assert text.startswith("0 ± 0 % of 8 completions close the format; 100 % reach the limit of 6 tokens")


def test_rows_that_limits_leave_out_are_counted(tmp_path: Path) -> None:
    rows = chain_rows(64, seed=1)
    for row in rows[:16]:
        row["question"] = "start 1, " + "add 1, " * 200 + "add 1?"
    source = write_rows(tmp_path / "long.jsonl", rows)
    found = read_checks(rlt("check", "--config=miniature_warmup", source))
    assert found["lengths"][0] == "fail"
    assert found["lengths"][1].startswith("16 of 64 rows are too long and left out, 0 are cut")
    assert found["steps"][1].startswith("3 optimizer steps, 3 in an epoch of 48 items")


@pytest.mark.parametrize("config", ["miniature_opd", full("miniature_grpo")])
def test_answers_of_a_student_are_judged(config: str) -> None:
    found = read_checks(rlt("check", f"--config={config}", *FEW))
    assert "of 8 completions end with the right answer" in found["right"][1]
    assert found["ranking"][0] == "cannot"


def test_without_traces_it_says_what_cannot_be_checked(tmp_path: Path) -> None:
    rows = [{name: row[name] for name in ("question", "solution")} for row in chain_rows(512, seed=1)]
    found = read_checks(rlt("check", "--config=quickstart", write_rows(tmp_path / "bare.jsonl", rows), *FEW))
    assert found["traces"] == ("cannot", "the 16 rows that were read have no reasoning_trace")
    assert found["ranking"][0] == "cannot"
    assert found["right"][0] != "cannot"


def test_variants_of_a_trace_are_worse_ones() -> None:
    first, second = (
        DrawnRow(ParsedRow(name, "s", {"reasoning_trace": trace}, None, None), {})
        for name, trace in (("a", "One. Two. Three. Four."), ("b", "Five, six."))
    )
    own, other = build_variants([first, second])
    assert {name: own[name] for name in VARIANTS} == {
        "leap": "Four.",
        "cut": "One. Two.",
        "other": "Five, six.",
    }
    assert {name: other[name] for name in VARIANTS} == {
        "leap": "six.",
        "cut": "Five,",
        "other": "One. Two. Three. Four.",
    }


def test_the_error_of_ranking_is_that_of_problems() -> None:
    # 3 of 3 and 0 of 3 pairs: mean 1/2; the std of (1, 0) is 1/sqrt(2), over sqrt(2) problems 1/2.
    rows = [{"reasoning_trace": r, "leap": 1.0, "cut": 1.0, "other": 1.0} for r in (2.0, 0.0)]
    check = describe_ranking(rows, VARIANTS)
    assert "first in 50 ± 50 % of 6 pairs: 50 % over only its last step" in check.figure
    assert check.status == "warn"
    assert describe_ranking(rows[1:], VARIANTS).status == "cannot"


@pytest.mark.parametrize(
    ("value", "expected"), [(0.4, "fail"), (0.5, "warn"), (0.94, "warn"), (0.95, "pass")]
)
def test_a_fraction_is_graded_by_two_limits(value: float, expected: str) -> None:
    assert grade(value, (0.5, 0.95)) == expected


def test_too_few_rows_to_check_are_refused() -> None:
    with pytest.raises(InputError, match=r"check\.rows and check\.completions must be at least 2"):
        CheckOptions(rows=1)
