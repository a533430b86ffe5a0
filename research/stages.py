"""Run `rlt` commands, each in a process forked from one that has the imports; skip finished ones."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from rlt_lightning.commands.demo import PRELOADED, run_rlt
from rlt_lightning.run.shipped import list_shipped_configs

# Classes of the miniatures.
MODELS = ["transformers.models.qwen2.modeling_qwen2"]
# What a verb writes last.
RESULTS = {"fit": "model/config.json", "predict": "README.md", "test": "evaluation.json"}


class StageError(Exception):
    """A stage has failed; the message names it, its log, and the log's last lines."""


class Stages:
    """Run stages of the pipeline in folders below one folder.

    A stage whose result is there is passed over; one that was broken off resumes.

    Args:
        folder: Folder of all runs.
        target: What a process does with the words and the log of a stage; None: `run_rlt`.
        more: Further options of all stages of a verb, such as {"fit": "--trainer.accelerator gpu"}.
    """

    def __init__(
        self,
        folder: Path,
        target: Callable[[list[str], Path], None] | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.target = target or run_rlt
        self.more = more or {}
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
        folder, path = self.folder / name, list_shipped_configs()[config]
        words = [verb, "--config", str(path)]
        words += [
            word for key, value in options.items() for word in (f"--{key.replace('__', '.')}", str(value))
        ]
        words += [*shlex.split(self.more.get(verb, "")), "--output_dir", str(folder), "--resume", "true"]
        made_with = "\n".join([*words, path.read_text()])
        note = folder.with_name(f"{folder.name}.made_with")
        with self.locks.setdefault(name, threading.Lock()):  # arms that share a stage wait for it
            if folder.exists() and note.exists() and note.read_text() != made_with:
                raise StageError(
                    f"{folder} must have today's settings, but has others. Remove it, or choose another."
                )
            if not (folder / (result or RESULTS[verb])).exists():
                folder.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(made_with)
                begin = time.perf_counter()
                self.run(words, folder.with_name(f"{folder.name}.log"))
                print(f"  {time.perf_counter() - begin:5.1f} s  {name}", flush=True)
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
