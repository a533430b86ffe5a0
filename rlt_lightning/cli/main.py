"""Run a verb, and turn what went wrong into one line and an exit status.

2    a mistake of the user's: one line that says what to do
1    anything else: a traceback, or the line of the rank that failed first
130  interrupted by Ctrl-C, 143 terminated: the line says how to resume
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from jsonargparse import auto_cli
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlt_lightning.callbacks.interrupt import Interrupted
from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.checkpoints.folder import list_checkpoints
from rlt_lightning.cli import ranks
from rlt_lightning.cli.help import HELPS, VERBS
from rlt_lightning.cli.next_steps import find_program
from rlt_lightning.cli.parser import OneLineParser, end_with_mistake, split_words
from rlt_lightning.cli.ranks import MISTAKES
from rlt_lightning.cli.shared_settings import (
    CheckCommandLine,
    ExplainCommandLine,
    PlanCommandLine,
    TeachCommandLine,
)
from rlt_lightning.cli.stages import TRAINER_VERBS, RLTCommandLine, SaveConfig
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.judging.judge import refuse_while_imported
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.python.environment import (
    TRAINER_DEFAULTS,
    find_global_rank,
    quiet_third_parties,
)
from rlt_lightning.report import report
from rlt_lightning.run.folder import FINISHED_ROWS, remove_empty_folders

# The verbs without a trainer.
COMMANDS: dict[str, Callable[..., None]] = {
    "export": export_checkpoint,
    "report": report,
}

COMMAND_LINES = {
    "plan": PlanCommandLine,
    "check": CheckCommandLine,
    "explain": ExplainCommandLine,
    "teach": TeachCommandLine,
}


def run() -> int:
    """Run the command line and return the exit status."""
    quiet_third_parties()
    warnings.formatwarning = format_warning
    ranks.start_watch(find_global_rank())
    try:
        refuse_while_imported()
        if sys.argv[1] in COMMANDS:
            return run_command(sys.argv[1])
        command_line = COMMAND_LINES.get(sys.argv[1], RLTCommandLine)(
            PolicyModule,
            StratosDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=OneLineParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except Exception as error:
        only_prints = sys.argv[1] not in TRAINER_VERBS or HELPS & {*sys.argv}
        if isinstance(error, BrokenPipeError) and only_prints:
            # The reader has closed the pipe; Python must not try to write the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        # A class that refuses its arguments raises a ValueError, and the parser wraps its message.
        refused = isinstance(error, ValueError) and "Does not validate against any of the Union" in str(error)
        if refused or isinstance(error, MISTAKES):
            return end_with_mistake(str(error))
        remove_empty_folders()
        ranks.fail_run(error)
        raise
    except Interrupted as stop:
        ranks.end_run()
        if find_global_rank():
            return 0  # rank 0 says how the run has ended
        print(f"rlt: interrupted. {stop} {explain_resume()}", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as ending:
        terminated = isinstance(ending, SIGTERMException)
        if not terminated and ending.code != 1:
            raise
        remove_empty_folders()
        ranks.fail_run(ending)
        print(f"rlt: {'terminated' if terminated else 'interrupted'}. {explain_resume()}", file=sys.stderr)
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    ranks.end_run()
    return command_line.status


def run_command(verb: str) -> int:
    """Run a verb that has no trainer, and return the exit status."""
    auto_cli(
        COMMANDS[verb],
        args=read_folders(sys.argv[2:]) if verb == "report" else sys.argv[2:],
        as_positional=False,
        parser_class=OneLineParser,
        prog=f"rlt {verb}",
        usage=f"rlt {verb} {VERBS[verb].usage}",
        description=VERBS[verb].line,
    )
    return 0


def read_folders(words: list[str]) -> list[str]:
    """Return `A B --output FILE` as the parser reads it: words that belong to no option are folders."""
    folders, options = split_words(words)
    others = [word for option in options for word in option]
    return [f"--run_dirs={json.dumps(folders)}", *others] if folders else others


def explain_resume() -> str:
    """Return what a stopped run has left, and the command that resumes it."""
    folder = RLTCommandLine.run_folder
    found = [] if folder is None else list_checkpoints(folder / "checkpoints")
    if folder is not None and any((folder / name).exists() for name in FINISHED_ROWS):
        return f"What is finished is kept. To resume: {build_resume_command(folder)}"
    if folder is None or not found:
        return "No checkpoint was written."
    return f"The newest checkpoint is {found[-1]}. To resume: {build_resume_command(folder)}"


def build_resume_command(folder: Path) -> str:
    """Return the command that was given, with the options that resume the run in a folder.

    How a launcher, such as torchrun, has started it is not known: these are the words after it.
    """
    _, options = split_words(sys.argv[2:])
    replaced = ("--output_dir", "--resume", "--overwrite", "--ckpt_path")
    kept = [word for option in options if option[0].partition("=")[0] not in replaced for word in option]
    return shlex.join([find_program(), sys.argv[1], *kept, "--output_dir", str(folder), "--resume", "true"])


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as a line: ours without the place in the code, which says nothing to a user."""
    if Path(__file__).parents[1] in Path(filename).parents:
        return f"rlt: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
