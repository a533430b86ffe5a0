"""The finding in miniature: learning works, at the smallest size that shows it, and faults break it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import figures
import planted_faults
import pytest
from arms import Arms, Setting
from stages import Stages

SMALL = Setting("small", num_warmup=1024, num_iterations=24, num_traces=256, num_test=256)


def arms_of(folder: Path, target: Any = None) -> Arms:
    stages = Stages(folder, target)
    stages.start()
    return Arms(stages, SMALL, seed=0)


def accuracies(one: Arms, arms: tuple[str, ...]) -> dict[str, float]:
    """Run the arms at small size; accuracies of their students in percent."""

    def run(arm: str) -> float:
        one.student(arm, one.traces(arm), greedy=False)
        return figures.accuracy(one, arm)

    one.prepare()
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(arms, pool.map(run, arms), strict=True))


@pytest.mark.timeout(600)
def test_a_student_learns_from_a_teacher_that_rlt_trained(tmp_path: Path) -> None:
    one = arms_of(tmp_path)
    found = accuracies(one, ("rlt", "solution_only", "warmup"))
    kinds = {arm: figures.kinds_of(figures.traces_of(one, arm)) for arm in found}
    assert found["rlt"] > found["warmup"] + 20, (found, kinds)
    assert found["solution_only"] < found["warmup"], (found, kinds)  # without r_KL the teacher leaks
    assert kinds["rlt"]["steps"] > kinds["warmup"]["steps"] + 20
    assert kinds["solution_only"]["leap"] > 50


FAULTS = ("sign_of_kl", "shuffled_advantages", "spans_off_by_one", "stale_weights")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_learning_test_fails_with_a_fault(fault: str, tmp_path: Path) -> None:
    found = accuracies(arms_of(tmp_path, getattr(planted_faults, fault)), ("rlt", "warmup"))
    assert found["rlt"] < found["warmup"] + 20, found
