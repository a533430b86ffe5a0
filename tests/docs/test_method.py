"""docs/method.md: papers and tests exist. research/faults.md: a line notices each fault in its step."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
from commands import ROOT

from rlt_lightning.datamodules.loader import StepLoader
from rlt_lightning.types import InputError

NOTICED = {
    "stale_weights": (1, r"must hold the trainer's weights of step 1, but .* later pushes have not arrived"),
    "missing_weights": (1, r"weights of step 1, but its log-probs differ by .* and fit no earlier step"),
    "raw_log_probs": (0, "must report log-probs at the sampling temperature, but reports raw ones"),
    "coarse_engine": (
        0,
        r"Step 1, http\S+: engine and trainer may differ by model.mismatch_limit 0.5 of the variance",
    ),
    "hanging_push": (1, "^Lost vLLM worker.* POST /update_weights must be answered within 2 s, but was not"),
    "wrong_template": (0, "The chat template must render the user message, but it leaves it out"),
    "replayed_data": (2, r"After step 2 the data must go on with batch 2, .* position is batch 1, item 2"),
    "skipped_data": (2, r"After step 2 the data must go on with batch 2, .* position is batch 3, item 6"),
    "accumulated_batches": (0, "trainer.accumulate_grad_batches must not be set"),
}


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    sys.path.insert(0, str(ROOT / "research"))
    try:
        import faults
    finally:
        sys.path.pop(0)
    return faults


@pytest.mark.parametrize("name", NOTICED)
def test_fault_is_noticed_within_its_step(faults: ModuleType, name: str) -> None:
    step, line = NOTICED[name]
    outcome = faults.plant(name)  # of the sound run's lines none is left
    assert outcome.steps == step
    assert re.search(line, outcome.lines[0]), outcome.lines


def loader(**options: int) -> StepLoader[int, list[int]]:
    return StepLoader(list(range(8)), 2, list, **options)


def test_data_of_a_second_fit_begin_anew_and_resume() -> None:
    first, second, resumed = loader(), loader(), loader()
    first.begin_at(0)
    next(iter(first))
    second.begin_at(1)  # a further fit of the same trainer: its data begin anew after step 1
    next(iter(second))
    resumed.load_state_dict(second.state_dict())
    resumed.begin_at(2)
    with pytest.raises(InputError, match="After step 3 the data must go on with batch 2, at item 4"):
        resumed.begin_at(3)
