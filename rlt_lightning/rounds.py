"""`rlt rounds`: student and teacher take turns, so that a teacher is trained against a student within reach.

A frozen student rewards a step only if it finds the step likely after what comes before it. For a step that
it was never shown it does not: RLT against it then learns filler. So the student learns first, from a few of
the warm-up teacher's traces, and RLT is run against that student (docs/rounds.md).

    round 0    warmup   the teacher learns its format: a stage, or a model that knows it already
               traces   it explains problems
               student  a student learns from the first `student_rows` of these traces
    round 1    rlt      a teacher is trained against the student of round 0
               traces   it explains problems
               student  a student learns from all of them; round 2 trains a teacher against it, and so on

Every student is evaluated. Each stage is an `rlt` command with a folder of its own, so a stopped run goes on
after the stages that are finished. Nothing here imports PyTorch at its top: the first line appears at once.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from rlt_lightning.cli.help import VERBS as HELP
from rlt_lightning.demo.command import add_switch, end_with_line, open_folder, run_stages
from rlt_lightning.demo.stages import StageError, Stages
from rlt_lightning.run.jsonl import read_json_rows, rewrite
from rlt_lightning.run.shipped import find_config, suggest_names
from rlt_lightning.types import InputError

# The verb of each stage, and the options that `rlt rounds` adds to its command line.
STAGES = {
    "warmup": ("fit", ()),
    "rlt": ("fit", ("model.teacher", "model.student")),
    "traces": ("predict", ("model.teacher", "model.student")),
    "student": ("fit", ("model.pretrained", "data.source")),
    "evaluate": ("test", ("model.pretrained",)),
}
TRACES = "distillation.jsonl"
RESULT = "rounds.json"
ROWS = ("--data.source", "--data.num_embedded_rows")  # which rows a stage reads
ENTRIES = re.compile(r"rounds\.(json|md|svg|tmp)|round\d+")  # all that rounds write into their folder
OPTIONS: dict[str, tuple[type, str]] = {  # of the command line and of a config: kind and meaning
    "rounds": (int, "rounds of RLT, after round 0 without it; 2 by default"),
    "student_rows": (int, "traces that the student of round 0 learns from; 64 by default"),
    "student.base": (str, "the model that is to learn, as it is before any training"),
    "student.from": (str, "what the student of a round starts as: base (the default), or previous"),
    "teacher.from": (str, "what RLT starts from in a round: warmup (the default), or previous"),
    "patience": (int, "rounds in a row without a gain, after which it ends; 1 by default"),
    "seed": (int, "seed of problems, sampling and training; 0 by default"),
}


@dataclass(frozen=True)
class Settings:
    """What `rlt rounds` is told.

    Args:
        stages: The command line of each stage, without `rlt`, by its name in `STAGES`; `warmup` may be the
            name or the folder of a teacher that is warmed up already.
        student_base: The student before any training.
        rounds: How many teachers RLT trains, one after the other.
        student_rows: Traces of the warm-up teacher that the first student learns from; 0: RLT begins
            against the untrained student.
        student_from: What the student of a round starts as: "base", or "previous", that of the round before.
        teacher_from: What RLT starts from: "warmup", or "previous", the teacher of the round before.
        patience: After this many rounds without a gain no further one is made.
        seed: Seed of problems, sampling and training; every stage of every round has its own from it.
    """

    stages: dict[str, str]
    student_base: str
    rounds: int = 2
    student_rows: int = 64
    student_from: str = "base"
    teacher_from: str = "warmup"
    patience: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("student_rows", 0), ("patience", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be a whole number of at least {least}, but is {value!r}.")
        for model, first in (("student", "base"), ("teacher", "warmup")):
            if (start := getattr(self, f"{model}_from")) not in (first, "previous"):
                raise InputError(f"{model}.from must be {first} or previous, but is {start!r}. Correct it.")
        if missing := [name for name in STAGES if not self.stages.get(name)]:
            raise InputError(f"Every stage needs its command line, but stages.{missing[0]} has none. Add it.")
        if unknown := [name for name in self.stages if name not in STAGES]:
            raise InputError(
                f"stages may name {', '.join(STAGES)}, but names {unknown[0]}."
                f"{suggest_names(unknown[0], STAGES)}"
            )
        for name, (verb, added) in STAGES.items():
            words = shlex.split(self.stages[name])
            if words[0] != verb and not (name == "warmup" and len(words) == 1):
                raise InputError(
                    f"stages.{name} must be a command line such as `{verb} --config NAME`, but begins with "
                    f"`{words[0]}`. Correct it."
                )
            for option, config in pairwise(words):
                if option == "--config":
                    find_config(config)
            if clash := {*added, "output_dir", "resume"} & list_options(words):
                raise InputError(
                    f"stages.{name} must not set --{min(clash)}, since rlt rounds sets it. Remove it there."
                )


@dataclass
class Student:
    """A student and how it answers.

    Attributes:
        model: Its folder, or the name of the base.
        accuracy: Part of the evaluation's problems that it solves, percent; the mean of several sets.
        standard_error: Its standard error over problems, percent points.
        rows: Traces that it has learned from.
    """

    model: str
    accuracy: float
    standard_error: float
    rows: int = 0


@dataclass
class Teacher:
    """A teacher, what RLT has taught it, and the traces that it then wrote.

    Attributes:
        model: Its folder or name.
        reward: Mean reward of its traces under the student of the round before, nats.
        reward_before: Mean reward of the first iterations of RLT, nats; None of the warm-up teacher.
        reward_after: The same of the last iterations.
        right: Part of its traces that end with the right answer, percent, leaps to the answer included; None
            where the answers are no numbers.
        length: Mean length of its traces, tokens.
    """

    model: str
    reward: float
    reward_before: float | None
    reward_after: float | None
    right: float | None
    length: float


@dataclass
class Round:
    """A round: its teacher, the student of its traces, and what both have taken.

    Attributes:
        number: 0 for the warm-up teacher.
        teacher: The teacher.
        student: The student.
        seconds: Of all its stages.
        sampled_tokens: Of RLT and of the traces.
    """

    number: int
    teacher: Teacher
    student: Student
    seconds: float
    sampled_tokens: int


class Rounds:
    """Run the rounds of one folder.

    Args:
        settings: What to run.
        output_dir: The folder; finished stages in it are passed over.
    """

    def __init__(self, settings: Settings, output_dir: Path | str) -> None:
        self.settings = settings
        self.stages = Stages(Path(output_dir), describe=describe_stage, single_thread=False)
        self.folder = self.stages.folder

    @classmethod
    def from_configs(cls, *configs: str, output_dir: Path | str, **settings: Any) -> Rounds:
        """Return the rounds that configs describe.

        Args:
            configs: Names of shipped configs, or files; a later one wins.
            output_dir: The folder.
            settings: Arguments of `Settings`, which win over all configs.

        Raises:
            InputError: If a setting is unknown, wrong or missing.

        Example: `Rounds.from_configs("miniature_rounds", output_dir="runs/rounds", rounds=1).run()`.
        """
        if unknown := [name for name in settings if name not in (names := [*Settings.__dataclass_fields__])]:
            raise InputError(
                f"Rounds.from_configs takes {', '.join(names)}, but got {unknown[0]}."
                f"{suggest_names(unknown[0], names)}"
            )
        stages = {f"stages.{name}": line for name, line in settings.pop("stages", {}).items()}
        given = {name: settings[field] for name in OPTIONS if (field := name.replace(".", "_")) in settings}
        return cls(read_rounds_settings(configs, given | stages), output_dir)

    def run(self) -> dict[str, Any]:
        """Run all rounds, and return what `rounds.json` holds.

        Raises:
            StageError: If a stage fails; its message names the log.
            InputError: In a script whose main part has no `if __name__ == "__main__":`.
        """
        from rlt_lightning.judging.judge import refuse_while_imported

        refuse_while_imported()
        settings = self.settings
        self.stages.start()
        base = self.evaluate(0, "base", settings.student_base)
        warm = self.warm_up()
        rounds = [self.run_round(0, warm, base)]
        found = self.write(base, rounds)
        while len(rounds) <= settings.rounds and not self.has_stopped(rounds):
            number, before = len(rounds), rounds[-1]
            start = warm if settings.teacher_from == "warmup" else before.teacher.model
            teacher = self.train_teacher(number, start, before.student)
            rounds.append(self.run_round(number, teacher, base, before))
            found = self.write(base, rounds)
        return found

    def run_round(self, number: int, teacher: str, base: Student, before: Round | None = None) -> Round:
        """Let a teacher write traces, and train and evaluate a student of them."""
        reader = before.student if before else base
        traces = self.write_traces(number, teacher, reader.model)
        student = base
        if before or self.settings.student_rows:
            traces = traces if before else self.take_rows(traces)
            start = reader if self.settings.student_from == "previous" else base
            model = self.train_student(number, start.model, traces)
            rows = sum(1 for _ in read_json_rows(traces))
            student = replace(self.evaluate(number, "evaluation", model), rows=rows)
        return self.describe_round(number, teacher, student)

    # Stages

    def run_stage(self, number: int, folder: str, name: str, **options: object) -> Path:
        """Run one stage of a round with these options besides those of its line, and return its folder."""
        words = shlex.split(self.settings.stages[name])
        words = [
            str(find_config(word)) if option == "--config" else word
            for option, word in zip(["", *words], words, strict=False)
        ]
        for key, value in options.items():
            words += [f"--{key.replace('__', '.')}", str(value)]
        if "seed" not in list_options(words):
            # Every evaluation has the same problems; all other stages have their own.
            own = 0 if name == "evaluate" else 10 * number + 1 + list(STAGES).index(name)
            words += ["--seed", str(1000 * self.settings.seed + own)]
        return self.stages.run_command(f"round{number}/{folder}", words, TRACES if name == "traces" else None)

    def warm_up(self) -> str:
        """Return the warm-up teacher, made by its stage if the settings name no model."""
        if len(words := shlex.split(self.settings.stages["warmup"])) == 1:
            return words[0]
        return str(self.run_stage(0, "teacher", "warmup") / "model")

    def train_teacher(self, number: int, start: str, student: Student) -> str:
        """Run RLT from a teacher against a frozen student, and return the model."""
        options = {"model__teacher": start, "model__student": student.model}
        return str(self.run_stage(number, "teacher", "rlt", **options) / "model")

    def write_traces(self, number: int, teacher: str, student: str) -> Path:
        """Let a teacher explain the problems, scored by a student, and return the file of the traces."""
        options = {"model__teacher": teacher, "model__student": student}
        return self.run_stage(number, "traces", "traces", **options) / TRACES

    def train_student(self, number: int, start: str, traces: Path) -> str:
        """Train a student on traces, and return the model."""
        options = {"model__pretrained": start, "data__source": traces}
        return str(self.run_stage(number, "student", "student", **options) / "model")

    def evaluate(self, number: int, folder: str, model: str) -> Student:
        """Let a student answer the evaluation's problems."""
        result = self.run_stage(number, folder, "evaluate", model__pretrained=model) / "evaluation.json"
        summary = json.loads(result.read_text())
        found = summary["overall"] or next(iter(summary["sets"].values()))
        if found["standard_error"] is None:
            raise InputError(
                "stages.evaluate must ask at least two problems, or no gain could be told from chance, but "
                "asked one. Give it more."
            )
        return Student(model, 100 * found["pass_at_1"], 100 * found["standard_error"])

    def take_rows(self, traces: Path) -> Path:
        """Return a file of the first `student_rows` traces."""
        few = self.folder / "round0" / "first_traces.jsonl"
        lines = traces.read_text(encoding="utf-8").splitlines(keepends=True)
        if len(lines) < self.settings.student_rows:
            raise InputError(
                "student_rows must be at most the traces of the warm-up teacher, but is "
                f"{self.settings.student_rows}, and {traces} has {len(lines)}. Lower it, or let "
                "stages.traces explain more problems."
            )
        rewrite(few, lines[: self.settings.student_rows])
        return few

    # Figures

    def describe_round(self, number: int, teacher: str, student: Student) -> Round:
        """Return what RLT has taught a round's teacher, what its traces are like, and what the round took."""
        from rlt_lightning.judging.answers import ends_with_answer
        from rlt_lightning.run.result import read_fit_result

        folder = self.folder / f"round{number}"
        traces = [*read_json_rows(folder / "traces" / "traces.jsonl")]
        right = [ends_with_answer(row["reasoning_trace"], row) for row in traces]
        known = [value for value in right if value is not None]
        reward = read_fit_result(folder / "teacher").changes.get("reward/mean") if number else None
        found = Teacher(
            teacher,
            fmean(row["reward"] for row in traces),
            reward.first if reward else None,
            reward.last if reward else None,
            100 * fmean(known) if known else None,
            fmean(row["num_tokens"] for row in traces),
        )
        rollouts = read_json_rows(folder / "teacher" / "rollouts.jsonl") if number else ()
        seconds = sum(float(path.read_text()) for path in folder.glob("*.seconds"))
        return Round(number, found, student, seconds, sum(row["num_tokens"] for row in (*rollouts, *traces)))

    def has_stopped(self, rounds: list[Round]) -> bool:
        """Return whether the last `patience` rounds have gained nothing over those before them.

        A gain is an accuracy above all before, by more than the standard error of the difference.
        """
        recent = rounds[-self.settings.patience :]
        earlier = rounds[: -self.settings.patience]
        if not earlier or recent[0].number < 1:
            return False
        best = max((one.student for one in earlier), key=lambda student: student.accuracy)
        return not any(is_better(one.student, best) for one in recent)

    def write(self, base: Student, rounds: list[Round]) -> dict[str, Any]:
        """Write `rounds.json` and `rounds.svg`, and return the first."""
        best = max(rounds, key=lambda one: one.student.accuracy)
        found = {
            "unit": "percent",
            "base": asdict(base),
            "start": asdict(rounds[0]),
            "rounds": [asdict(one) for one in rounds[1:]],
            "best": best.number,
        }
        rewrite(self.folder / RESULT, [json.dumps(found, indent=1, ensure_ascii=False) + "\n"])
        rewrite(self.folder / "rounds.md", [build_table(found)])
        rewrite(self.folder / "rounds.svg", [draw_rounds(found)])
        return found


def list_options(words: Sequence[str]) -> set[str]:
    """Return the names of the options of a command line, without their dashes."""
    return {word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")}


def is_better(student: Student, other: Student) -> bool:
    """Return whether a student solves more than another by more than the standard error of the difference."""
    return student.accuracy - other.accuracy > math.hypot(student.standard_error, other.standard_error)


def describe_stage(name: str) -> str:
    """Return a line for a stage, by its folder: roundN/STAGE."""
    place, stage = name.split("/")
    number = int(place.removeprefix("round"))
    what = {
        "base": "the untrained student answers",
        "teacher": f"RLT against the student of round {number - 1}" if number else "the teacher warms up",
        "traces": "the teacher explains",
        "student": "a student learns from the traces" if number else "a student learns from the first traces",
        "evaluation": "the student answers",
    }
    return f"round {number}: {what[stage]}"


# What people see


def list_students(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the students of `rounds.json` with their names, in the order in which they were made."""
    students = [("untrained", found["base"])]
    for one in (found["start"], *found["rounds"]):
        students.append((f"round {one['number']}", one["student"]))
    return students


def build_table(found: dict[str, Any]) -> str:
    """Return the Markdown table of what `rounds.json` holds.

    Columns: what the student solves, ± standard error, and the number of traces that it has learned from; the
    teacher's mean reward in RLT, first and last, and that of its traces; the part of these that end with the
    right answer, and their mean length; tokens that RLT and the traces have sampled; seconds.
    """
    from rlt_lightning.evaluation.results import render_table

    header = (
        "round",
        "student solves, %",
        "its traces",
        "reward in RLT",
        "of the traces",
        "right ends, %",
        "tokens",
        "sampled",
        "s",
    )
    base = found["base"]
    rows = [header, ("untrained", f"{base['accuracy']:.1f} ± {base['standard_error']:.1f}", *[""] * 7)]
    for one in (found["start"], *found["rounds"]):
        student, teacher = one["student"], one["teacher"]
        trained = teacher["reward_before"] is not None
        rows.append(
            (
                f"{one['number']}{' (best)' if one['number'] == found['best'] else ''}",
                f"{student['accuracy']:.1f} ± {student['standard_error']:.1f}",
                str(student["rows"]),
                f"{teacher['reward_before']:.2f} → {teacher['reward_after']:.2f}" if trained else "warm-up",
                f"{teacher['reward']:.2f}",
                "" if teacher["right"] is None else f"{teacher['right']:.0f}",
                f"{teacher['length']:.0f}",
                f"{one['sampled_tokens']:,}",
                f"{one['seconds']:.0f}",
            )
        )
    return render_table(rows)


def draw_rounds(found: dict[str, Any]) -> str:
    """Return a picture: what the student of each round solves, with its 95 % interval over problems."""
    from rlt_lightning.demo.picture import BAR, ROW, TOP, draw_accuracy, draw_axis, wrap_svg
    from rlt_lightning.run.ranking import draw_text

    left, width = 200, 420
    students = list_students(found)
    bottom = TOP + ROW * len(students)
    parts = draw_axis(left, width, bottom, "problems solved by the student, %")
    for number, (name, student) in enumerate(students):
        y = TOP + ROW * number + (ROW - BAR) / 2
        rows = f", {student['rows']} traces" if student["rows"] else ""
        parts.append(draw_text(left - 12, y + BAR / 2 + 4, name + rows, 'text-anchor="end"'))
        color = "#2a6f97" if number > 1 else "#9db4c0"
        half = 1.96 * student["standard_error"]
        parts += draw_accuracy(left, width, y, student["accuracy"], half, color)
    return wrap_svg(parts, left + width + 60, bottom + 32)


# The command line


def run_rounds(words: Sequence[str]) -> int:
    """Run `rlt rounds` with these words and return the exit status: 1 if a stage fails, 2 for a mistake."""
    options = build_rounds_parser().parse_args(words)

    def run_in(folder: Path) -> int:
        settings = read_rounds_settings(options.config, list_given(options))
        open_folder(folder, options.resume == "true", options.overwrite == "true", ENTRIES)
        print(f"Stages, one line as each ends, in {folder}:", flush=True)
        found = Rounds(settings, folder).run()
        print(f"\n{build_table(found)}")
        print(describe_end(found, settings, folder))
        return 0

    return run_stages("rounds", words, options.output_dir, run_in)


def plan_rounds(words: Sequence[str]) -> int:
    """Run `rlt plan rounds` with these words and return the exit status: 1 if a stage does not fit."""
    options = build_rounds_parser().parse_args(words)
    try:
        settings = read_rounds_settings(options.config, list_given(options))
        with TemporaryDirectory(prefix="rlt-plan-") as scratch:
            plans = plan_stages(settings, Stages(Path(scratch), single_thread=False))
    except (InputError, StageError) as error:
        return end_with_line(error)
    print(build_plan_table(settings, plans))
    return int(not all(plan["fits"] for plan in plans.values()))


def plan_stages(settings: Settings, stages: Stages) -> dict[str, dict[str, Any]]:
    """Return what `rlt plan --plan.json` says of every stage, by its name.

    The models that earlier stages make are not there yet: a student is planned as the base, a teacher as what
    the stage's config names. A student's rows are those that the teacher explains.
    """
    stages.start()
    plans = {}
    for name, line in settings.stages.items():
        _, *words = shlex.split(line)
        if not words:  # a warm-up that names a model
            continue
        if name != "warmup":
            field = "model.student" if "model.student" in STAGES[name][1] else "model.pretrained"
            words += [f"--{field}", settings.student_base]
        if name == "student":
            explained = pairwise(shlex.split(settings.stages["traces"]))
            words += [word for pair in explained if pair[0] in ROWS for word in pair]
        result = stages.folder / f"{name}.json"
        try:
            stages.run(["plan", *words, "--plan.json", str(result)], stages.folder / f"{name}.log")
        except StageError:
            if not result.exists():  # with it, the stage does not fit
                raise
        plans[name] = json.loads(result.read_text())
    return plans


def build_plan_table(settings: Settings, plans: dict[str, dict[str, Any]]) -> str:
    """Return a table of all stages, how often each runs, its memory and its time, and the sum."""
    from rlt_lightning.evaluation.results import render_table
    from rlt_lightning.modules.phases import GIB
    from rlt_lightning.plan.verdict import format_duration

    rows = [("stage", "runs", "steps", "GiB", "fits", "each", "all")]
    total = 0.0
    for name, plan in plans.items():
        number, seconds = count_runs(name, settings, plan), plan["run_seconds"]
        known = seconds is not None
        total += number * (seconds or 0.0)
        rows.append(
            (
                name,
                f"{number:.3g}",
                f"{plan['num_steps']:,}" if known else "?",
                f"{plan['peak_bytes'] / GIB:.1f}",
                "yes" if plan["fits"] else "no",
                format_duration(seconds) if known else "?",
                format_duration(number * seconds) if known else "?",
            )
        )
    unknown = [name for name, plan in plans.items() if plan["run_seconds"] is None]
    lines = [f"All rounds take about {format_duration(total)}, besides the starts of their stages."]
    if unknown:
        lines += [f"Without {', '.join(unknown)}: their rows are not on this machine."]
    lines += ["These are estimates from stated rates; `rlt plan` with a stage's own line shows more."]
    return "\n".join([render_table(rows), *lines])


def count_runs(name: str, settings: Settings, plan: dict[str, Any]) -> float:
    """Return how often a stage runs in all rounds; of the first student's training, its part of the rows."""
    rounds = settings.rounds
    if name == "student":
        step = plan["setup"]["step"]
        rows = (step["num_batches"] or 0) * step["prompts"]
        return rounds + (min(1.0, settings.student_rows / rows) if rows else 0.0)
    first = int(settings.student_rows > 0)  # whether round 0 has a student of its own
    return {"warmup": 1, "traces": 1 + rounds, "rlt": rounds, "evaluate": 1 + first + rounds}[name]


def build_rounds_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlt rounds`."""
    parser = argparse.ArgumentParser(prog="rlt rounds", allow_abbrev=False, description=HELP["rounds"][1])
    parser.add_argument(
        "--config", metavar="CONFIG", required=True, action="append", help="miniature_rounds, or files"
    )
    parser.add_argument("--output_dir", metavar="DIR", help="the folder; runs/rounds-<time> by default")
    for name, (kind, meaning) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=meaning)
    for name, (verb, _) in STAGES.items():
        meaning = f"command line of this stage: {verb} --config NAME ..."
        parser.add_argument(f"--stages.{name}", metavar="STR", help=meaning)
    add_switch(parser, "resume", "go on in --output_dir after its finished stages")
    add_switch(parser, "overwrite", "replace the rounds in --output_dir")
    return parser


def list_settings() -> list[str]:
    """Return the names of all settings, as in a config and on the command line."""
    return [*OPTIONS, *(f"stages.{name}" for name in STAGES)]


def list_given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a command line gives."""
    return {name: value for name in list_settings() if (value := getattr(options, name)) is not None}


def read_rounds_settings(configs: Sequence[str], given: dict[str, Any]) -> Settings:
    """Return the settings of configs, a later one over an earlier, and those that are given over all.

    Args:
        configs: Names of shipped configs, or files.
        given: Settings by their names in a config, such as `student.base` or `stages.rlt`.

    Raises:
        InputError: If a config is no mapping of settings, or a setting is unknown or wrong.
    """
    known = list_settings()
    found: dict[str, Any] = {}
    for config in configs:
        own = read_flat_settings(find_config(config))
        if unknown := [name for name in own if name not in known]:
            raise InputError(
                f"{config} may set {', '.join(sorted(known))}, but sets {unknown[0]}."
                f"{suggest_names(unknown[0], known)} `rlt rounds` takes configs such as miniature_rounds."
            )
        found |= own
    found |= given
    if "student.base" not in found:
        raise InputError("student.base must name the student before training, but no config does. Add it.")
    section = "stages."
    stages = {name.removeprefix(section): found.pop(name) for name in [*found] if name.startswith(section)}
    return Settings(stages, **{name.replace(".", "_"): value for name, value in found.items()})


def read_flat_settings(path: Path) -> dict[str, Any]:
    """Return what a config sets, by dotted names.

    Raises:
        InputError: If it is no YAML mapping.
    """
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InputError(f"{path} must be YAML, but is not: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict):
        raise InputError(f"{path} must hold settings of `rlt rounds`, but is a {type(read).__name__}.")
    found: dict[str, Any] = {}
    for name, value in read.items():
        section = isinstance(value, dict)
        found |= {f"{name}.{key}": one for key, one in value.items()} if section else {name: value}
    return found


def describe_end(found: dict[str, Any], settings: Settings, folder: Path) -> str:
    """Return where everything is, why the rounds have ended, and the commands to try next."""
    best = next(one for one in (found["start"], *found["rounds"]) if one["number"] == found["best"])
    made = len(found["rounds"])
    lines = []
    if made < settings.rounds:
        lines.append(f"Ended after round {made}, without a gain (--patience {settings.patience}).")
    lines += [
        f"  picture   {folder / 'rounds.svg'}",
        f"  figures   {folder / RESULT}, as a table: rounds.md",
        f"  teacher   {best['teacher']['model']}",
        f"  student   {best['student']['model']}",
        "",
        "Next:",
        "  ask the best student (docs/serving.md):",
        f"    {shlex.join(['vllm', 'serve', best['student']['model']])}",
    ]
    if found["rounds"]:
        runs = [f"{folder / 'round'}{one['number']}/teacher" for one in found["rounds"]]
        lines += ["  how the teachers learned:", f"    {shlex.join(['rlt', 'report', *runs])}"]
    return "\n".join(lines)
