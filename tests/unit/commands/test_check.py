"""`rlt check` says before a stage whether its run can teach anything."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cases import full
from commands import rlt, start
from kills import wait_for

from rlt_lightning.commands.check import (
    VARIANTS,
    CheckOptions,
    DrawnRow,
    Phrases,
    Ranking,
    build_variants,
    choose_good_rows,
    describe_ranking,
    grade,
    read_leap,
)
from rlt_lightning.datamodules.rows import ParsedRow
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


def test_rows_without_traces_are_told_what_stage_0_needs(tmp_path: Path) -> None:
    rows = [{name: row[name] for name in ("question", "solution")} for row in chain_rows(64, seed=4)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    result = rlt("check", "--config=laptop/rlt", source, *FEW, "--model.teacher=miniature")
    found = read_checks(result)
    missing = "the 64 rows that were read have no reasoning_trace: stage 0 writes them for the warm-up"
    assert found["traces"] == ("cannot", f"{missing} (docs/data.md)")
    assert found["ranking"][0] == "cannot"
    assert found["right"][0] != "cannot"
    assert found["stage0"][1].startswith(
        "rows without traces: of 2 explanations one is closed and without tags for 100 ± 0 %"
    )
    assert "predict batch 1/1" in result.stderr  # a count, also in a log
    # The base closes what it writes: 1.5 times the longest that ends is a limit.
    proposed = re.search(r"1\.5 times the longest that ends is (\d+)", found["closed"][1])
    assert proposed is not None
    assert 16 < int(proposed[1]) <= 72
    result = rlt("check", "--config=laptop/warmup", source)
    assert result.returncode == 2
    assert "lacks reasoning_trace" in result.stderr
    assert "(stage 0 writes traces: docs/data.md)" in result.stderr


def test_a_limit_that_cuts_is_told_with_what_it_costs(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", chain_rows(64, seed=4))
    found = read_checks(
        rlt("check", "--config=laptop/rlt", source, *FEW, "--rollouts.sampling.max_completion_length=8")
    )
    status, text = found["closed"]
    assert status == "fail"
    assert "reach the limit of 8 tokens" in text
    assert "none ends, so nothing says how long they would be" in text or "which earn -" in text


def test_a_terminated_check_ends_at_once(tmp_path: Path) -> None:
    # What it has begun would take minutes.
    words = ("--check.rows=256", "--check.completions=64", "--data.num_embedded_rows=4096")
    log = tmp_path / "log"
    check = start("check", "--config=laptop/rlt", *words, log=log)
    wait_for(lambda: "predict batch 1/" in log.read_text(), check, log)
    begin = time.monotonic()
    os.kill(check.pid, signal.SIGTERM)
    assert check.wait() == 128 + signal.SIGTERM
    # A second on an idle machine.
    assert time.monotonic() - begin < 5
    assert "rlt: terminated. No checkpoint was written." in log.read_text()


def test_150_warmup_rows_of_ones_own_are_too_few(tmp_path: Path) -> None:
    # Five stages ran without an alarm, and the student was worse than the base.
    source = write_rows(tmp_path / "warmup.jsonl", chain_rows(150, seed=1))
    found = read_checks(rlt("check", "--config=laptop/warmup", source))
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
    columns = "--check.bad_traces=[bad_trace]"
    found = read_checks(rlt("check", "--config=laptop/rlt", source, columns, *FEW))
    names = ["rows", "lengths", "steps", "traces", "closed", "right", "spread", "ranking", "control"]
    assert [*found] == names
    assert found["control"][0] == "cannot"
    assert "before you train, compare with greedy traces" in found["control"][1]
    assert found["traces"] == (
        "pass",
        "100 ± 0 % of the rows' traces end with the right answer (at least 10 %)",
    )
    assert "of 8 completions close the format" in found["closed"][1]
    assert found["ranking"][1].startswith("4 right traces earn ")
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
    found = read_checks(rlt("check", "--config=laptop/warmup", source))
    assert found["lengths"][0] == "fail"
    assert found["lengths"][1].startswith("16 of 64 rows are too long and left out, 0 are cut")
    assert found["steps"][1].startswith("3 optimizer steps, 3 in an epoch of 48 items")


@pytest.mark.parametrize("config", ["laptop/likelihood", full("laptop/opd"), full("laptop/grpo")])
def test_answers_of_a_student_are_judged(config: str) -> None:
    found = read_checks(rlt("check", f"--config={config}", *FEW))
    assert "of 8 completions end with the right answer" in found["right"][1]
    assert found["closed"][1].startswith("100 ± 0 % of 8 completions close the format")
    assert found["ranking"][0] == "cannot"


def drawn(trace: str, solution: str = "\\boxed{7}") -> DrawnRow:
    return DrawnRow(ParsedRow("q", solution, {"reasoning_trace": trace}, None, None), {})


# Two traces leap, and two say nothing twice; "so it goes" stands in one trace only.
MIXED = [
    drawn("3 add 4 is 7."),
    drawn("3 add 3 is 6, clearly it must be 7."),
    drawn("one looks, one waits, clearly it must be 7."),
    drawn("one looks, one waits, so it goes."),
    drawn("3 add 3 is 6, 6 add 1 is 7."),
]


def test_leaps_and_filler_are_made_of_the_rows_own_sentences() -> None:
    phrases = Phrases.find(MIXED)
    assert set(phrases.filler) == {"one looks", "one waits"}
    assert phrases.leap == ("clearly it must be ", "")
    [variants] = build_variants([drawn("1 add 2 is 3, 3 times 3 is 9.", "\\boxed{9}")], phrases)
    assert variants["leap"] == "clearly it must be 9."
    assert variants["filler"] in ("one looks, one waits.", "one waits, one looks.")
    assert variants["reasoning_trace"] == "1 add 2 is 3, 3 times 3 is 9."


def test_where_rows_have_no_such_sentences_a_leap_is_the_last_one_and_filler_frequent_words() -> None:
    row = drawn("3 add 3 is 6, 6 add 1 is 7.")
    phrases = Phrases.find([row, row])
    assert (phrases.filler, phrases.leap) == ((), None)
    [variants] = build_variants([row], phrases)
    assert variants["leap"] == "6 add 1 is 7."
    first, second = variants["filler"].removesuffix(".").split(", ")
    assert {*first.split(), *second.split()} <= {"add", "is"}
    assert len(first.split()) == len(second.split()) == 5


def test_right_traces_with_the_fewest_phrases_are_ranked() -> None:
    right = [True, True, True, False, True]
    good = choose_good_rows(MIXED, right, Phrases.find(MIXED))
    # Of one sentence there is no leap.
    assert [MIXED.index(row) for row in good] == [4, 1, 2]
    unjudged = choose_good_rows(MIXED, [None] * 5, Phrases.find(MIXED))
    assert [MIXED.index(row) for row in unjudged] == [4, 1, 3, 2]


@pytest.mark.parametrize(
    ("sentence", "solution", "expected"),
    [
        ("so it is 12", "\\boxed{12}", ("so it is ", "")),
        ("4 times 3 is 12", "\\boxed{12}", None),  # a step
        ("so it is 112", "\\boxed{12}", None),
        ("hence \\boxed{x^2}", "\\boxed{x^2}", ("hence \\boxed{", "}")),
        ("thus Paris it is", "\\boxed{Paris}", ("thus ", " it is")),
        ("I do not know", "by the rule above", None),
    ],
)
def test_a_leap_names_no_number_but_the_answer(
    sentence: str, solution: str, expected: tuple[str, str] | None
) -> None:
    assert read_leap(sentence, {"solution": solution}) == expected


def test_the_variant_that_wins_most_often_decides() -> None:
    rewards = [{"reasoning_trace": -1.0, "leap": -2.0, "filler": filler} for filler in (-0.5, -0.6, -1.5)]
    check = describe_ranking(Ranking(rewards, VARIANTS))
    assert check.status == "fail"
    assert check.figure == (
        "3 right traces earn -1.00 nats on average, a leap to the answer -2.00 and filler -0.87: "
        "right traces are ranked first in 100 ± 0 % over a leap to the answer and 33 ± 27 % over filler"
    )
    assert describe_ranking(Ranking(rewards[1:], VARIANTS)).status == "warn"
    assert describe_ranking(Ranking(rewards[2:], VARIANTS)).status == "cannot"


@pytest.mark.full
def test_a_teacher_of_nine_steps_fails_the_ranking(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "warmup.jsonl", chain_rows(150, seed=1))
    done = rlt("fit", "--config=laptop/warmup", source, f"--output_dir={tmp_path / 'warmup'}")
    assert done.returncode == 0, done.stderr
    teacher = f"--model.teacher={tmp_path / 'warmup/model'}"
    few = read_checks(rlt("check", "--config=laptop/rlt", teacher))
    assert {name for name, (status, _) in few.items() if status != "pass"} == {"ranking", "control"}
    assert few["ranking"][0] == "fail"
    shipped = read_checks(rlt("check", "--config=laptop/rlt"))
    assert {status for status, _ in shipped.values()} == {"pass"}


@pytest.mark.parametrize(
    ("value", "expected"), [(0.4, "fail"), (0.5, "warn"), (0.94, "warn"), (0.95, "pass")]
)
def test_a_fraction_is_graded_by_two_limits(value: float, expected: str) -> None:
    assert grade(value, (0.5, 0.95)) == expected


def test_too_few_rows_to_check_are_refused() -> None:
    with pytest.raises(InputError, match=r"check\.rows and check\.completions must be at least 2"):
        CheckOptions(rows=1)
