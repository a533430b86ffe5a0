"""`rlt demo`: a student learns more from a teacher that RLT has trained; minutes on two CPU cores.

    warm up a teacher ─┬─ RLT ─ explain 512 problems ─ train a student ─ let it answer, sampled and greedily
                       └─────── explain 512 problems ─ train a student ─ let it answer, sampled and greedily
                                                       the untrained student ─ the same

Every stage is an `rlt` command with a shipped config and a folder of its own. Two run side by side, each in a
process forked from one that has the imports. Nothing here imports PyTorch at its top: the first line appears
at once.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from rlt_lightning.run.jsonl import read_json_rows
from rlt_lightning.run.shipped import list_shipped_configs

RESULTS = {
    "fit": "model/config.json",
    "predict": "README.md",
    "test": "evaluation.json",
}  # what a verb writes last
PRELOADED = [
    "rlt_lightning.cli.main",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",  # imports peft and with it bitsandbytes: seconds of every fit
]
NUM_PROBLEMS = 512  # that a teacher explains, and that a student answers
TEACHERS = {"warmup": "warm-up teacher", "rlt": "RLT teacher"}
STUDENTS = {"untrained": "untrained student", **{arm: f"{name}'s student" for arm, name in TEACHERS.items()}}
ABOUT = """A teacher of 184,000 parameters learns to explain last-digit chains such as
"start 2, add 1, times 7?". Students, which begin as the same model, learn from what
it writes: one before RLT has trained it, one after. Nothing is downloaded.

Stages, one line as each ends; with imports, the first takes half a minute:"""
CONTROL = """Greedy answers differ less: sampling shows how sure a student is of each step.
Traces that the warm-up teacher writes greedily, without any RL, teach nearly as
well here: research/finding.md of the repository."""


class StageError(Exception):
    """A stage has failed; the message names it, its log, and the log's last lines."""


@dataclass(frozen=True)
class Stage:
    """An `rlt` command.

    Attributes:
        name: Place of its folder and of its log, such as rlt/teacher.
        line: What the terminal says when it has ended.
        words: The command, without `rlt`.
        result: File that it writes last.
        needs: Name of the stage that must have ended before; empty: none.
    """

    name: str
    line: str
    words: tuple[str, ...]
    result: Path
    needs: str


def run_demo(words: Sequence[str]) -> int:
    """Run `rlt demo` with these words and return the exit status.

    It is 1 if a stage fails or the finding does not show, 2 for a mistake of the user's.
    """
    options = build_demo_parser().parse_args(words)
    folder = Path(options.output_dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").mkdir(exist_ok=options.resume == "true")
    except OSError as error:
        remedy = "Choose a new folder, or add --resume true to continue a demo in it."
        print(f"rlt: error: --output_dir must be a new folder, but {error}. {remedy}", file=sys.stderr)
        return 2
    print(ABOUT, flush=True)
    begin = time.perf_counter()
    try:
        write_problems(folder / "data")
        run_stages(list_stages(folder.resolve()), folder)
    except StageError as error:
        print(f"rlt: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        resume = f"rlt demo --output_dir {shlex.quote(str(folder))} --resume true"
        print(f"\nrlt: interrupted. To resume: {resume}", file=sys.stderr)
        return 128 + signal.SIGINT
    show_explanations(folder)
    is_shown = show_accuracies(folder)
    print(f"\nDone in {time.perf_counter() - begin:.0f} s. How the teacher learned: {folder / 'report.html'}")
    print("Next, the RLT stage by itself, half a minute: rlt fit --config laptop/rlt")
    return int(not is_shown)


def build_demo_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlt demo`."""
    parser = argparse.ArgumentParser(
        prog="rlt demo", allow_abbrev=False, description=ABOUT.partition("\n\n")[0]
    )
    parser.add_argument("--output_dir", metavar="DIR", help="the folder; runs/demo-<time> by default")
    # With a value as in other verbs; alone it means true.
    values, meaning = ("true", "false"), "continue the demo in --output_dir"
    parser.add_argument("--resume", nargs="?", const="true", default="false", choices=values, help=meaning)
    return parser


def write_problems(folder: Path) -> None:
    """Write the rows of all stages: traces of uneven quality, problems, and held-out problems."""
    from rlt_lightning.tasks.stepwise import Mixture, chain_rows

    rows = {
        "warmup": chain_rows(2048, 1, "train", Mixture()),
        "rlt": chain_rows(512, 2, "train", Mixture()),
        "explained": chain_rows(NUM_PROBLEMS, 3, "train", Mixture()),
        "held_out": chain_rows(NUM_PROBLEMS, 0, "test", Mixture()),
    }
    for name, some in rows.items():
        keys = ("question", "answer") if name == "held_out" else ("question", "solution", "reasoning_trace")
        text = "".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text)


# Stages


def list_stages(folder: Path) -> list[Stage]:
    """Return the stages; those of the trained teacher come first, since they take longest."""
    data = folder / "data"
    sets = json.dumps({"chains": str(data / "held_out.jsonl")})

    def build(line: str, name: str, needs: str, verb: str, config: str, **options: object) -> Stage:
        words = [verb, "--config", str(list_shipped_configs()[config])]
        words += ["--output_dir", str(folder / name), "--resume", "true"]
        for option, value in options.items():
            words += [f"--{option.replace('__', '.')}", str(value)]
        return Stage(name, line, tuple(words), folder / name / RESULTS[verb], needs)

    rows = {"data__source": data / "warmup.jsonl"}
    line = "warm-up teacher: learn from uneven explanations"
    stages = [build(line, "warmup/teacher", "", "fit", "laptop/warmup", **rows)]
    rows = {"data__source": data / "rlt.jsonl", "model__teacher": folder / "warmup/teacher/model"}
    line = "RLT teacher: RLT, 40 iterations"
    stages += [build(line, "rlt/teacher", "warmup/teacher", "fit", "laptop/rlt", **rows)]
    for arm, name in TEACHERS.items():
        place = folder / arm
        rows = {"data__source": data / "explained.jsonl", "model__teacher": place / "teacher/model"}
        line, needs = f"{name}: explain {NUM_PROBLEMS} problems", f"{arm}/teacher"
        stages += [build(line, f"{arm}/traces", needs, "predict", "laptop/generate", data__seed=0, **rows)]
        rows = {"data__source": place / "traces/distillation.jsonl"}
        line, needs = f"{name}'s student: learn from these explanations", f"{arm}/traces"
        stages += [build(line, f"{arm}/student", needs, "fit", "laptop/sft", data__seed=0, **rows)]
    for arm, name in STUDENTS.items():
        model, needs = (
            ("miniature", "") if arm == "untrained" else (folder / arm / "student/model", f"{arm}/student")
        )
        for how, temperature, what in (
            ("sampled", 0.7, f"answer {NUM_PROBLEMS} held-out problems"),
            ("greedy", 0.0, "answer them again, without sampling"),
        ):
            options = {"model__pretrained": model, "rollouts__sampling__temperature": temperature}
            line = f"{name}: {what}"
            stages += [
                build(line, f"{arm}/{how}", needs, "test", "laptop/evaluate", data__sets=sets, **options)
            ]
    page = folder / "report.html"
    words = ("report", str(folder / "rlt/teacher"), "--output", str(page))
    return [
        *stages,
        Stage("rlt/report", "RLT teacher: the page of how it learned", words, page, "rlt/teacher"),
    ]


def run_stages(stages: Sequence[Stage], folder: Path) -> None:
    """Run stages, as many side by side as there are cores; pass over finished ones.

    Args:
        stages: The stages; an earlier one starts first where several can.
        folder: Folder of their logs.

    Raises:
        StageError: If a stage fails. The others are ended.
    """
    # One thread each, so that two run side by side and the same figures come out on every machine.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    waiting = {stage.name: stage for stage in stages if not stage.result.exists()}
    running: dict[Stage, ForkServerProcess] = {}
    begun: dict[Stage, float] = {}
    try:
        while waiting or running:
            busy = {*waiting, *(stage.name for stage in running)}
            ready = [stage for stage in waiting.values() if stage.needs not in busy]
            for stage in ready[: (os.cpu_count() or 1) - len(running)]:
                log = folder / f"{stage.name}.log"
                log.parent.mkdir(exist_ok=True)
                running[stage] = context.Process(target=run_rlt, args=(waiting.pop(stage.name).words, log))
                running[stage].start()
                begun[stage] = time.perf_counter()
            connection.wait([process.sentinel for process in running.values()])
            for stage in [stage for stage, process in running.items() if process.exitcode is not None]:
                status = running.pop(stage).exitcode
                if status:
                    log = folder / f"{stage.name}.log"
                    end = "\n".join(log.read_text().splitlines()[-5:])
                    raise StageError(f"rlt {stage.words[0]} ended with {status}. Its log is {log}:\n{end}")
                print(f"  {time.perf_counter() - begun[stage]:5.1f} s  {stage.line}", flush=True)
    finally:
        for process in running.values():
            process.terminate()


def run_rlt(words: Sequence[str], log: Path) -> None:
    """Run `rlt` with these words in this process, which ends when the one that started it has ended."""
    enter_stage(log)
    sys.argv = ["rlt", *words]
    runpy.run_module("rlt_lightning", run_name="__main__")


def enter_stage(log: Path) -> None:
    """Send the output of this process to a log, and end it when the process that started it has ended."""
    from rlt_lightning.judging.judge import end_with_run

    threading.Thread(target=end_with_run, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)


# What came out


def show_explanations(folder: Path) -> None:
    """Print how each teacher explains the second problem, and how many of its explanations are right."""
    from rlt_lightning.tasks.stepwise import chain_kind

    for arm, name in TEACHERS.items():
        rows = [*read_json_rows(folder / arm / "traces/traces.jsonl")]
        right = [chain_kind(row["question"], row["reasoning_trace"])[0] == "steps" for row in rows]
        if arm == "warmup":
            print(f"\n{rows[1]['question']}   {rows[1]['solution']}")
        print(
            f"\n  {name}, {100 * sum(right) / len(right):.0f} % of whose explanations have every step right:"
        )
        print(textwrap.fill(rows[1]["reasoning_trace"], 78, initial_indent="    ", subsequent_indent="    "))


def show_accuracies(folder: Path) -> bool:
    """Print what the students solve; return whether the RLT teacher's is ahead by more than its error."""
    print(f"\nHeld-out problems solved, in % of {NUM_PROBLEMS} (± 95 %; one seed):\n")
    print(f"  {'answers of the student':<40} {'T 0.7':>11} {'greedy':>7}")
    accuracies = {}
    for arm, name in STUDENTS.items():
        sampled, greedy = (read_accuracy(folder / arm / how) for how in ("sampled", "greedy"))
        half = 1.96 * math.sqrt(sampled * (1 - sampled) / NUM_PROBLEMS)
        accuracies[arm] = (100 * sampled, 100 * half)
        figure = f"{100 * sampled:.1f} ± {100 * half:.1f}"
        print(f"  {name:<40} {figure:>11} {100 * greedy:>7.1f}  {'#' * round(15 * sampled)}".rstrip())
    (before, error_before), (after, error_after) = accuracies["warmup"], accuracies["rlt"]
    gain, error = after - before, math.hypot(error_before, error_after)
    print(f"\nRLT's student solves {gain:.1f} ± {error:.1f} points more than that of the warm-up teacher.")
    print(CONTROL)
    return gain > error


def read_accuracy(folder: Path) -> float:
    """Return the part of the held-out problems that `rlt test` found solved."""
    found: float = json.loads((folder / "evaluation.json").read_text())["sets"]["chains"]["pass_at_1"]
    return found
