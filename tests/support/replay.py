"""Replay the completions of an earlier run instead of sampling, so that steps can be repeated and compared.

    Recorder, in a run  ──▶  rollouts.jsonl, dropped.jsonl  ──▶  ReplayEngine("rollouts.jsonl")

A completion is found by its step, its problem's row and its number in the group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from lightning.pytorch import Callback

from rlt_lightning.engines import Engine, Placement, SampleRequest, Sampling
from rlt_lightning.models.weights import NamedTensor
from rlt_lightning.modules.rollout_rows import rollout_rows
from rlt_lightning.run.jsonl import JsonRow, append_rows, read_json_rows
from rlt_lightning.types import Completion

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


def checksum_prompt(prompt: Sequence[int]) -> int:
    return crc32(json.dumps(list(prompt)).encode())


def build_columns(prompt: Sequence[int], completion: Completion, temperature: float) -> JsonRow:
    """What a row needs beside step, row and number to be replayed."""
    return {
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "finish_reason": completion.finish_reason,
        "temperature": temperature,
        "prompt_crc32": checksum_prompt(prompt),
    }


class Recorder(Callback):
    """Write what a run of one process samples, and what dynamic sampling replaced."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        folder, step = Path(trainer.default_root_dir), trainer.global_step
        temperature, size, every = batch.step.temperature, batch.step.group_size, range(len(batch.step))
        rows = [
            {"step": step, **row}
            | build_columns(rollout.problem.teacher_prompt, rollout.completion, temperature)
            for row, rollout in zip(rollout_rows(batch.step, every), batch.step.rollouts(every), strict=True)
        ]
        append_rows(folder / "rollouts.jsonl", rows)
        dropped = [
            {"step": step, "row": request.rows[number // size], "completion": number % size}
            | build_columns(request.prompts[number // size], request.completions[number], temperature)
            for request, number in batch.step.replaced
        ]
        if dropped:
            append_rows(folder / "dropped.jsonl", dropped)


class ReplayEngine(Engine):
    """Return the recorded completions of a run, step by step.

    Args:
        rollouts: `rollouts.jsonl` of a recorded run; a `dropped.jsonl` beside it is read too.
        placement: Where it behaves as if it were, as the recorded run's engine did.
    """

    def __init__(self, rollouts: str, placement: Placement = Placement.SHARED_WEIGHTS) -> None:
        self.placement = placement
        self.groups: dict[tuple[int, int], dict[int, JsonRow]] = {}  # by step, from 0, and row; then number
        for path in (Path(rollouts), Path(rollouts).with_name("dropped.jsonl")):
            for row in read_json_rows(path):
                group = self.groups.setdefault((row["step"] - 1, row["row"]), {})
                assert row["completion"] not in group, (path, row["step"], row["row"])
                group[row["completion"]] = row
        assert self.groups, rollouts
        rows = [row for group in self.groups.values() for row in group.values()]
        self.reports_log_probs = all(row["log_probs"] is not None for row in rows)

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None: ...

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        self.policy_version = policy_version

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None: ...

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        first = 0
        for request in requests:
            assert request.step is not None
            assert request.row is not None
            group = self.groups[request.step, request.row]
            assert sorted(group) == list(range(request.num_completions))
            for number, row in sorted(group.items()):
                assert row["prompt_crc32"] == checksum_prompt(request.prompt)
                assert row["temperature"] == sampling.temperature
                assert len(row["token_ids"]) <= request.limit(sampling)
                completion = Completion(
                    row["token_ids"], row["log_probs"], row["finish_reason"], request.seed, "replay"
                )
                yield first + number, completion
            first += request.num_completions
