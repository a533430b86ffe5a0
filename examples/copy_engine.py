"""Sample on every rank with a copy of the model, which gets the weights before each step.

It samples what HFEngine does, and costs a second model: it shows what an engine of your own with PER_RANK has
to do, such as one around SGLang's or llama.cpp's library. Parameters must be named as in the model's files.
Run: PYTHONPATH=examples rlt fit --config laptop/rlt --rollouts.engine copy_engine.CopyEngine
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlt_lightning.engines import EngineError, HFEngine, Placement
from rlt_lightning.engines.base import AGREEMENT, find_disagreement
from rlt_lightning.models.packed import sequence_log_probs
from rlt_lightning.models.weights import NamedTensor, gather_in_groups


class CopyEngine(HFEngine):
    """Sample with a copy of the weights."""

    placement = Placement.PER_RANK

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Make the copy, with random weights, until the first push."""
        if self.model is None:
            weight = next(model.parameters())
            with torch.random.fork_rng(devices=[]):  # training draws as without a copy
                copy = AutoModelForCausalLM.from_config(model.config, dtype=weight.dtype)
            super().start(copy.to(weight.device), tokenizer, folder)

    @torch.no_grad()
    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Copy the weights; where they are in shards, all ranks gather them here, 256 MiB at a time."""
        own, names = self.model.state_dict(), iter([name for name, _ in named_tensors])
        for group in gather_in_groups(named_tensors, 2**28):
            for tensor in group:
                own[next(names)].copy_(tensor)
        self.policy_version = policy_version

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Compare the copy's log-probs of a text with the trainer's."""
        scores = sequence_log_probs(self.model, token_ids).tolist()
        bound = AGREEMENT[str(self.model.dtype).removeprefix("torch.")]
        if problem := find_disagreement(scores, log_probs, bound):
            raise EngineError(f"The copy must have the trainer's weights, but {problem}")
