"""Completions of an earlier run instead of sampled ones: what a step does can then be repeated and compared.

    a run with recorder.token_ids: true   ─▶   rollouts.jsonl   ─▶   ReplayEngine("runs/A/rollouts.jsonl")

A completion is found by its step, its problem's row and its number in the group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from rlt_lightning.engines.base import Engine, EngineError, SampleRequest, Sampling
from rlt_lightning.models.weights import NamedTensor
from rlt_lightning.run.jsonl import Row, read_json_rows
from rlt_lightning.types import Completion, InputError

COLUMNS = (
    "step",
    "row",
    "completion",
    "token_ids",
    "log_probs",
    "finish_reason",
    "temperature",
    "prompt_crc32",
)


def build_replay_columns(prompt: Sequence[int], completion: Completion, temperature: float) -> Row:
    """Return what a row of a completion needs beside step, row and number to be replayed."""
    return {
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "finish_reason": completion.finish_reason,
        "temperature": temperature,
        "prompt_crc32": checksum_prompt(prompt),
    }


def checksum_prompt(prompt: Sequence[int]) -> int:
    """Return a checksum of a prompt's token ids."""
    return crc32(json.dumps(list(prompt)).encode())


def read_recording(path: Path) -> Iterator[Row]:
    """Yield the rows of a recording, with the columns that a replay needs.

    Raises:
        InputError: If a row lacks one, or holds no completion.
    """
    for row in read_json_rows(path):
        if absent := [name for name in COLUMNS if name not in row]:
            raise InputError(
                f"ReplayEngine needs the columns {', '.join(COLUMNS)}, but {path} lacks {', '.join(absent)}. "
                "Record the run with recorder.token_ids: true."
            )
        ids, log_probs = row["token_ids"], row["log_probs"]
        numbers = [row[name] for name in ("step", "row", "completion")]
        whole = all(isinstance(number, int) for number in numbers) and isinstance(ids, list)
        if not whole or (log_probs is not None and len(log_probs) != len(ids)):
            raise InputError(
                "A recorded completion must have step, row, number, and a log-prob for each token id, but in "
                f"{path} one has not: step {numbers[0]!r}, row {numbers[1]!r}. Record it again."
            )
        yield {name: row[name] for name in COLUMNS}


class ReplayEngine(Engine):
    """Return the recorded completions of a run, step by step, so that no sampling can branch.

    Whatever differs between two replays then comes from rewards, losses or the optimizer. Validation and
    prediction are not recorded, so they cannot be replayed. The whole recording is held in memory.

    Args:
        rollouts: `rollouts.jsonl` of a run with `recorder.token_ids: true`. A `dropped.jsonl` beside it has
            the completions that dynamic sampling replaced, and is read too.
        in_process: Whether the engine behaves as one in process, like HFEngine, or as one outside it, like
            VLLMEngine, on which importance sampling and asynchronous rollouts depend. Set what the recorded
            run had.

    Raises:
        InputError: If the file has no such rows, or a completion twice.
    """

    def __init__(self, rollouts: str, in_process: bool = True) -> None:
        self.path = Path(rollouts)
        self.in_process = in_process
        if not self.path.is_file():
            raise InputError(f"ReplayEngine's rollouts must be a rollouts.jsonl, but {rollouts} is no file.")
        self.groups: dict[tuple[int, int], dict[int, Row]] = {}  # by step, from 0, and row; then by number
        for path in (self.path, self.path.with_name("dropped.jsonl")):
            for row in read_recording(path):
                group = self.groups.setdefault((row["step"] - 1, row["row"]), {})
                if row["completion"] in group:
                    raise InputError(
                        f"A recording must have each completion once, but {path} has step {row['step']}, row "
                        f"{row['row']}, completion {row['completion']} again. Do files of two runs lie there?"
                    )
                group[row["completion"]] = row
        rows = [row for group in self.groups.values() for row in group.values()]
        self.reports_log_probs = all(row["log_probs"] is not None for row in rows)

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Do nothing: no model samples."""

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Note the version; recorded completions do not depend on it."""
        self.policy_version = policy_version

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Do nothing: there are no weights."""

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample`."""
        first = 0
        for request in requests:
            group = self._find_group(request, sampling)
            for number in range(request.num_completions):
                row = group[number]
                yield (
                    first + number,
                    Completion(
                        row["token_ids"], row["log_probs"], row["finish_reason"], request.seed, "replay"
                    ),
                )
            first += request.num_completions

    def _find_group(self, request: SampleRequest, sampling: Sampling) -> dict[int, Row]:
        """Return the recorded completions of a request by number.

        Raises:
            EngineError: If they do not fit it.
        """
        if request.step is None or request.row is None:
            raise EngineError(
                "ReplayEngine has the completions of training steps only, but was asked for others. Switch "
                "validation off (data.val_rows 0)."
            )
        group = self.groups.get((request.step, request.row), {})
        wanted, prompt = list(range(request.num_completions)), checksum_prompt(request.prompt)
        temperatures = {row["temperature"] for row in group.values()} - {sampling.temperature}
        max_tokens = request.limit(sampling)
        longest = max((len(row["token_ids"]) for row in group.values()), default=0)
        fault = None
        if sorted(group) != wanted:
            fault = f"completions {sorted(group)} instead of {wanted}"
        elif any(row["prompt_crc32"] != prompt for row in group.values()):
            fault = "completions of another prompt"
        elif temperatures:
            fault = f"temperature {temperatures.pop()} instead of {sampling.temperature}"
        elif longest > max_tokens:
            fault = f"a completion of {longest} tokens, above the limit of {max_tokens}"
        if fault is not None:
            raise EngineError(
                f"Recorded completions must fit the step, but for step {request.step + 1}, row {request.row} "
                f"{self.path} has {fault}. Replay with the data and settings of the run that recorded them."
            )
        return group
