"""`rlt teach`: what a teacher explains, what it is worth, and how the student reads every token of it.

before sampling        given_row: arguments, a file or standard input → one row and its number
setup                  shorten the completion to what the models' contexts leave
RolloutCallback        samples; RLTModule scores (the same as in `rlt predict`)
on_predict_batch_end   score an empty explanation too, print, and write page and JSON
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.callbacks.distillation import trace_rows
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import readers_of_run
from rlt_lightning.chat.conversation import tell
from rlt_lightning.datamodules.rows import missing_columns, parse_row
from rlt_lightning.datamodules.sources import name_sources
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.engines.client import ADDRESS
from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.report.explain import read_row
from rlt_lightning.report.heat import this_terminal
from rlt_lightning.report.page import data_of_rows, require_replaceable, write_page
from rlt_lightning.report.taught import Taught, lesson
from rlt_lightning.run.jsonl import Row, append_rows, to_line
from rlt_lightning.tags import STRATOS
from rlt_lightning.types import BadRowError, InputError, PromptBatch

WAYS = (
    "Give --question '…' --solution '…', or --file FILE --row N, or pipe in a JSON object with question and "
    "solution."
)


@dataclass(frozen=True)
class TeachOptions:
    """What `rlt teach` explains and how it shows that.

    Args:
        question: The question. An empty text counts as none.
        solution: Its solution, which the teacher sees.
        file: Take question and solution from a row of this source instead: all that data.source takes.
        row: Number of the row in the file, from 1; without a file, in data.source. None: 1.
        num: Number of explanations; the one with the largest reward is marked.
        url: A vLLM server that serves the teacher, such as http://127.0.0.1:8000; None: this process samples.
        temperature: Of sampling; 0 is greedy. None: rollouts.sampling.temperature.
        max_tokens: Most tokens of an explanation; None: rollouts.sampling.max_completion_length. An
            explanation also ends at the end of the models' contexts.
        top: Number of the explanation's tokens in the table, largest KL first; 0 for all.
        html: Also write a page to this file, with the figure of every token.
        json: "true" prints a JSON row for each explanation in place of the text; a name adds the rows to
            that file.
    """

    question: str = ""
    solution: str = ""
    file: str | None = None
    row: int | None = None
    num: int = 1
    url: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    top: int = 10
    html: str | None = None
    json: bool | str = False

    def __post_init__(self) -> None:
        if (self.question or self.solution) and (self.file is not None or self.row is not None):
            raise InputError(
                "Either --file and --row name the problem, or --question and --solution are the problem, but "
                "both are given. Drop one of them."
            )
        if self.url is not None and not re.fullmatch(ADDRESS, self.url):
            raise InputError(
                "--url must be an address such as http://127.0.0.1:8000, without user and path, but is none. "
                "Correct it; a key goes into the environment variable VLLM_API_KEY."
            )
        for name, value, least in (("row", self.row, 1), ("num", self.num, 1), ("top", self.top, 0)):
            if value is not None and value < least:
                raise InputError(f"--{name} must be at least {least}, but is {value}. Raise it.")


def fit_context(trainer: Trainer, module: Any, max_model_len: int = sys.maxsize) -> bool:
    """Shorten the run's completions to what the only problem leaves of the contexts; return whether it did.

    Args:
        trainer: The trainer, whose RolloutCallback is changed.
        module: The RLTModule.
        max_model_len: Tokens that a server takes, if one samples.

    Raises:
        InputError: If there is no room for an explanation.
    """
    [problem] = stratos_of(trainer).problems
    room = max_model_len - len(problem.teacher_prompt)
    for model in readers_of_run(module, stratos_of(trainer)):
        room = min(room, model.context - int(model.fixed[0]))
    if room < 1:
        raise InputError(
            "Question and solution must leave room for an explanation, but with their prompts they are "
            f"{1 - room} tokens too long for the models' contexts. Shorten them."
        )
    rollouts = RolloutCallback.of(trainer)
    shortens = room < rollouts.sampling.max_completion_length
    if shortens:
        rollouts.sampling = replace(rollouts.sampling, max_completion_length=room)
    rollouts.val_sampling = rollouts.sampling
    return shortens


def given_row(options: TeachOptions, data: dict[str, Any]) -> tuple[int, Row]:
    """Return the number of the row to explain, from 1, and its columns.

    Standard input is read if question or solution is missing and no row is named. It is a JSON object, whose
    columns the options replace. Any other text is the one of question and solution that the options lack.

    Args:
        options: What to explain.
        data: Settings of the StratosDataModule.

    Raises:
        InputError: If there is no such row, or question or solution is missing.
    """
    if options.file is not None or options.row is not None:
        number = options.row or 1
        columns = read_row(number, data)
        if missing := missing_columns(columns, (), allows_completion=False):
            raise InputError(
                f"Row {number} of {name_sources(data['source'])} must have question and solution, or "
                f"conversations, but lacks {' and '.join(missing)}. Choose another."
            )
        return number, columns
    own = {name: getattr(options, name) for name in ("question", "solution") if getattr(options, name)}
    columns = own if len(own) == 2 else piped_columns(own)
    try:
        # Which tags there are changes nothing about texts without tags; the datamodule checks conversations.
        if columns.get("conversations") is None:
            parse_row(columns, STRATOS)
    except BadRowError as error:
        raise InputError(
            f"rlt teach needs a question and its solution, but {error.detail}. {WAYS}"
        ) from error
    return 1, columns


def piped_columns(own: Row) -> Row:
    """Return the columns of standard input, completed by the question or the solution of the options."""
    text = ""
    if sys.stdin is not None and not sys.stdin.isatty():
        try:
            text = sys.stdin.read().strip()
        except UnicodeError as error:
            raise InputError(f"Standard input must be text in UTF-8, but is not ({error}).") from error
    missing = [name for name in ("question", "solution") if name not in own]
    if not text:
        raise InputError(f"rlt teach needs a question and its solution, but has no {missing[0]}. {WAYS}")
    try:
        columns = json.loads(text)
    except ValueError as error:
        if len(missing) == 1:
            return own | {missing[0]: text}
        raise InputError(
            "Standard input must be a JSON object with question and solution, or plain text beside "
            f"--question or --solution, but is no JSON ({error}). {WAYS}"
        ) from error
    if isinstance(columns, dict):
        return columns | own
    if len(missing) == 1:  # a number, for one
        return own | {missing[0]: text}
    raise InputError(
        f"Standard input must be a JSON object with question and solution, but is {text:.40}. {WAYS}"
    )


class TeachPrinter(Callback):
    """Print explanations with what they are worth, and write them as a page and as JSON.

    Args:
        options: How they are shown.
        max_model_len: Tokens of prompt and completion that the server takes, if one samples.
    """

    def __init__(self, options: TeachOptions, max_model_len: int = sys.maxsize) -> None:
        self.options = options
        self.max_model_len = max_model_len
        self.shortened = False
        self.waiting = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the files that are written, and shorten the completion to what the contexts leave."""
        if self.options.html:
            require_replaceable(Path(self.options.html))
        if isinstance(self.options.json, str) and not Path(self.options.json).parent.is_dir():
            raise InputError(f"--json {self.options.json} must lie in a folder that exists. Make it.")
        module: Any = pl_module
        self.shortened = fit_context(trainer, module, self.max_model_len)

    @override
    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.waiting.enter_context(waiting_for("the explanation"))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.waiting.close()

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert batch.rollouts is not None
        assert batch.scores is not None
        module: Any = pl_module
        data = stratos_of(trainer)
        # In the precision in which RLTModule scored the explanations.
        with trainer.precision_plugin.forward_context():
            taught = Taught.of(module, batch, data)
        rows = taught.json_rows(trace_rows(batch, data, module.pretrained))
        self.waiting.close()
        if self.options.json is True:
            print("".join(map(to_line, rows)), end="", flush=True)
        else:
            print("\n".join(lesson(taught, self.options.top, this_terminal())), flush=True)
        self.tell_if_cut(rows)
        if isinstance(self.options.json, str):
            append_rows(Path(self.options.json), rows)
            tell(f"{self.options.json}: the same as JSON, added at its end")
        if self.options.html:
            write_page(Path(self.options.html), "What the teacher explains", data_of_rows(taught.rows))
            tell(f"{self.options.html}: the same as a page")

    def tell_if_cut(self, rows: list[Row]) -> None:
        """Say which setting has cut explanations off."""
        cut = [row["num_tokens"] for row in rows if row["finish_reason"] == "length"]
        if cut:
            setting = "the end of the models' contexts" if self.shortened else "--max_tokens"
            tell(f"cut after {max(cut)} tokens: {setting}")
