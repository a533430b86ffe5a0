"""Run a verb, and end with a message and an exit status if it fails.

2    a mistake of the user's: one line that says what to do
1    any other error: a traceback
130  interrupted by Ctrl-C, 143 terminated: one line that says where to resume
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import auto_cli
from lightning.fabric.utilities.exceptions import MisconfigurationException

from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.cli.parser import ConfigParser
from rlt_lightning.cli.shared_settings import COMMANDS as SETTINGS_COMMANDS
from rlt_lightning.cli.shared_settings import SettingsCommandLine
from rlt_lightning.cli.stages import RLTCommandLine
from rlt_lightning.commands.report import report
from rlt_lightning.engines import EngineError
from rlt_lightning.judging.judge import refuse_while_imported
from rlt_lightning.numerics.finite import NonFiniteError
from rlt_lightning.run import ranks
from rlt_lightning.run.interrupt import TERMINATED, is_terminated
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
# The option that a first word without dashes stands for.
POSITIONAL = {"report": "run_dir", "explain": "teacher"}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a verb with its options, by default those of the process, and return the exit status."""
    verb, *words = sys.argv[1:] if arguments is None else arguments
    quiet_third_parties()
    ranks.end_with_parent()
    try:
        refuse_while_imported()
        if verb in COMMANDS:
            if verb in POSITIONAL and words and not words[0].startswith("-"):
                words[0] = f"--{POSITIONAL[verb]}={words[0]}"
            options: dict[str, Any] = {"as_positional": False, "parser_class": ConfigParser}
            auto_cli(COMMANDS[verb], args=words, prog=f"rlt {verb}", **options)
            return 0
        kind = SettingsCommandLine if verb in SETTINGS_COMMANDS else RLTCommandLine
        return kind([verb, *words]).status
    except SystemExit as ending:
        # It may come again, or be sent by a launcher because another rank was faster.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not isinstance(ending.__context__, KeyboardInterrupt):
            raise
        if not ranks.find_global_rank():
            print("\nrlt: interrupted. Rows that are written are kept.", file=sys.stderr)
        return 128 + signal.SIGINT  # Lightning's is 1
    except Exception as error:
        mistake = find_mistake(error)
        if mistake is None:
            raise
        print(f"rlt: error: {mistake}", file=sys.stderr)
        return TERMINATED if is_terminated() else 2  # its workers were terminated with it


def find_mistake(error: BaseException | None) -> BaseException | None:
    """Return the error that says what to do: this one, or one that the parser has wrapped; None: neither."""
    while error is not None and not isinstance(error, MISTAKES):
        error = error.__cause__
    return error
