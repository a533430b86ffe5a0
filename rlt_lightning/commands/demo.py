"""`rlt demo`: compare, in minutes on two cores, what a student learns from a teacher before and after RLT.

    warm up a teacher ─┬─ RLT ─ explain, T 0.7 ─ train a student ─ test it
                       ├─────── explain, T 0.7 ─ the same
                       ├─────── explain, T 0 ─── the same
                       └─────── explain twice, T 0.7, keep the one with the higher reward ─ the same
                                                 the untrained student ─ test it

The last arm samples as many explanations as RLT does in its iterations and for its student together.

Every stage is an `rlt` command with a shipped config and a folder of its own. Two run side by side, each in a
process forked from one that has imported the package. This file imports PyTorch only when it needs it, so the
first line appears at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import runpy
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from rlt_lightning.run.jsonl import read_json_rows
from rlt_lightning.types import InputError

PRELOADED = [
    "rlt_lightning.cli.main",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",  # imports peft and with it bitsandbytes: seconds of every fit
]
LENGTH, HAZARD = 4, 0.75  # steps of a problem; the chance that a trace of the warm-up breaks off at a step
NUM_EXPLAINED, NUM_ASKED = 2560, 512  # problems that a teacher explains; that a student answers
NUM_ITERATIONS = 40  # of laptop/rlt, with 64 explanations each
NUM_CANDIDATES = 2  # of each problem: as many in all as RLT samples, in its iterations and for its student


class Arm(NamedTuple):
    """One way to make the explanations that a student learns from.

    Attributes:
        name: What the terminal calls it.
        teacher: Place of the teacher that writes them.
        options: Settings of `rlt predict`.
    """

    name: str
    teacher: str = "warmup"
    options: str = ""


BEST = f"--rollouts.num_traces {NUM_CANDIDATES} --distillation.select best_reward"
ARMS = {  # in the order in which they begin: what comes after RLT takes longest
    "rlt": Arm("RLT teacher, T 0.7", "rlt"),
    "warmup": Arm("warm-up teacher, T 0.7"),
    "greedy": Arm("warm-up teacher, T 0", options="--rollouts.sampling.temperature 0"),
    "best": Arm(f"warm-up teacher, best of {NUM_CANDIDATES}", options=BEST),
}
# Rows of the table.
ROWS = ("untrained", "warmup", "greedy", "best", "rlt")
UNTRAINED = "nothing (untrained student)"
SHOWN_PROBLEM = 3  # of those that are explained, the first being 0
ABOUT = """A teacher of 184,000 parameters learns to explain last-digit chains such as
"start 2, add 1, times 7, add 3?". Few of its explanations are right, most are
filler. Students, which begin as the same model, learn from what it writes:
before RLT, in three ways, and after RLT. Nothing is downloaded.

Stages, one line as each ends; with imports, the first takes half a minute:"""
CHEAPER = """RLT is not the cheapest way here: GRPO for right answers, and the untrained student's own
greedy answers as explanations, do at least as well. Neither is run here: docs/results.md."""


@dataclass(frozen=True)
class Stage:
    """An `rlt` command.

    Attributes:
        name: Place of its folder and of its log, such as rlt/teacher.
        needs: Name of the stage that must have ended before; empty: none.
        line: What the terminal says when it has ended.
        command: Its verb and options, without the folder.
    """

    name: str
    needs: str
    line: str
    command: str

    def list_words(self, folder: Path) -> list[str]:
        """Return the command line, without `rlt`."""
        return [*shlex.split(self.command), "--output_dir", str(folder / self.name), "--resume", "true"]


def run_demo(words: Sequence[str]) -> int:
    """Run `rlt demo` with these words, and return 0.

    Raises:
        InputError: If a stage fails.
    """
    folder = Path(build_demo_parser().parse_args(words).output_dir)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    print(ABOUT, flush=True)
    begin = time.perf_counter()
    write_problems(folder / "data")
    run_stages(list_stages(folder.resolve()), folder)
    show_explanations(folder)
    show_accuracies(folder)
    run = shlex.quote(f"{folder}/rlt/teacher")
    print(f"\nDone in {time.perf_counter() - begin:.0f} s. How it learned: rlt report {run}")
    print("Next, the RLT stage by itself, half a minute: rlt fit --config laptop/rlt")
    return 0


def build_demo_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlt demo`."""
    parser = argparse.ArgumentParser("rlt demo", allow_abbrev=False)
    parser.add_argument("--output_dir", default=f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    return parser


def write_problems(folder: Path) -> None:
    """Write the rows of all stages: traces of uneven quality, problems, and held-out problems."""
    from rlt_lightning.tasks.stepwise import Mixture, chain_rows

    mixture = Mixture(hazard=HAZARD)
    rows = {
        "warmup": chain_rows(2048, 1, "train", mixture, LENGTH),
        "rlt": chain_rows(512, 2, "train", mixture, LENGTH),
        "explained": chain_rows(NUM_EXPLAINED, 3, "train", mixture, LENGTH),
        "held_out": chain_rows(NUM_ASKED, 0, "test", mixture, LENGTH),
    }
    for name, some in rows.items():
        keys = ("question", "answer") if name == "held_out" else ("question", "solution", "reasoning_trace")
        text = "".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text)


# Stages


def list_stages(folder: Path) -> list[Stage]:
    """Return the stages; those of the trained teacher come first, since they take longest."""
    place = shlex.quote(str(folder))
    sets = shlex.quote(json.dumps({"chains": str(folder / "data/held_out.jsonl")}))
    answer = f"test --config laptop/evaluate --rollouts.sampling.temperature 0.7 --data.sets {sets}"
    warm_up = f"fit --config laptop/warmup --data.source {place}/data/warmup.jsonl"
    rlt = f"fit --config laptop/rlt --data.source {place}/data/rlt.jsonl"
    rlt += f" --model.teacher {place}/warmup/teacher/model"
    stages = [
        Stage("warmup/teacher", "", "warm-up teacher: learn from uneven explanations", warm_up),
        Stage("rlt/teacher", "warmup/teacher", f"RLT teacher: RLT, {NUM_ITERATIONS} iterations", rlt),
    ]
    for arm, (name, teacher, options) in ARMS.items():
        explain = f"predict --config laptop/generate --data.source {place}/data/explained.jsonl --data.seed 0"
        explain += f" --model.teacher {place}/{teacher}/teacher/model {options}"
        learn = f"fit --config laptop/sft --data.source {place}/{arm}/traces/distillation.jsonl"
        learn += " --data.seed 0 --trainer.max_epochs 1"
        asks = f"{answer} --model.pretrained {place}/{arm}/student/model"
        stages += [
            Stage(
                f"{arm}/traces", f"{teacher}/teacher", f"{name}: explain {NUM_EXPLAINED} problems", explain
            ),
            Stage(f"{arm}/student", f"{arm}/traces", f"{name}: its student learns from them", learn),
            Stage(f"{arm}/answers", f"{arm}/student", f"{name}: answer {NUM_ASKED} problems", asks),
        ]
    asks = f"{answer} --model.pretrained miniature"
    return [*stages, Stage("untrained/answers", "", f"{UNTRAINED}: answer {NUM_ASKED} problems", asks)]


def run_stages(stages: Sequence[Stage], folder: Path) -> None:
    """Run stages, as many side by side as there are cores; what an earlier demo has finished is kept.

    Args:
        stages: The stages; an earlier one starts first where several can.
        folder: Folder of theirs, and of their logs.

    Raises:
        InputError: If a stage fails. The others are ended.
    """
    # One thread each, so that two run side by side and the same figures come out on every machine.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["SLURM_JOB_NAME"] = "interactive"  # each is one process, whatever a job has tasks for
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    waiting = {stage.name: stage for stage in stages}
    running: dict[Stage, ForkServerProcess] = {}
    begin = time.perf_counter()
    try:
        while waiting or running:
            busy = {*waiting, *(stage.name for stage in running)}
            ready = [stage for stage in waiting.values() if stage.needs not in busy]
            for stage in ready[: (os.cpu_count() or 1) - len(running)]:
                log = folder / f"{stage.name}.log"
                log.parent.mkdir(exist_ok=True)
                words = waiting.pop(stage.name).list_words(folder)
                running[stage] = context.Process(target=run_rlt, args=(words, log))
                running[stage].start()
            connection.wait([process.sentinel for process in running.values()])
            for stage in [stage for stage, process in running.items() if process.exitcode is not None]:
                if status := running.pop(stage).exitcode:
                    log = folder / f"{stage.name}.log"
                    raise InputError(f"{stage.line} ended with {status}. Look at the end of its log, {log}.")
                print(f"  {time.perf_counter() - begin:5.1f} s  {stage.line}", flush=True)
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
    """Print one problem as the teacher explains it before and after RLT, with the terms of its reward."""
    explained = {arm: [*read_json_rows(folder / arm / "traces/traces.jsonl")] for arm in ("warmup", "rlt")}
    first = explained["rlt"][SHOWN_PROBLEM]
    print(f"\n{first['question']}   {first['solution']}")
    for arm, rows in explained.items():
        row = next(row for row in rows if row["question"] == first["question"])
        solution, kl = row["solution_reward"], row["kl_reward"]
        print(f"\n  {ARMS[arm].name}: reward {row['reward']:.2f} (solution {solution:.2f}, KL {kl:.2f})")
        print(textwrap.fill(row["reasoning_trace"], 78, initial_indent="    ", subsequent_indent="    "))


def show_accuracies(folder: Path) -> None:
    """Print what the students solve."""
    print(f"\nHeld-out problems solved by a student that learned from …, in % of {NUM_ASKED}:\n")
    for row in ROWS:
        accuracy = read_accuracy(folder / row / "answers")
        name = ARMS[row].name if row in ARMS else UNTRAINED
        print(f"  {name:<31} {100 * accuracy:5.0f}  {'#' * round(30 * accuracy)}".rstrip())
    print(f"\n{textwrap.fill(f'One seed, at most ± 4 points (95 %). {CHEAPER}', 80)}")


def read_accuracy(folder: Path) -> float:
    """Return the part of the held-out problems that `rlt test` found solved."""
    accuracy: float = json.loads((folder / "evaluation.json").read_text())["sets"]["chains"]["pass_at_1"]
    return accuracy
