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

COLUMNS = ("step", "row", "completion", "token_ids", "log_probs", "finish_reason", "prompt_crc32")


def build_replay_columns(prompt: Sequence[int], completion: Completion) -> Row:
    """Return what a row of a completion needs beside step, row and number to be replayed."""
    return {
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "finish_reason": completion.finish_reason,
        "prompt_crc32": checksum_prompt(prompt),
    }


def checksum_prompt(prompt: Sequence[int]) -> int:
    """Return a checksum of a prompt's token ids."""
    return crc32(json.dumps(list(prompt)).encode())


class ReplayEngine(Engine):
    """Return the recorded completions of a run, step by step, so that no sampling can branch.

    Whatever differs between two replays then comes from rewards, losses or the optimizer. Validation and
    prediction are not recorded, so they cannot be replayed.

    Args:
        rollouts: `rollouts.jsonl` of a run with `recorder.token_ids: true`. A `dropped.jsonl` beside it has
            the completions that dynamic sampling replaced, and is read too.
        in_process: Whether every rank reads the files, as for HFEngine. False: rank 0 does, as for workers;
            asynchronous rollouts need that.

    Raises:
        InputError: If the file has no such rows.
    """

    reports_log_probs = True

    def __init__(self, rollouts: str, in_process: bool = True) -> None:
        self.path = Path(rollouts)
        self.in_process = in_process
        if not self.path.is_file():
            raise InputError(f"ReplayEngine's rollouts must be a rollouts.jsonl, but {rollouts} is no file.")
        self.groups: dict[tuple[int, int], dict[int, Row]] = {}  # by step, from 0, and row; then by number
        for path in (self.path, self.path.with_name("dropped.jsonl")):
            for row in read_json_rows(path):
                if absent := [name for name in COLUMNS if name not in row]:
                    raise InputError(
                        f"ReplayEngine needs the columns {', '.join(COLUMNS)}, but {path} lacks "
                        f"{', '.join(absent)}. Record the run with recorder.token_ids: true."
                    )
                group = self.groups.setdefault((row["step"] - 1, row["row"]), {})
                group[row["completion"]] = {name: row[name] for name in COLUMNS}

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
        """See `Engine.sample`; recorded log-probs hold at the temperature of the run that recorded them."""
        first = 0
        for request in requests:
            group = self._find_group(request, request.limit(sampling))
            for number in range(request.num_completions):
                row = group[number]
                yield (
                    first + number,
                    Completion(
                        row["token_ids"], row["log_probs"], row["finish_reason"], request.seed, "replay"
                    ),
                )
            first += request.num_completions

    def _find_group(self, request: SampleRequest, max_tokens: int) -> dict[int, Row]:
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
        wanted, prompt = set(range(request.num_completions)), checksum_prompt(request.prompt)
        longest = max((len(row["token_ids"]) for row in group.values()), default=0)
        fault = None
        if not wanted <= group.keys():
            fault = f"{len(group)} completions instead of {len(wanted)}"
        elif any(row["prompt_crc32"] != prompt for row in group.values()):
            fault = "completions of another prompt"
        elif longest > max_tokens:
            fault = f"a completion of {longest} tokens, above the limit of {max_tokens}"
        if fault is not None:
            raise EngineError(
                f"Recorded completions must fit the step, but for step {request.step + 1}, row {request.row} "
                f"{self.path} has {fault}. Replay with the data and settings of the run that recorded them."
            )
        return group
