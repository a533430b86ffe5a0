"""What samples where no engine is set."""

from __future__ import annotations

from typing import Any

import pytest

from rlt_lightning.engines import HFEngine, VLLMEngine
from rlt_lightning.engines.choice import choose_engine

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.mark.parametrize(
    ("gpus", "model", "pushes", "installed", "workers"),
    [
        ([], MODEL, True, True, None),  # a CPU
        ([0], "miniature-teacher", True, True, None),  # a worker starts slower than it samples
        ([0], MODEL, True, False, None),
        ([0], MODEL, True, True, [[0]]),
        ([2, 3], MODEL, True, True, [[2], [3]]),
        ([0], MODEL, False, True, [[0]]),  # an evaluation
        ([0, 1], MODEL, False, True, None),
    ],
)
def test_gpus_with_vllm_sample_with_it(
    gpus: list[int], model: str, pushes: bool, installed: bool, workers: Any
) -> None:
    engine, reason = choose_engine(gpus, model, pushes, installed)
    assert (reason is None) is (not gpus or model != MODEL)
    if workers is None:
        assert isinstance(engine, HFEngine)
        assert ("rlt-lightning[vllm]" in str(reason)) is not installed
        return
    assert isinstance(engine, VLLMEngine)
    assert engine.fleet.launch is not None
    assert engine.fleet.launch.gpus == workers
    assert engine.takes_turns is pushes
    assert (engine.push.backend is not None) is pushes
