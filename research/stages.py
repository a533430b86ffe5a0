"""Run `rlt` commands, each in a process forked from one that has the imports; skip finished ones."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from rlt_lightning.commands.demo import PRELOADED, RESULTS, StageError, run_rlt
from rlt_lightning.run.shipped import list_shipped_configs

# Classes of the miniatures.
MODELS = ["transformers.models.qwen2.modeling_qwen2"]


class Stages:
    """Run stages of the pipeline in folders below one folder.

    A stage whose result is there is passed over; one that was broken off resumes.

    Args:
        folder: Folder of all runs.
        target: What a process does with the words and the log of a stage; None: `run_rlt`.
    """

    def __init__(
        self,
        folder: Path,
        target: Callable[[list[str], Path], None] | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.target = target or run_rlt
        self.running: set[ForkServerProcess] = set()
        self.locks: dict[str, threading.Lock] = {}  # of stages by name
        # `Process.start` reads the status of every ended process too, and each can be read only once.
        self.reading = threading.Lock()
        # One thread each, so that two run side by side and the same figures come out on every machine.
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOADED, *MODELS])

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
        with self.locks.setdefault(name, threading.Lock()):  # arms that share a stage wait for it
            return self.run_once(folder, words, result)

    def run_once(self, folder: Path, words: list[str], result: str | None) -> Path:
        """Run `rlt` with these words unless an earlier run in this folder has finished; return the folder."""
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
        print(f"  {seconds:5.1f} s  {folder.relative_to(self.folder)}", flush=True)
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
        with self.reading:
            process.start()
        self.running.add(process)
        wait([process.sentinel])
        with self.reading:
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
