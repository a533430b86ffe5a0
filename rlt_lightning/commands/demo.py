"""`rlt demo`: what a student learns where only the rows hold what it lacks, in minutes on two cores.

    warm up a teacher ─┬─ RLT ─ explain, T 0 ─────────────────────────── train a student ─ test it
                       └─ explain each row 3 times ─┬─ the first ──────────── the same
                                                    ├─ the best quarter ───── the same
                                                    └─ the best train the teacher, which explains ─ the same
                                    GRPO of the student for right answers, no teacher ─ test it
                                                                the untrained student ─ test it

The best have the highest reward. All ways but the first sample as much: 3 explanations, or answers, a row.

Every stage is an `rlt` command with a shipped config and a folder. Two run side by side, each in a
process forked from one that has imported the package. This file imports PyTorch only when it needs it, so the
first line appears at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
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

from rlt_lightning.run.jsonl import format_line, read_json_rows
from rlt_lightning.types import InputError

PRELOADED = [
    "rlt_lightning.cli.main",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",  # imports peft and with it bitsandbytes: seconds of every fit
]
SEED = 0  # of the facts, problems and traces
NUM_NAMES, NUM_WARM = 128, 16  # names that the rows use; of them, those in the traces of the warm-up
NUM_RAW, NUM_ROWS, NUM_ASKED = 32, 1024, 256  # traces of the warm-up; rows to explain; held-out problems
NUM_CANDIDATES = 3  # explanations of each row: as many in all as RLT samples, those for its student included
NUM_ITERATIONS = 32  # of RLT, with 64 explanations each
NUM_REWARDED = 48  # iterations of GRPO without a teacher, with 64 answers each
BEST_PART = 4  # the best quarter of the rows' number
THRESHOLD = -0.7  # nats of reward; from all above it the teacher learns in expert iteration
NUM_STEPS = 128  # of 16 explanations, of students and of that teacher


# What students learn from, and where it is written, below the folder of the demo.
WAYS = {
    "untrained": ("nothing (untrained student)", ""),
    "grpo": ("GRPO for right answers, no teacher", ""),
    "before": ("the teacher before RLT", "warmup/traces/before.jsonl"),
    "best": ("its best quarter by the reward", "warmup/traces/best.jsonl"),
    "expert": ("the teacher after expert iteration", "expert/traces/distillation.jsonl"),
    "rlt": ("the teacher after RLT, greedy", "rlt/traces/distillation.jsonl"),
}
# Options of the commands: problems, tokens of an explanation and of an answer, steps of fine-tuning, T 0.
ROWS = "--data.source [@data/rows.jsonl]"
SHORT, LONG = (f"--rollouts.sampling.max_completion_length {length}" for length in (76, 108))
STEPS = f"--data.prompts_per_step 16 --trainer.max_steps {NUM_STEPS} --trainer.max_epochs -1"
GREEDY = "--rollouts.sampling.temperature 0"
STUDENT = "--model.student named-chains-student"
EXPLAIN = f"predict --config laptop/generate {SHORT} {ROWS} {STUDENT} --model.teacher"
# Name, what must have ended before, and what the terminal says then; below it the command. @ begins a path
# in the folder of the demo. Stages of the trained teacher come first, since they take longest.
TEACHERS = f"""\
warmup/teacher; ; teacher: learns from a few uneven explanations
  fit --config laptop/warmup --data.source [@data/warmup.jsonl] --model.pretrained named-chains-teacher
  --trainer.max_epochs 4
rlt/teacher; warmup/teacher; teacher: RLT, {NUM_ITERATIONS} iterations
  fit --config laptop/rlt {SHORT} {ROWS} {STUDENT} --model.teacher @warmup/teacher/model
  --model.optimizer.lr 4e-4 --trainer.max_steps {NUM_ITERATIONS}
warmup/traces; warmup/teacher; teacher before RLT: explains {NUM_ROWS} rows {NUM_CANDIDATES} times
  {EXPLAIN} @warmup/teacher/model --rollouts.num_traces {NUM_CANDIDATES} --distillation.select all
expert/teacher; warmup/traces; teacher: expert iteration, learns from its best
  fit --config laptop/warmup --data.source [@warmup/traces/expert.jsonl] {STEPS}
  --model.pretrained @warmup/teacher/model
rlt/traces; rlt/teacher; {WAYS["rlt"][0]}: explains {NUM_ROWS} rows
  {EXPLAIN} @rlt/teacher/model {GREEDY}
expert/traces; expert/teacher; {WAYS["expert"][0]}: explains {NUM_ROWS} rows
  {EXPLAIN} @expert/teacher/model {GREEDY}
grpo/student; ; {WAYS["grpo"][0]}
  fit --config laptop/grpo {LONG} {ROWS} --trainer.max_steps {NUM_REWARDED}
  --model.teacher named-chains-student"""
LEARN = f"fit --config laptop/sft {STEPS} --model.pretrained named-chains-student --model.optimizer.lr 1e-3"
ANSWER = f'test --config laptop/evaluate {LONG} {GREEDY} --data.sets {{"chains":@data/held_out.jsonl}}'
SHOWN_PROBLEM = 3  # of those that are explained, the first being 0
ABOUT = """Chains such as "start 4, add 2, blik, times 3, dorf, add 1, quern?". What blik adds
stands nowhere but in the rows' solutions, which give the digit after each name. A
teacher of 200,000 parameters sees them; of its explanations one in ten is right,
most say nothing. Students learn from what it writes, before RLT and after it, and
answer new problems of the same names. Nothing is downloaded.

Stages, one line as each ends; with imports, the first takes half a minute:"""
CHEAPER = """The reward does it. In expert iteration the teacher learns from its explanations
with a high reward, without RL: on three seeds as good as RLT, or better. Where a student finds
right answers by itself, no teacher is needed: docs/results.md."""


@dataclass(frozen=True)
class Stage:
    """An `rlt` command.

    Attributes:
        name: Place of its folder and of its log, such as rlt/teacher.
        needs: Name of the stage that must have ended before; empty: none.
        line: What the terminal says when it has ended.
        command: Its verb and options, without the folder; `@data/rows.jsonl` is a path.
    """

    name: str
    needs: str
    line: str
    command: str

    def list_words(self, folder: Path) -> list[str]:
        """Return the command line, without `rlt`."""

        def find(match: re.Match[str]) -> str:
            path = str(folder / match[1])
            return json.dumps(path) if match.start() else path  # in a list, it is quoted

        words = [re.sub(r"@([\w/.]+)", find, word) for word in self.command.split()]
        return [*words, "--output_dir", str(folder / self.name), "--resume", "true"]


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
    run_stages(list_stages(), folder.resolve())
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
    from rlt_lightning.tasks.named_chains import build_mixture, draw_facts, named_chain_rows

    facts = draw_facts(SEED, NUM_NAMES)
    shown = {name: facts[name] for name in [*facts][:NUM_WARM]}
    rows = {
        "warmup": named_chain_rows(NUM_RAW, shown, 1, "train", build_mixture(0.10, 0.60, 0.15)),
        "rows": named_chain_rows(NUM_ROWS, facts, 3, "train"),
        "held_out": named_chain_rows(NUM_ASKED, facts, 0, "test"),
    }
    columns = {"warmup": ("reasoning_trace", "solution"), "rows": ("solution",), "held_out": ("answer",)}
    for name, some in rows.items():
        kept = [{key: row[key] for key in ("question", *columns[name])} for row in some]
        (folder / f"{name}.jsonl").write_text("".join(map(format_line, kept)))


# Stages


def list_stages() -> list[Stage]:
    """Return the stages; where several can begin, an earlier one does."""
    stages = []
    for text in re.split(r"\n(?! )", TEACHERS):
        head, *command = text.split("\n  ")
        name, needs, line = head.split("; ")
        stages.append(Stage(name, needs, line, " ".join(command)))
    for way, (name, traces) in reversed(WAYS.items()):
        model, needs = "named-chains-student", ""
        if way != "untrained":
            model, needs = f"@{way}/student/model", f"{way}/student"
        if traces:
            learn = f"{LEARN} --data.source [@{traces}]"
            stages.append(Stage(needs, traces.rpartition("/")[0], f"{name}: its student learns", learn))
        answer = f"{ANSWER} --model.pretrained {model}"
        stages.append(Stage(f"{way}/answers", needs, f"{name}: {NUM_ASKED} answers", answer))
    return stages


def choose_traces(folder: Path) -> None:
    """Write what students, and the teacher in expert iteration, learn from.

    Args:
        folder: Folder of the teacher's explanations before RLT, `NUM_CANDIDATES` of each row.
    """
    rows = [*read_json_rows(folder / "traces.jsonl")]
    ranked = sorted(rows, key=lambda row: -row["reward"])
    chosen = {
        "before": rows[::NUM_CANDIDATES],
        "best": ranked[: NUM_ROWS // BEST_PART],
        # The new teacher's explanations are samples too, one a row.
        "expert": [row for row in ranked if row["reward"] > THRESHOLD and row["trace"] < NUM_CANDIDATES - 1],
    }
    for name, some in chosen.items():
        (folder / f"{name}.jsonl").write_text("".join(map(format_line, some)))


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
                if stage.name == "warmup/traces":
                    choose_traces(folder / stage.name)
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
    after = [*read_json_rows(folder / "rlt/traces/traces.jsonl")][SHOWN_PROBLEM]
    rows = read_json_rows(folder / "warmup/traces/before.jsonl")
    before = next(row for row in rows if row["question"] == after["question"])
    print(f"\n{after['question']}   {after['solution']}")
    for when, row in (("before", before), ("after", after)):
        solution, kl = row["solution_reward"], row["kl_reward"]
        print(f"\n  {when} RLT: reward {row['reward']:.2f} (solution {solution:.2f}, KL {kl:.2f})")
        print(textwrap.fill(row["reasoning_trace"], 78, initial_indent="    ", subsequent_indent="    "))


def show_accuracies(folder: Path) -> None:
    """Print what the students solve."""
    print(f"\nHeld-out problems solved, in % of {NUM_ASKED}, by\na student that learned from …\n")
    for way, (name, _) in WAYS.items():
        results = json.loads((folder / way / "answers" / "evaluation.json").read_text())
        accuracy = results["sets"]["chains"]["pass_at_1"]
        print(f"  {100 * accuracy:3.0f}  {name:<35} {'#' * round(30 * accuracy)}".rstrip())
    print(f"\n{textwrap.fill(f'One seed, at most ± 6 points (95 %), greedy answers. {CHEAPER}', 80)}")
