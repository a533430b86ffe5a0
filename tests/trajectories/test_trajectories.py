"""Whole runs repeat the committed ones, step by step, and notice planted faults.

    make trajectories             compare, and print the largest residuals of each run
    make trajectories WRITE=1     write new ones, and print which figures have moved and by how much

runs.py has the kinds of run, comparison.py the tolerances, planted.py the faults that must be noticed.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
from trajectories.comparison import (
    DIGITS,
    TOLERANCE,
    WEIGHT,
    describe_machine,
    find_differences,
    find_residuals,
    is_biased,
    name_of_file,
    read,
    transpose,
    write,
)
from trajectories.planted import FAULTS
from trajectories.runs import KINDS, SHARDED, STEPS, STRATEGIES, Trajectory, run, run_on_rank

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SHOWN = 3  # figures of a run, in what is printed


def compare(kind: str, strategy: str, trajectory: Trajectory) -> None:
    """Compare a run with the committed one, or write it if WRITE is set.

    Raises:
        AssertionError: If they differ, with each figure that does.
    """
    path, name, found = name_of_file(kind, strategy), f"{kind} {strategy}".strip(), transpose(trajectory)
    if os.environ.get("WRITE"):
        wanted = read(path)[0] if path.exists() else {}
        both = wanted.keys() & found.keys()
        moved = describe(find_residuals({n: wanted[n] for n in both}, {n: found[n] for n in both}))
        moved += f"; {len(found.keys() - both)} figures new, {len(wanted.keys() - both)} gone"
        write(path, trajectory)
        print(f"figure: {name}: {moved}")
        return
    wanted, machine = read(path)
    residuals = find_residuals(wanted, found)
    print(f"figure: {name}: {describe(residuals)}")
    differences = find_differences(residuals)
    if machine == describe_machine():
        differences = [f"{n}: {wanted[n]} became {found[n]}" for n in wanted if wanted[n] != found[n]]
    assert not differences, f"{name} moved:\n" + "\n".join(differences)


def describe(residuals: dict[str, list[float]]) -> str:
    """Return the largest residuals in words."""
    sizes = sorted(((max(map(abs, values)), name) for name, values in residuals.items()), reverse=True)
    moved = [f"{name} {size:.1e}" for size, name in sizes[:SHOWN] if size]
    return f"moved by {', '.join(moved)}" if moved else f"equal in all {DIGITS} digits"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_repeats_the_committed_one(kind: str) -> None:
    compare(kind, "", run(kind))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SHARDED)
def test_a_run_of_two_ranks_repeats_the_committed_one(kind: str, strategy: str, tmp_path: Path) -> None:
    ranks.call(run_on_rank, tmp_path, kind, strategy, str(tmp_path))
    compare(kind, strategy, Trajectory(**json.loads((tmp_path / "trajectory.json").read_text())))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SHARDED)
def test_two_ranks_were_committed_as_one(kind: str, strategy: str) -> None:
    single, sharded = (read(name_of_file(kind, name))[0] for name in ("", strategy))
    shared = single.keys() & sharded.keys()
    assert {name for name in shared if name.startswith(WEIGHT)} == {n for n in single if n.startswith(WEIGHT)}
    residuals = find_residuals({n: single[n] for n in shared}, {n: sharded[n] for n in shared})
    assert not find_differences(residuals)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [(plant, kinds[0]) for plant, kinds in FAULTS.items()],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_a_planted_fault_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    differences = find_differences(find_residuals(read(name_of_file(kind))[0], transpose(run(kind))))
    print(f"figure: {plant.__name__}: {kind} notices it by {len(differences)} figures, {differences[:1]}")
    assert differences


def test_a_small_bias_within_the_tolerance_is_noticed() -> None:
    draw = random.Random(0)
    noise = [draw.gauss(0, 1e-6) for _ in range(STEPS)]
    assert not find_differences({"reward/mean": noise})
    biased = [value + 0.7 * TOLERANCE for value in noise]
    assert max(map(abs, biased)) < TOLERANCE
    assert find_differences({"reward/mean": biased}) == [
        f"reward/mean: off by {sum(biased) / STEPS:.2g} on average"
    ]
    # Rounding that adds up along a run has a mean, too.
    drifting = [step / STEPS * 2e-6 for step in range(STEPS)]
    assert not is_biased(drifting, 0.2 * TOLERANCE)


def test_residuals_are_relative_to_the_largest_value_of_a_run() -> None:
    # The loss of step 1 is rounding of 0; a figure that is 0 throughout must stay it.
    wanted = {"policy/loss": [1e-8, 0.5, -4.0], "rollout/empty_frac": [0.0, 0.0, 0.0]}
    found = {"policy/loss": [3e-8, 0.5, -4.00004], "rollout/empty_frac": [0.0, 0.25, 0.0]}
    residuals = find_residuals(wanted, found)
    assert residuals["policy/loss"] == pytest.approx([5e-9, 0.0, -1e-5])
    assert residuals["rollout/empty_frac"] == [0.0, 0.25, 0.0]
    for name, value in (("policy/loss", math.nan), ("policy/loss", math.inf)):
        assert find_differences(find_residuals(wanted, wanted | {name: [1e-8, value, -4.0]}))
    with pytest.raises(AssertionError, match="figures are gone: policy/loss"):
        find_residuals(wanted, {"rollout/empty_frac": [0.0] * 3})
