"""`rlt demo`: a student learns more from a teacher that RLT has trained; minutes on two CPU cores."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from re import Pattern

from rlt_lightning.demo.arms import QUICK_ARMS, VARIATIONS, Arms, Setting
from rlt_lightning.demo.figures import NAMES, collect, list_failures
from rlt_lightning.demo.page import (
    build_scores,
    compare_students,
    name_student,
    show_explanations,
    write_results,
)
from rlt_lightning.demo.picture import draw_picture
from rlt_lightning.demo.run import CLOCK, make_folder, read_arms, read_seeds, run_arms
from rlt_lightning.demo.stages import StageError, Stages
from rlt_lightning.run.folder import clear_folder
from rlt_lightning.types import InputError

STAGES = {  # the folder of a stage -> what happens there
    "teacher": "RLT, 40 iterations",
    "traces": "explain 512 problems",
    "samples": "explain one problem eight times",
    "student": "learn from these explanations",
    "sampled": "answer 512 held-out problems",
    "greedy": "answer them again, without sampling",
}
CONTROL = """Greedy answers differ less: sampling shows how sure a student is of each step.
Traces that the warm-up teacher writes greedily, without any RL, teach nearly as
well here: docs/finding.md."""
OF_STUDENTS = ("student", "sampled", "greedy")
# All that a demo writes into its folder.
ENTRIES = re.compile(
    rf"finding\.(json|md|svg)|report\.(html|log)|{CLOCK}(\.tmp)?|{'|'.join([Setting.name, *VARIATIONS])}"
)
ABOUT = """A teacher of 184,000 parameters learns to explain last-digit chains such as
"start 2, add 1, times 7?". Students, which begin as the same model, learn from what
it writes: one before RLT has trained it, one after. Nothing is downloaded."""


def run_demo(words: Sequence[str]) -> int:
    """Run `rlt demo` with these words and return the exit status.

    It is 1 if a stage fails or the finding does not show, 2 for a mistake of the user's.
    """
    options = build_demo_parser().parse_args(words)

    def run_in(folder: Path) -> int:
        seeds, arms = read_seeds(options.seeds, (0,)), read_arms(options.arms, QUICK_ARMS)
        open_folder(folder, options.resume == "true", options.overwrite == "true")
        return run(folder, seeds, arms)

    return run_stages("demo", words, options.output_dir, run_in)


def run_stages(verb: str, words: Sequence[str], output_dir: str | None, run_in: Callable[[Path], int]) -> int:
    """Run a verb that runs stages in a folder, and return the exit status.

    Args:
        verb: The verb.
        words: Its command line, which the line on how to resume repeats.
        output_dir: The folder that the user named; None: a new one.
        run_in: Runs it in a folder and returns the status. InputError and StageError become a line.
    """
    folder = Path(output_dir or f"runs/{verb}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        return run_in(folder)
    except (InputError, StageError) as error:
        return end_with_line(error)
    except KeyboardInterrupt:
        resume = shlex.join(["rlt", verb, *drop_switches(words, folder), "--resume", "true"])
        print(f"\nrlt: interrupted. Finished stages are kept. To resume: {resume}", file=sys.stderr)
        return 128 + signal.SIGINT


def end_with_line(error: InputError | StageError) -> int:
    """Print what went wrong as a line, and return the exit status."""
    print(f"rlt: error: {error}", file=sys.stderr)
    return 2 if isinstance(error, InputError) else 1


def build_demo_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlt demo`."""
    parser = argparse.ArgumentParser(
        prog="rlt demo",
        allow_abbrev=False,
        description="Show that a student learns more from a teacher that RLT has trained, in one to two "
        "minutes on two idle CPU cores. It writes finding.json, a picture, a page, and every stage.",
    )
    parser.add_argument("--output_dir", metavar="DIR", help="the folder; runs/demo-<time> by default")
    parser.add_argument("--seeds", nargs="*", default=[], help="such as 10 11 12; 0 by default")
    parser.add_argument(
        "--arms", nargs="*", default=[], help=f"what is compared; {' '.join(QUICK_ARMS)} by default"
    )
    add_switch(parser, "resume", "continue the demo in --output_dir after its finished stages")
    add_switch(parser, "overwrite", "replace the demo in --output_dir")
    return parser


def add_switch(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """Add an option that is true or false, as those of other verbs; alone it means true."""
    parser.add_argument(
        f"--{name}", nargs="?", const="true", default="false", choices=("true", "false"), help=meaning
    )


def drop_switches(words: Sequence[str], folder: Path) -> list[str]:
    """Return the options of a command line that --resume continues, with the folder that it wrote to."""
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in ("--resume", "--overwrite", "--output_dir")
        if not skipping:
            kept.append(word)
    return ["--output_dir", str(folder), *kept]


def open_folder(folder: Path, resume: bool, overwrite: bool, own: Pattern[str] = ENTRIES) -> None:
    """Make the folder, or refuse to mix two runs in one.

    Args:
        folder: The folder.
        resume: Whether what lies there goes on.
        overwrite: Whether it may be deleted.
        own: Names of all that such a run writes into its folder.

    Raises:
        InputError: If it holds anything and neither was asked for, or files that no such run writes.
    """
    make_folder(folder)
    if not resume and any(folder.iterdir()):
        clear_folder(folder, overwrite, own.fullmatch)


def run(folder: Path, seeds: list[int], arms: list[str]) -> int:
    """Run the demo, write its files and print what came out; return 1 if the finding does not show."""
    stages = Stages(folder, describe=lambda name: describe_stage(name, len(seeds) > 1))
    ones = [Arms(stages, Setting(), seed) for seed in seeds]
    print(ABOUT)
    print("\nStages, one line as each ends; with imports, the first takes half a minute:", flush=True)
    _, seconds = run_arms(stages, ones, arms)
    figures = collect(ones, [], arms, False, seconds)
    page = write_results(figures, ones[0])
    draw_picture(figures, stages.folder / "finding.svg")
    show_explanations(ones[0])
    print(f"\n{build_scores(figures, Setting.num_test)}")
    wrong = list_failures(figures)
    if not wrong and {"warmup", "rlt"} <= set(arms):
        print(f"\n{compare_students(figures)}")
        print(CONTROL)
    print(f"\nDone in {seconds:.0f} s:")
    print(f"  picture   {folder / 'finding.svg'}")
    if page:
        print(f"  page      {folder / page.name}   (how the teacher learned)")
    print(f"  figures   {folder / 'finding.json'}, as tables: finding.md")
    for sentence in wrong:
        print(f"rlt: the finding does not show: {sentence}.", file=sys.stderr)
    print(propose_next(ones[0], folder, arms))
    return int(bool(wrong))


def describe_stage(name: str, several: bool) -> str:
    """Return a line for a stage, by its folder: SETTING/SEED/ARM/STAGE."""
    _, seed, arm, stage = name.split("/")
    who = name_student(arm) if stage in OF_STUDENTS else NAMES[arm]
    what = "learn from uneven explanations" if (arm, stage) == ("warmup", "teacher") else STAGES[stage]
    return f"{seed}: {who}: {what}" if several else f"{who}: {what}"


def propose_next(one: Arms, folder: Path, arms: Sequence[str]) -> str:
    """Return the commands to try next."""
    best = "rlt" if "rlt" in arms else "warmup"
    place = folder / one.name / best
    lines = ["", "Next:"]
    if best in arms:
        lines += [
            "  the trained teacher explains a problem of its training:",
            f"    {shlex.join(['rlt', 'teach', f'{place}/teacher', '--row', '1'])}",
        ]
    return "\n".join(
        [
            *lines,
            "  the RLT stage by itself, half a minute; its last lines name the stage after it:",
            "    rlt fit --config quickstart",
            "  all experiments: SmolLM2 on a laptop, 7B on GPUs, your own rows:",
            "    rlt configs",
        ]
    )
