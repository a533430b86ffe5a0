"""Run `rlt` commands, each in a process forked from one that has the imports; skip finished ones."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = {"fit": "model/config.json", "test": "evaluation.json"}  # what a finished run has, by verb
PRELOADED = [
    "rlt_lightning.cli.main",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]


class StageError(Exception):
    """A stage has failed; the message names it, its log, and the log's last lines."""


class Stages:
    """Run stages of the pipeline in folders below one folder.

    A stage whose result is there is passed over; one that was broken off resumes.

    Args:
        folder: Folder of all runs.
        target: What a process does with the words and the log of a stage; None: `run_rlt`.
    """

    def __init__(self, folder: Path, target: Callable[[list[str], Path], None] | None = None) -> None:
        self.folder = folder.resolve()
        self.target = target or run_rlt
        # One thread each: two stages run side by side, and the same figures come out on every machine size.
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)

    def start(self) -> None:
        """Start the process that does the imports, without waiting for them."""
        forkserver.ensure_running()

    def __call__(
        self, name: str, verb: str, config: str, result: str | None = None, **options: object
    ) -> Path:
        """Run `rlt VERB --config configs/CONFIG.yaml` with options and return its folder.

        Args:
            name: Name of its folder.
            verb: fit, predict or test.
            config: Name of a config.
            result: File that a finished run has; None: by verb.
            options: Settings, with `__` for a dot.

        Raises:
            StageError: If it fails, or its folder was made with other settings.
        """
        folder = self.folder / name
        words = [verb, "--config", f"configs/{config}.yaml", "--output_dir", str(folder), "--resume", "true"]
        words += [
            word for key, value in options.items() for word in (f"--{key.replace('__', '.')}", str(value))
        ]
        made_with = "\n".join([*words, (ROOT / f"configs/{config}.yaml").read_text()])
        log, note = (folder.with_name(f"{folder.name}.{kind}") for kind in ("log", "made_with"))
        if note.exists() and note.read_text() != made_with:
            raise StageError(
                f"{folder} must have today's settings, but has others. Remove it, or set another OUT."
            )
        if (folder / (result or RESULTS[verb])).exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(made_with)
        begin = time.perf_counter()
        process = self.context.Process(target=self.target, args=(words, log))
        process.start()
        process.join()
        if process.exitcode:
            last_lines = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else "(nothing)"
            raise StageError(
                f"rlt {verb} must end well, but ended with {process.exitcode} in {folder}. Its log is {log}:"
                f"\n{last_lines}"
            )
        seconds = time.perf_counter() - begin
        folder.with_name(f"{folder.name}.seconds").write_text(f"{seconds:.1f}\n")
        print(f"  {seconds:5.1f} s  {name}", flush=True)
        return folder


def run_rlt(words: list[str], log: Path) -> None:
    """Run `rlt` with these words in this process, which ends when the one that started it has ended."""
    from rlt_lightning.judging.judge import end_with_run

    threading.Thread(target=end_with_run, daemon=True).start()
    os.chdir(ROOT)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = ["rlt", *words]
    from rlt_lightning.__main__ import main

    main()
