"""`rlt demo`: what it refuses, says, draws and writes. test_install.py runs it, test_finding.py kills it."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlt_lightning.demo import command, run
from rlt_lightning.demo.arms import QUICK_ARMS, Arms, Setting
from rlt_lightning.demo.page import (
    build_scores,
    build_tables,
    compare_students,
    name_student,
    show_explanations,
)
from rlt_lightning.demo.picture import draw_picture
from rlt_lightning.demo.stages import StageError, Stages
from rlt_lightning.run.jsonl import format_line

KINDS = {"steps": 80.0, "filler": 10.0, "leap": 5.0, "wrong": 5.0, "other": 0.0}


def figures(**accuracies: float) -> dict[str, Any]:
    """Return `finding.json` of one seed with these accuracies."""
    arms: dict[str, Any] = {
        arm: {"accuracy": [value], "greedy": [value]} for arm, value in accuracies.items()
    }
    for arm in accuracies.keys() - {"base"}:
        arms[arm]["kinds"] = [KINDS]
    return {"seeds": [0], "arms": arms, "reward_by_kind": {}, "groups": []}


QUICK = figures(base=20.0, warmup=45.0, rlt=95.0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--arms", "warmup", "rtl"], "--arms may name base, .*, but names rtl. Correct it."),
        (["--seeds", "one"], "--seeds must be numbers such as 0 1 2, but names one. Correct it."),
        (["--output_dir", "full"], "--output_dir must be empty or new, but full is not."),
        (["--output_dir", "full", "--overwrite"], "--overwrite replaces a run .* also holds mine.txt."),
        (["--output_dir", "full/mine.txt"], "--output_dir must be a folder that can be written"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/mine.txt").touch()
    assert command.run_demo(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(reason, error), error
    assert list(tmp_path.iterdir()) == [tmp_path / "full"]


def test_a_finished_demo_is_replaced_only_when_asked(tmp_path: Path) -> None:
    for name in ("finding.json", "main/seed0/warmup/teacher.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    command.open_folder(tmp_path, resume=True, overwrite=False)
    assert (tmp_path / "finding.json").exists()
    command.open_folder(tmp_path, resume=False, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_demo_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupt(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupt)
    words = ["--output_dir", str(tmp_path), "--seeds", "1", "2", "--overwrite", "true", "--arms=rlt"]
    assert command.run_demo(words) == 130
    end = capsys.readouterr().err.splitlines()[-1]
    assert end.endswith(f": rlt demo --output_dir {tmp_path} --seeds 1 2 --arms=rlt --resume true")


def test_the_terminal_shows_the_students_side_by_side() -> None:
    lines = build_scores(QUICK, Setting.num_test).splitlines()
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "answers of the student T 0.7 greedy",
        "untrained student 20.0 ± 3.5 20.0 ###",
        "warm-up teacher's student 45.0 ± 4.3 45.0 #######",
        "RLT teacher's student 95.0 ± 1.9 95.0 ##############",
    ]
    assert max(map(len, lines)) <= 80
    assert compare_students(QUICK).startswith("RLT's student solves 50.0 ± 4.7 points more")
    assert "| untrained student | 20.0 ± 3.5 | 20.0 |  |" in build_tables(QUICK)


def test_the_picture_has_a_row_for_every_arm(tmp_path: Path) -> None:
    draw_picture(QUICK, tmp_path / "finding.svg")
    root = ElementTree.parse(tmp_path / "finding.svg").getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {*map(name_student, QUICK_ARMS), "20", "45", "95"} <= {*texts}
    bars = [float(element.attrib["width"]) for element in root.iter() if element.attrib.get("height") == "26"]
    assert bars[0] / bars[1] == pytest.approx(20 / 45, abs=1e-2)


def test_explanations_are_shown_with_their_kinds(tmp_path: Path, capsys: Any) -> None:
    one = Arms(Stages(tmp_path), Setting(), 0)
    question, right, leap = (
        "start 2, add 1, times 3?",
        "2 add 1 is 3, 3 times 3 is 9.",
        "clearly it must be 9.",
    )
    rows = [
        {"question": question, "solution": "9", "trace": trace, "reasoning_trace": text, "reward": reward}
        for trace, (text, reward) in enumerate([(right, -0.5), (leap, -0.1), (leap, -0.3)])
    ]
    path = one.folder / "warmup" / "samples" / "traces.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(map(format_line, rows)))
    show_explanations(one)
    lines = capsys.readouterr().out.splitlines()
    assert "  warm-up teacher: 2 leaps to the answer, 1 every step right" in lines
    assert lines[lines.index("    best   -0.10  (leaps to the answer)") + 1].strip() == leap
    assert lines[lines.index("    worst  -0.50  (every step right)") + 1].strip() == right


def test_a_stage_that_fails_names_its_log(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    with pytest.raises(
        StageError, match=r"rlt fit must end well, but ended with 3. Its log is .*a.log:\ngone"
    ):
        stages.run(["fit"], tmp_path / "a.log", fail)


def test_an_interruption_ends_the_stages_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(tmp_path, wait_long)
    begin = time.perf_counter()

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    ones: Any = [SimpleNamespace(prepare=lambda: stages.run([str(tmp_path / "begun")], tmp_path / "log"))]
    ones += [SimpleNamespace(prepare=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        run.run_arms(stages, ones, [])
    assert time.perf_counter() - begin < 100


def wait_long(words: list[str], log: Path) -> None:
    Path(words[0]).touch()
    time.sleep(200)


def fail(words: list[str], log: Path) -> None:
    log.write_text("gone")
    raise SystemExit(3)


def test_the_clock_adds_up_over_starts(tmp_path: Path) -> None:
    (tmp_path / run.CLOCK).write_text("100.0")
    clock = run.Clock(tmp_path / run.CLOCK)
    clock.write()
    assert 100 <= float((tmp_path / run.CLOCK).read_text()) < 110
