"""Sampling settings for tests, a started engine, and a comparison of completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.types import Completion


def started(kind: type[HFEngine], model: Any, tokenizer: Any, max_sequences: int = 64) -> HFEngine:
    engine = kind(max_sequences)
    engine.start(model, tokenizer, Path())
    return engine


def assert_same(ours: list[list[Completion]], theirs: list[list[Completion]]) -> None:
    for group, other in zip(ours, theirs, strict=True):
        for a, b in zip(group, other, strict=True):
            assert (a.token_ids, a.finish_reason, a.seed) == (b.token_ids, b.finish_reason, b.seed)
            difference = torch.tensor(a.log_probs) - torch.tensor(b.log_probs)
            assert difference.abs().max() < 1e-5 * max(1, len(a.log_probs) ** 0.5)


SAMPLINGS = {
    "plain": Sampling(temperature=0.7),
    "temperature 1": Sampling(temperature=1.0),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k and min_p": Sampling(temperature=0.9, top_k=20, min_p=0.02),
    "penalty": Sampling(temperature=0.8, repetition_penalty=1.3),
    "greedy": Sampling(temperature=0, repetition_penalty=1.1),
}
