"""Run `rlt` commands, each in a process forked from one that has the imports; skip finished ones."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from rlt_lightning.run.shipped import list_shipped_configs

RESULTS = {"fit": "model/config.json", "test": "evaluation.json"}  # what a finished run has, by verb
PRELOADED = [
    "rlt_lightning.cli.main",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.optimization",  # imports peft and with it bitsandbytes: seconds of every fit
]


class StageError(Exception):
    """A stage has failed; the message names it, its log, and the log's last lines."""


class Stages:
    """Run stages of the pipeline in folders below one folder.

    A stage whose result is there is passed over; one that was broken off resumes.

    Args:
        folder: Folder of all runs.
        target: What a process does with the words and the log of a stage; None: `run_rlt`.
        describe: Returns what is printed of a stage by the name of its folder.
        single_thread: Whether every stage computes with one thread, so that two run side by side and the
            same figures come out on every machine size.
    """

    def __init__(
        self,
        folder: Path,
        target: Callable[[list[str], Path], None] | None = None,
        describe: Callable[[str], str] = str,
        single_thread: bool = True,
    ) -> None:
        self.folder = folder.resolve()
        self.target = target or run_rlt
        self.describe = describe
        self.running: set[ForkServerProcess] = set()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if single_thread:
            os.environ["OMP_NUM_THREADS"] = "1"
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)

    def start(self) -> None:
        """Start the process that does the imports, without waiting for them."""
        forkserver.ensure_running()

    def __call__(self, name: str, verb: str, config: str, result: str | None = None, **options: Any) -> Path:
        """Run `rlt VERB --config CONFIG` with options and return its folder.

        Args:
            name: Name of its folder.
            verb: fit, predict or test.
            config: Name of a shipped config; a file of that name does not win.
            result: File that a finished run has; None: by verb.
            options: Settings, with `__` for a dot.

        Raises:
            StageError: If it fails, or its folder was made with other settings.
        """
        path = list_shipped_configs()[config]
        words = [
            word for key, value in options.items() for word in (f"--{key.replace('__', '.')}", str(value))
        ]
        return self.run_command(name, [verb, "--config", str(path), *words], result)

    def run_command(self, name: str, words: list[str], result: str | None = None) -> Path:
        """Run `rlt` with these words and return its folder.

        Args:
            name: Name of its folder.
            words: Verb, configs and options.
            result: File that a finished run has; None: by verb.

        Raises:
            StageError: If it fails, or its folder was made with other settings.
        """
        folder = self.folder / name
        words = [*words, "--output_dir", str(folder), "--resume", "true"]
        configs = [Path(word) for option, word in pairwise(words) if option == "--config"]
        made_with = "\n".join([*words, *(path.read_text() for path in configs)])
        log, note = (folder.with_name(f"{folder.name}.{kind}") for kind in ("log", "made_with"))
        if folder.exists() and note.exists() and note.read_text() != made_with:
            raise StageError(
                f"{folder} must have today's settings, but has others. Remove it, or choose another folder."
            )
        if (folder / (result or RESULTS[words[0]])).exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(made_with)
        begin = time.perf_counter()
        self.run(words, log)
        seconds = time.perf_counter() - begin
        folder.with_name(f"{folder.name}.seconds").write_text(f"{seconds:.1f}\n")
        print(f"  {seconds:5.1f} s  {self.describe(name)}", flush=True)
        return folder

    def run(
        self, words: list[str], log: Path, target: Callable[[list[str], Path], None] | None = None
    ) -> None:
        """Let a forked process do something with words, `rlt` commands by default, and wait for its end.

        Args:
            words: What it gets.
            log: File that its output is appended to.
            target: What it does; None: the target of the stages.

        Raises:
            StageError: If it fails.
        """
        process = self.context.Process(target=target or self.target, args=(words, log))
        process.start()
        self.running.add(process)
        process.join()
        self.running.discard(process)
        if process.exitcode:
            last_lines = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else "(nothing)"
            raise StageError(
                f"rlt {words[0]} must end well, but ended with {process.exitcode}. Its log is {log}:"
                f"\n{last_lines}"
            )

    def stop(self) -> None:
        """Let all stages that run end now; they resume at the next start."""
        for process in [*self.running]:
            process.terminate()


def run_rlt(words: list[str], log: Path) -> None:
    """Run `rlt` with these words in this process, which ends when the one that started it has ended."""
    from rlt_lightning.cli.main import run

    enter_stage(log)
    sys.argv = ["rlt", *words]
    sys.exit(run())


def enter_stage(log: Path) -> None:
    """Send the output of this process to a log, and end it when the process that started it has ended."""
    from rlt_lightning.judging.judge import end_with_run

    threading.Thread(target=end_with_run, daemon=True).start()
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
