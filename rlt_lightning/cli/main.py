"""Run a verb, and end with a message and an exit status if it fails.

2    a mistake of the user's: one line that says what to do
1    any other error: a traceback, or the message of the rank that failed first
130  interrupted by Ctrl-C, 143 terminated: one line that says how to resume
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import print_exception

from jsonargparse import auto_cli
from lightning.fabric.utilities.exceptions import MisconfigurationException

from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.checkpoints.folder import list_checkpoints
from rlt_lightning.cli.help import VERBS
from rlt_lightning.cli.parser import OneLineParser, end_with_mistake, split_words
from rlt_lightning.cli.shared_settings import CheckCommandLine, PlanCommandLine
from rlt_lightning.cli.stages import TRAINER_VERBS, RLTCommandLine
from rlt_lightning.commands.report import report
from rlt_lightning.engines import EngineError
from rlt_lightning.judging.judge import refuse_while_imported
from rlt_lightning.numerics.rewards import NonFiniteError
from rlt_lightning.run import ranks
from rlt_lightning.run.folder import FINISHED_ROWS, remove_empty_folders
from rlt_lightning.run.interrupt import TERMINATED, Interrupted, is_terminated
from rlt_lightning.teacher import explain
from rlt_lightning.trainer import quiet_third_parties
from rlt_lightning.types import InputError

# Errors whose message says what to do in one line; a traceback would add nothing.
MISTAKES = (InputError, NonFiniteError, EngineError, MisconfigurationException)

# The verbs without a trainer.
COMMANDS: dict[str, Callable[..., None]] = {
    "export": export_checkpoint,
    "report": report,
    "explain": explain,
}
# What a word without an option is.
BARE = {"report": "run_dir", "explain": "teacher"}

COMMAND_LINES = {
    "plan": PlanCommandLine,
    "check": CheckCommandLine,
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a verb with its options, by default those of the process, and return the exit status."""
    verb, *words = sys.argv[1:] if arguments is None else arguments
    quiet_third_parties()
    warnings.formatwarning = format_warning
    ranks.end_with_parent()
    try:
        refuse_while_imported()
        if verb in COMMANDS:
            return run_command(verb, words)
        command_line = COMMAND_LINES.get(verb, RLTCommandLine)(arguments)
    except Exception as error:
        only_prints = verb not in TRAINER_VERBS or "--help-all" in words
        if isinstance(error, BrokenPipeError) and only_prints:
            # The reader has closed the pipe; Python must not try to write the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        # A class that refuses its arguments raises a ValueError, and the parser wraps its message.
        refused = isinstance(error, ValueError) and "Does not validate against any of the Union" in str(error)
        ranks.let_first_speak()
        if refused or isinstance(error, MISTAKES):
            was_ended = isinstance(error, EngineError) and is_terminated()  # with its workers
            return end_with_mistake(str(error), TERMINATED if was_ended else 2)
        remove_empty_folders()
        if not ranks.is_one_of_several():
            raise
        print_exception(error)
        return end_with_mistake(f"{type(error).__name__}: {error}", status=1)
    except SystemExit as ending:
        if ending.code not in (1, 128 + signal.SIGINT, TERMINATED):  # 1: Lightning's, after Ctrl-C
            raise
        # It may come twice, or be sent by a launcher because another rank was faster.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        remove_empty_folders()
        terminated, together = ending.code == TERMINATED, isinstance(ending, Interrupted)
        if not ranks.find_global_rank():
            cause = "terminated" if terminated else "interrupted"
            where = f"{ending} " if together else ""
            print(f"rlt: {cause}. {where}{explain_resume(verb, words)}", file=sys.stderr)
        if terminated and not together:
            return TERMINATED  # the other ranks must notice
        return ranks.choose_status(TERMINATED if terminated else 128 + signal.SIGINT)
    return command_line.status


def run_command(verb: str, words: Sequence[str]) -> int:
    """Run a verb that has no trainer, and return the exit status."""
    usage, line, _ = VERBS[verb]
    auto_cli(
        COMMANDS[verb],
        args=name_bare_word(verb, words) if verb in BARE else list(words),
        as_positional=False,
        parser_class=OneLineParser,
        prog=f"rlt {verb}",
        usage=f"rlt {verb} {usage}",
        description=line,
    )
    return 0


def name_bare_word(verb: str, words: Sequence[str]) -> list[str]:
    """Return `RUN --output FILE` as the parser reads it: --run_dir=RUN --output FILE."""
    bare, options = split_words(words)
    if len(bare) > 1:
        raise InputError(f"rlt {verb} takes one run, but got {', '.join(bare)}. Put texts between quotes.")
    return [*(f"--{BARE[verb]}={word}" for word in bare), *(word for option in options for word in option)]


def explain_resume(verb: str, words: Sequence[str]) -> str:
    """Return what a stopped run has left, and the command that resumes it."""
    folder = RLTCommandLine.run_folder
    if folder is None:
        return "No checkpoint was written."
    command = build_resume_command(verb, words, folder)
    if any((folder / name).exists() for name in FINISHED_ROWS):
        return f"What is finished is kept. To resume: {command}"
    checkpoints = list_checkpoints(folder / "checkpoints")
    if not checkpoints:
        return "No checkpoint was written."
    return f"The newest checkpoint is {checkpoints[-1]}. To resume: {command}"


def build_resume_command(verb: str, words: Sequence[str], folder: Path) -> str:
    """Return the command that was given, with the options that resume the run in a folder.

    How a launcher, such as torchrun, has started it is not known: these are the words after it.
    """
    replaced = ("--output_dir", "--resume", "--overwrite", "--ckpt_path")
    options = [option for option in split_words(words)[1] if option[0].partition("=")[0] not in replaced]
    given = [word for option in options for word in option]
    return shlex.join(["rlt", verb, *given, "--output_dir", str(folder), "--resume", "true"])


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as a line: ours without the place in the code, which does not help a user."""
    if Path(__file__).parents[1] in Path(filename).parents:
        return f"rlt: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
