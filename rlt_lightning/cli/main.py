"""Run a verb, and turn what went wrong into one line and an exit status.

2    a mistake of the user's: one line that says what to do
1    anything else: a traceback, or the line of the rank that failed first
130  interrupted, 143 terminated: the line says how to resume
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from jsonargparse import auto_cli
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlt_lightning.chat.conversation import chat
from rlt_lightning.checkpoints.choices import checkpoints_in
from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.cli import ranks
from rlt_lightning.cli.borrowed import ExplainCommandLine, PlanCommandLine
from rlt_lightning.cli.failure import MISTAKES
from rlt_lightning.cli.parser import OneLineParser, bare_words, end_with_mistake
from rlt_lightning.cli.stages import VERBS, RLTCommandLine, SaveConfig, global_rank
from rlt_lightning.cli.teach import TeachCommandLine
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.judging.judge import refuse_while_imported
from rlt_lightning.loggers.workspace import dashboard
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.records.run_folder import FINISHED_ROWS, remove_empty_folders
from rlt_lightning.report import report

# The verbs without a trainer.
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "export": (
        export_checkpoint,
        "Make a Hugging Face folder from a checkpoint of any strategy, on a CPU.",
    ),
    "dashboard": (dashboard, "Save a W&B workspace that shows all metrics of a project's runs by iteration."),
    "chat": (chat, "Ask a trained student in the terminal; what is piped in is one question."),
    "report": (report, "Write one page of runs, RUN_DIR [RUN_DIR ...]: curves, completions, token by token."),
}

COMMAND_LINES = {"plan": PlanCommandLine, "explain": ExplainCommandLine, "teach": TeachCommandLine}


def run() -> int:
    """Run the command line and return the exit status."""
    quiet_third_parties()
    ranks.start_watch(global_rank())
    try:
        refuse_while_imported()
        if sys.argv[1] in COMMANDS:
            return run_command(sys.argv[1])
        command_line = COMMAND_LINES.get(sys.argv[1], RLTCommandLine)(
            PolicyModule,
            StratosDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults={
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "use_distributed_sampler": False,  # our loader distributes the rows itself
            },
            seed_everything_default=0,
            parser_class=OneLineParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except Exception as error:
        if isinstance(error, BrokenPipeError) and sys.argv[1] not in VERBS:
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
    except SystemExit as ending:
        terminated = isinstance(ending, SIGTERMException)
        if not terminated and ending.code != 1:
            raise
        remove_empty_folders()
        ranks.fail_run(ending)
        print(f"rlt: {'terminated' if terminated else 'interrupted'}. {how_to_resume()}", file=sys.stderr)
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    ranks.end_run()
    return command_line.status


def run_command(verb: str) -> int:
    """Run a verb that has no trainer, and return the exit status."""
    function, description = COMMANDS[verb]
    words = sys.argv[2:]
    auto_cli(
        function,
        args=named_folders(words) if verb == "report" else words,
        as_positional=False,
        parser_class=OneLineParser,
        prog=f"rlt {verb}",
        description=description,
    )
    return 0


def named_folders(words: list[str]) -> list[str]:
    """Return `A B --output FILE` as the parser reads it: words that belong to no option are folders."""
    folders, options = bare_words(words)
    others = [word for option in options for word in option]
    return [f"--run_dirs={json.dumps(folders)}", *others] if folders else others


def how_to_resume() -> str:
    """Return what a stopped run has left, and the options that resume it."""
    folder = RLTCommandLine.run_folder
    found = [] if folder is None else checkpoints_in(folder / "checkpoints")
    if folder is not None and any((folder / name).exists() for name in FINISHED_ROWS):
        return f"What is finished is kept. To resume: --output_dir {folder} --resume true"
    if not found:
        return "No checkpoint was written."
    return f"The newest checkpoint is {found[-1]}. To resume: --output_dir {folder} --resume true"


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as a line: ours without the place in the code, which says nothing to a user."""
    if Path(__file__).parents[1] in Path(filename).parents:
        return f"rlt: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def quiet_third_parties() -> None:
    """Silence tips, hardware lists and warnings that say nothing about the user's run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed warns
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.formatwarning = format_warning
    for pattern in (
        # Our loaders make batches of lists and want no workers.
        ".*does not have many workers.*",
        # Our checkpoint callback saves at the end of a step.
        ".*Using `?ModelCheckpoint`? with manual optimization.*",
        # Scores lie in the batch, where the writer takes them.
        ".*predict returned None.*",
        # The folder of a resumed run is not empty.
        ".*exists and is not empty.*",
        ".*have overridden `transfer_batch_to_device`.*",
        # No validation set was asked for.
        ".*Total length of `list` across ranks is zero.*",
        ".*defined a `validation_step` but have no `val_dataloader`.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*gradient_checkpointing_enable` is deprecated.*",
        # DeepSpeed calls these two.
        ".*all_gather_into_tensor.*deprecated.*",
        ".*reduce_scatter_tensor.*deprecated.*",
    ):
        warnings.filterwarnings("ignore", pattern)
