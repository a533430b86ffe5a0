"""`rlt rounds`: settings, order of the stages, ends, resume, and the arms of examples/finding/rounds.py."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rounds as arms
import rounds_questions as questions
import yaml
from commands import ROOT, python, rlt, start
from test_generate import read, wait_until

from rlt_lightning import rounds
from rlt_lightning.rounds import Round, Rounds, Settings, Student, Teacher, run_rounds
from rlt_lightning.run.shipped import find_config
from rlt_lightning.tasks.stepwise import NEW_OPERATIONS, parse_chain

STAGES = yaml.safe_load(find_config("miniature_rounds").read_text())["stages"]
SETTINGS = Settings(STAGES, "miniature")
TINY_STAGES = {  # each at its smallest
    "warmup": f"{STAGES['warmup']} --data.num_embedded_rows 32 --trainer.max_epochs 1",
    "rlt": f"{STAGES['rlt']} --data.num_embedded_rows 16 --trainer.max_steps 1",
    "traces": f"{STAGES['traces']} --data.num_embedded_rows 16",
    "student": STAGES["student"].replace("max_epochs 9", "max_epochs 1"),
    "evaluate": f"{STAGES['evaluate']} --data.max_rows 8",
}
TINY = (
    *("rounds", "--config=miniature_rounds", "--student_rows=16", "--patience=5"),
    *(f"--stages.{name}={line}" for name, line in TINY_STAGES.items()),
)


def make_round(number: int, accuracy: float, error: float = 2.0) -> Round:
    """Return a round whose student solves so much, percent."""
    teacher = Teacher(f"teacher{number}", -0.5, None, None, None, 30.0)
    return Round(number, teacher, Student(f"student{number}", accuracy, error, 512), 1.0, 100)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rounds", "0"], "rounds must be a whole number of at least 1, but is 0."),
        (["--student_rows", "-1"], "student_rows must be a whole number of at least 0, but is -1."),
        (["--student.from", "warmup"], "student.from must be base or previous, but is 'warmup'."),
        (["--teacher.from", "base"], "teacher.from must be warmup or previous, but is 'base'."),
        (
            ["--stages.rlt", "predict --config rank"],
            "stages.rlt must be a command line such as `fit",
        ),
        (["--stages.rlt", "fit --config quickstrat"], "'quickstrat' is neither. Did you mean quickstart"),
        (["--stages.traces", ""], "stages.traces has none. Add it."),
        (["--stages.rlt", "fit --config quickstart --model.teacher X"], "must not set --model.teacher"),
        (["--config", "quickstart"], "may set .* but sets trainer.max_steps"),
        (["--rouns", "3"], "rlt rounds has no option --rouns. Did you mean --rounds"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = words if "--config" in words else ["--config", "miniature_rounds", *words]
    monkeypatch.setattr("sys.argv", ["rlt", "rounds", *words])
    try:
        status = run_rounds(words)
    except SystemExit as end:  # of the parser
        status = int(str(end.code))
    assert status == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(reason, line), line
    assert not [*tmp_path.iterdir()]


class Recorded(Rounds):
    """Rounds whose stages only write down their command line."""

    def __init__(
        self, settings: Settings, folder: Path, accuracies: list[float], standard_error: float | None = 0.02
    ) -> None:
        super().__init__(settings, folder)
        self.standard_error = standard_error
        self.lines: list[tuple[str, str]] = []
        self.accuracies = iter(accuracies)
        self.stages.start = lambda: None  # type: ignore[method-assign]
        self.stages.run_command = self.note  # type: ignore[method-assign]

    def note(self, name: str, words: list[str], result: str | None = None) -> Path:
        self.lines.append((name, " ".join(words)))
        folder = self.folder / name
        folder.mkdir(parents=True)
        folder.with_name(f"{folder.name}.seconds").write_text("1.5\n")
        if words[0] == "test":
            found = {"pass_at_1": next(self.accuracies), "standard_error": self.standard_error}
            (folder / "evaluation.json").write_text(json.dumps({"overall": None, "sets": {"a": found}}))
        if words[0] == "predict":
            row = {"reasoning_trace": "2 add 1 is 3.", "answer": "3", "reward": -0.5, "num_tokens": 10}
            for file in ("traces.jsonl", "distillation.jsonl"):
                (folder / file).write_text(f"{json.dumps(row)}\n" * 100)
        if name.endswith("teacher"):
            (folder / "metrics.csv").write_text("step,reward/mean\n1,-0.9\n2,-0.3\n")
        return folder


def options_of(line: str) -> dict[str, str]:
    """The last value of each option of a command line."""
    return dict(re.findall(r"--(\S+) (\S+)", line))


def test_each_teacher_is_trained_against_the_student_of_the_round_before(tmp_path: Path) -> None:
    runs = Recorded(replace(SETTINGS, seed=3), tmp_path, [0.1, 0.2, 0.6, 0.9])
    found = runs.run()
    lines = dict(runs.lines)
    assert [*lines] == [
        *("round0/base", "round0/teacher", "round0/traces", "round0/student", "round0/evaluation"),
        *(f"round{n}/{stage}" for n in (1, 2) for stage in ("teacher", "traces", "student", "evaluation")),
    ]
    for number in (1, 2):
        before, folder = tmp_path / f"round{number - 1}", tmp_path / f"round{number}"
        taught = options_of(lines[f"round{number}/teacher"])
        assert taught["model.teacher"] == str(tmp_path / "round0/teacher/model")
        assert taught["model.student"] == str(before / "student/model")
        assert options_of(lines[f"round{number}/traces"])["model.teacher"] == str(folder / "teacher/model")
        learned = options_of(lines[f"round{number}/student"])
        assert learned["model.pretrained"] == "miniature"
        assert learned["data.source"] == str(folder / "traces/distillation.jsonl")
    first = options_of(lines["round0/student"])["data.source"]
    assert len(read(Path(first))) == 64
    seeds = [options_of(line)["seed"] for _, line in runs.lines if not line.startswith("test")]
    assert len({*seeds}) == len(seeds)
    assert {options_of(line)["seed"] for _, line in runs.lines if line.startswith("test")} == {"3000"}
    assert [one["student"]["accuracy"] for one in found["rounds"]] == [60.0, 90.0]
    assert found["rounds"][0]["teacher"] | {"model": ""} == {
        **{"model": "", "reward": -0.5, "reward_before": -0.9, "reward_after": -0.3},
        **{"right": 100.0, "length": 10.0},
    }
    assert found["rounds"][1]["sampled_tokens"] == 1000
    assert found["rounds"][1]["seconds"] == 6.0
    assert found["best"] == 2
    assert json.loads((tmp_path / "rounds.json").read_text()) == found
    assert re.search(r"\| 2 \(best\) +\| 90.0 ± 2.0 +\| 100 ", (tmp_path / "rounds.md").read_text())
    assert (tmp_path / "rounds.svg").read_text().startswith("<svg")


def test_models_may_go_on_from_the_round_before(tmp_path: Path) -> None:
    settings = replace(SETTINGS, student_from="previous", teacher_from="previous")
    runs = Recorded(settings, tmp_path, [0.1, 0.2, 0.6, 0.9])
    runs.run()
    lines = dict(runs.lines)
    assert options_of(lines["round0/student"])["model.pretrained"] == "miniature"
    for number in (1, 2):
        before = tmp_path / f"round{number - 1}"
        assert options_of(lines[f"round{number}/teacher"])["model.teacher"] == str(before / "teacher/model")
        assert options_of(lines[f"round{number}/student"])["model.pretrained"] == str(
            before / "student/model"
        )


def test_a_teacher_that_is_warmed_up_and_a_student_that_has_learned_nothing(tmp_path: Path) -> None:
    settings = replace(
        SETTINGS, stages=STAGES | {"warmup": "miniature-teacher"}, student_rows=0, rounds=1, seed=1
    )
    runs = Recorded(settings, tmp_path, [0.1, 0.2])
    found = runs.run()
    lines = dict(runs.lines)
    assert "round0/teacher" not in lines
    assert "round0/student" not in lines
    taught = options_of(lines["round1/teacher"])
    assert (taught["model.teacher"], taught["model.student"]) == ("miniature-teacher", "miniature")
    assert found["start"]["student"] == found["base"]


def test_a_student_that_solves_all_is_a_gain(tmp_path: Path) -> None:
    runs = Recorded(replace(SETTINGS, rounds=1), tmp_path, [0.1, 0.2, 1.0], standard_error=0.0)
    found = runs.run()
    assert found["rounds"][0]["student"]["standard_error"] == 0.0
    assert "nan" not in (tmp_path / "rounds.svg").read_text()
    assert rounds.is_better(Student("a", 100.0, 0.0), Student("b", 99.0, 0.5))


def test_one_problem_is_too_few_to_tell_a_gain(tmp_path: Path) -> None:
    runs = Recorded(SETTINGS, tmp_path, [0.0], standard_error=None)
    with pytest.raises(rounds.InputError, match="at least two problems"):
        runs.run()


def test_rounds_end_without_a_gain(tmp_path: Path) -> None:
    runs = Recorded(replace(SETTINGS, rounds=9), tmp_path, [0.1, 0.2, 0.9, 0.91, 0.99])
    found = runs.run()
    assert [one["number"] for one in found["rounds"]] == [1, 2]
    assert found["best"] == 2  # the higher one, though it is no gain


@pytest.mark.parametrize(
    ("accuracies", "patience", "stopped"),
    [
        ([20], 1, False),  # nothing to compare
        ([20, 20], 1, True),
        ([20, 22.8], 1, True),  # within the standard error of the difference, 2.83
        ([20, 22.9], 1, False),
        ([20, 50, 40], 1, True),
        ([20, 50, 40], 2, False),
        ([20, 50, 40, 41], 2, True),
        ([20, 50, 40, 60], 2, False),
    ],
)
def test_a_gain_is_more_than_its_error(
    accuracies: list[float], patience: int, stopped: bool, tmp_path: Path
) -> None:
    runs = Rounds(replace(SETTINGS, patience=patience), tmp_path)
    assert runs.has_stopped([make_round(n, value) for n, value in enumerate(accuracies)]) is stopped


def test_a_later_config_and_the_command_line_win(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("rounds: 5\nstudent_rows: 8\nstages: {warmup: miniature-teacher}\n")
    configs = ["miniature_rounds", str(tmp_path / "own.yaml")]
    found = rounds.read_rounds_settings(configs, {"rounds": 3})
    stages = STAGES | {"warmup": "miniature-teacher"}
    assert found == Settings(stages, "miniature", rounds=3, student_rows=8)


def test_a_script_describes_rounds_as_a_config_does(tmp_path: Path) -> None:
    stages = {"warmup": "miniature-teacher"}
    runs = Rounds.from_configs(
        "miniature_rounds", output_dir=tmp_path, rounds=1, student_from="previous", stages=stages
    )
    assert runs.settings == Settings(STAGES | stages, "miniature", rounds=1, student_from="previous")
    assert runs.folder == tmp_path
    with pytest.raises(rounds.InputError, match=r"but got student_row\. Did you mean student_rows"):
        Rounds.from_configs("miniature_rounds", output_dir=tmp_path, student_row=3)
    with pytest.raises(rounds.InputError, match=r"stages may name .* but names rl\."):
        Rounds.from_configs("miniature_rounds", output_dir=tmp_path, stages={"rl": "fit --config quickstart"})


def test_too_few_traces_for_the_first_student(tmp_path: Path) -> None:
    runs = Recorded(replace(SETTINGS, student_rows=101), tmp_path, [0.1, 0.2])
    with pytest.raises(rounds.InputError, match=r"but is 101, and .* has 100\. Lower it"):
        runs.run()


@pytest.mark.slow
def test_killed_in_any_stage_and_started_again_gives_the_same_table(tmp_path: Path) -> None:
    whole = rlt(*TINY, f"--output_dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    folder = tmp_path / "killed"
    for name in ("round0/traces", "round1/teacher", "round1/student", "round2/evaluation"):
        process = start(*TINY, f"--output_dir={folder}", "--resume=true")
        wait_until((folder / name).exists, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1)  # its stage ends with it
    # The script of the page goes on with what the command has begun.
    script = re.search(r"```python\n(.+?)```", (ROOT / "docs/rounds.md").read_text(), re.DOTALL)[1]
    own = f"rounds=2, student_rows=16, patience=5, stages={TINY_STAGES}"
    script = script.replace("rounds=1, student_rows=32", own).replace("runs/rounds", str(folder))
    again = python(script, tmp_path)
    assert again.returncode == 0, again.stderr
    one, other = (json.loads((place / "rounds.json").read_text()) for place in (tmp_path / "whole", folder))
    # Which is best after one tiny step differs between machines.
    best = f"round {one['best']} is best; its figures are in {folder / 'rounds.json'}"
    assert again.stdout.splitlines()[-1] == best

    def drop(found: Any) -> Any:
        """Without seconds and folders."""
        if isinstance(found, dict):
            return {key: drop(value) for key, value in found.items() if key not in ("seconds", "model")}
        return [drop(value) for value in found] if isinstance(found, list) else found

    assert drop(one) == drop(other)
    assert len(one["rounds"]) == 2


# The plan


def make_plan(steps: int | None, prompts: int = 64, seconds: float = 0.5) -> dict[str, Any]:
    """What `rlt plan --plan.json` says of a stage."""
    run_seconds = None if steps is None else steps * seconds
    step = {"num_batches": None if steps is None else 8, "prompts": prompts}
    found = {"num_steps": steps, "run_seconds": run_seconds, "peak_bytes": 2**30, "fits": True}
    return found | {"setup": {"step": step}}


def test_a_plan_of_rounds_counts_how_often_each_stage_runs() -> None:
    plans = {name: make_plan(100) for name in STAGES}
    # 8 batches of 64 problems: the first student learns from an eighth of 512 traces.
    counts = {name: rounds.count_runs(name, SETTINGS, plan) for name, plan in plans.items()}
    assert counts == {"warmup": 1, "rlt": 2, "traces": 3, "student": 2.125, "evaluate": 4}
    table = rounds.build_plan_table(SETTINGS, plans)
    assert "| student  | 2.12 | 100   | 1.0 | yes  | 50 s | 106 s   |" in table
    assert "All rounds take about 10.1 min" in table  # 12.125 runs of 50 s
    untrained = replace(SETTINGS, student_rows=0, rounds=1)
    counts = {name: rounds.count_runs(name, untrained, plan) for name, plan in plans.items()}
    assert counts == {"warmup": 1, "rlt": 1, "traces": 2, "student": 1, "evaluate": 2}
    table = rounds.build_plan_table(SETTINGS, plans | {"rlt": make_plan(None)})
    assert "Without rlt: their rows are not on this machine." in table


@pytest.mark.full
def test_a_plan_of_rounds_plans_every_stage(tmp_path: Path) -> None:
    lines = (f"--stages.{name}={line}" for name, line in TINY_STAGES.items())
    done = rlt("plan", "rounds", "--config=miniature_rounds", *lines, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = dict(re.findall(r"^\| (\w+) +\| [\d.]+ +\| ([\d?]+)", done.stdout, re.MULTILINE))
    assert steps == {"warmup": "2", "rlt": "1", "traces": "1", "student": "1", "evaluate": "1"}
    assert not [*tmp_path.iterdir()]


# The arms of `make rounds`


@pytest.mark.parametrize(
    ("arm", "name"),
    [
        ("base", "untrained"),
        ("s64", "s64: 64 traces of the warm-up teacher"),
        ("rlt", "RLT against the untrained student"),
        ("rlt_s64", "RLT against s64"),
        ("reject16_s8", "right answers of s8, 16 samples"),
        ("best4_s64", "warm-up teacher, best of 4 by the reward under s64"),
        ("d64", "d64: 64 traces of those it has learned from"),
        ("rlt_reject4_s64", "RLT against reject4_s64"),
    ],
)
def test_an_arm_is_named_by_its_method_and_the_arm_of_its_student(arm: str, name: str) -> None:
    assert arms.name_arm(arm) == name


@pytest.mark.parametrize(
    ("arm", "named"),
    [
        *((arm, arm) for arm in ("s", "reject_s64", "best0_s4", "raw")),
        ("rlt_64", "64"),
        ("rlt_reject_s4", "reject_s4"),
    ],
)
def test_an_unknown_arm_is_refused(arm: str, named: str) -> None:
    with pytest.raises(rounds.InputError, match=rf"but names {named}\. Correct it"):
        arms.read_arm(arm)


@pytest.mark.full
def test_the_arms_run_at_tiny_size(tmp_path: Path) -> None:
    tiny = {"num_warmup": 96, "num_warmup_epochs": 1, "num_traces": 24, "num_test": 8, "num_iterations": 1}
    names = [
        "base",
        "s16",
        "rlt_s16",
        "wrong_s16",
        "best2_s16",
        "exactbest2_s16",
        "oracle",
        "d16",
        "pool2_d16",
    ]
    arms.run(tmp_path, replace(arms.SETTINGS["few64"], num_pool=512, **tiny), [0], names)
    found = json.loads((tmp_path / "rounds.json").read_text())
    assert list(found["arms"]) == names
    assert [found["arms"][name]["rows"] for name in names[1:]] == [
        *([16], [24], [24], [24], [24], [24], [16], [24])
    ]
    assert found["reward_by_kind"].keys() == {"base", "s16", "d16"}
    seed = tmp_path / "few64/seed0"
    has_new = [
        parse_chain(row["question"]).steps[-1].split()[1:3] for row in read(seed / "data/warmup.jsonl")
    ]
    has_new = [(name, int(number)) in NEW_OPERATIONS for name, number in has_new]
    assert has_new == [True] * 64 + [False] * 32
    assert read(seed / "data/d16.jsonl") == read(seed / "data/warmup.jsonl")[:16]
    [shown, right] = [
        {row["question"]: row["solution"] for row in read(seed / f"data/{name}.jsonl")}
        for name in ("wrong", "rlt")
    ]
    assert shown.keys() == right.keys()
    assert not any(shown[question] == right[question] for question in right)
    settings = yaml.safe_load((seed / "rlt_s16/teacher/config.yaml").read_text())["model"]["init_args"]
    assert settings["student"] == str(seed / "s16/student/model")
    assert settings["teacher"] == str(seed / "warmup/teacher/model")
    assert (seed / "data/s16.jsonl").read_text() in (seed / "warmup/traces/distillation.jsonl").read_text()
    assert (tmp_path / "rounds.md").read_text().count("RLT against s16") == 4  # with its control, twice each
    assert "<svg" in (tmp_path / "rounds.svg").read_text()


def test_the_best_of_k_is_chosen_among_the_first_k_traces_of_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "DRAWS", (1, 2, 3))
    traces = [
        "one knows how it goes, one takes the next part.",
        "2 add 1 is 3, 3 times 7 is 1.",
        "clearly it must be 1.",
    ]
    rows = [
        {"question": "start 2, add 1, times 7?", "reasoning_trace": trace, "reward": reward}
        for trace, reward in zip(traces, (-2.0, -1.0, -0.5), strict=True)
    ]
    found = questions.choose_best(rows)
    assert [max(kinds, key=kinds.get) for kinds in found.values()] == ["filler", "steps", "leap"]
    assert all(sum(kinds.values()) == 100 for kinds in found.values())


def test_ends_of_traces_are_counted_by_the_number_they_name() -> None:
    def row(trace: str) -> dict[str, str]:
        return {"question": "start 2, add 1, times 7?", "solution": "\\boxed{5}", "reasoning_trace": trace}

    rows = [row("3 times 7 is 5."), row("3 times 7 is 1."), row("3 times 7 is 2."), row("one knows.")]
    assert questions.measure_ends(rows) == dict.fromkeys(("shown", "right", "another", "none"), 25.0)


def test_a_trace_leaves_the_steps_behind_the_comma_of_its_last_right_one() -> None:
    tokens = ["2", " add", " 1", " is", " 3", ",", " clearly", " it", " must", " be", " 1", "."]
    assert tokens[questions.find_leaving(tokens, 1)] == " clearly"
    assert questions.find_leaving(tokens, 0) == 0
    assert questions.find_leaving(tokens, 2) == 6  # all right: its last step
