"""docs/method.md: papers and tests exist. research/faults.md: a line notices each fault in its step."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import pytest
from commands import ROOT

from rlt_lightning import modules, numerics, rewards
from rlt_lightning.datamodules.loader import StepLoader
from rlt_lightning.run.shipped import find_config
from rlt_lightning.types import InputError

NOTICED = {
    "stale_weights": (1, r"must hold the trainer's weights of step 1, but .* later pushes have not arrived"),
    "missing_weights": (1, r"weights of step 1, but its log-probs differ by .* and fit no earlier step"),
    "raw_log_probs": (0, "must report log-probs at the sampling temperature, but reports raw ones"),
    "coarse_engine": (0, "Step 1: engine and trainer may differ by model.mismatch_limit 0.5 of the variance"),
    "hanging_push": (1, "^Lost vLLM worker.* POST /update_weights must be answered within 2 s, but was not"),
    "wrong_template": (0, "The chat template must render the user message, but it leaves it out"),
    "replayed_data": (2, r"After step 2 the data must go on with batch 2, .* position is batch 1, item 2"),
    "skipped_data": (2, r"After step 2 the data must go on with batch 2, .* position is batch 3, item 6"),
    "flat_reward": (5, "^rlt: alarm: Rewards are all alike. Iteration 5: reward/group_std is below 0.001"),
    "accumulated_batches": (0, "gradient accumulation is not supported for manual optimization"),
}
PAGE = (ROOT / "docs" / "method.md").read_text()


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    sys.path.insert(0, str(ROOT / "examples"))
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


def test_page_shows_every_fault_and_its_line(faults: ModuleType) -> None:
    assert list(faults.FAULTS) == list(NOTICED)
    table = (ROOT / "research" / "faults.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| .+ \| `(.+)`[^`|]*\|$", table, re.MULTILINE))
    assert shown.keys() == NOTICED.keys()
    for name, (_, line) in NOTICED.items():
        assert re.search(line, shown[name]), name


def test_papers_name_configs_classes_and_examples_that_exist() -> None:
    table = PAGE.split("## Papers")[1].split("\n\n**")[0]
    rows = re.findall(r"^\| (.+?) \| .+? \| (.+?) \| .+? \|$", table, re.MULTILINE)[1:]
    assert len(rows) >= 19
    classes = vars(modules) | vars(numerics) | vars(rewards)
    for method, cell in rows:
        for name in re.findall(r"`([^`]+)`", cell):
            is_there = name.split(".")[0] in ("rollouts", "rlt test") or name in classes
            assert is_there or find_config(name).is_file(), (method, name)
        for path in re.findall(r"\(\.\./(.+?)\)", cell):
            assert (ROOT / path).is_file(), (method, path)


def test_agreements_name_tests_that_exist() -> None:
    table = PAGE.split("### Agreement with other code")[1].split("\n### ")[0]
    paths = re.findall(r"`(tests/[\w/]+\.py)`", table)
    assert len(paths) >= 7
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_script_prints_the_line() -> None:
    words = [sys.executable, "examples/faults.py", "wrong_template"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=570)
    assert result.stdout.splitlines()[1].startswith("Noticed after step 0 (")
    assert "The chat template must render the user message" in result.stdout


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


def test_position_of_an_older_checkpoint_is_taken() -> None:
    state = loader().state_dict() | {"next_batch": 2, "position": 4}
    resumed = loader()
    resumed.load_state_dict(state)  # it has no first_step
    resumed.begin_at(7)
    assert resumed.first_step == 5
