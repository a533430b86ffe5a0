"""The parts that all comparisons share: stages in processes, jobs side by side, intervals and tables."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import driver
import pytest
from arms import Setting
from stages import StageError, Stages


def fail(words: list[str], log: Path) -> None:
    log.write_text("gone")
    raise SystemExit(3)


def end_at_once(words: list[str], log: Path) -> None:
    pass


def finish(words: list[str], log: Path) -> None:
    (log.with_suffix("") / "model").mkdir(parents=True)
    (log.with_suffix("") / "model/config.json").touch()


def hang(words: list[str], log: Path) -> None:
    Path(words[0]).touch()
    time.sleep(200)


def test_a_stage_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"but ended with 3. Its log is .*a.log:\ngone"):
        Stages(tmp_path).run(["fit"], tmp_path / "a.log", fail)


def test_stages_side_by_side_end_well(tmp_path: Path) -> None:
    stages = Stages(tmp_path)

    def run_many(name: str) -> None:
        for _ in range(20):
            stages.run(["fit"], tmp_path / name, end_at_once)

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(run_many, "abcd")]


def test_a_finished_stage_is_passed_over(tmp_path: Path) -> None:
    folder = Stages(tmp_path, finish)("a", "fit", "laptop/rlt")
    assert Stages(tmp_path, fail)("a", "fit", "laptop/rlt") == folder
    with pytest.raises(StageError, match="must have today's settings"):
        Stages(tmp_path, fail)("a", "fit", "laptop/rlt", data__seed=1)


def test_an_interruption_ends_the_stages_that_run(tmp_path: Path) -> None:
    stages = Stages(tmp_path, hang)
    begin = time.perf_counter()

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver.run_side_by_side(
            stages, [interrupt, lambda: stages.run([str(tmp_path / "begun")], tmp_path / "log")]
        )
    assert time.perf_counter() - begin < 100


def test_an_interval_is_students_t_over_seeds() -> None:
    # Mean 5, standard deviation 1, t = 4.303 for two degrees of freedom.
    assert driver.compute_interval([4.0, 5.0, 6.0], 512) == pytest.approx(4.303 / 3**0.5)
    # One seed: 1.96 standard errors of 256 right answers to 512 problems.
    assert driver.compute_interval([50.0], 512) == pytest.approx(196 * (0.25 / 512) ** 0.5)


def test_tables_and_picture_have_every_arm(tmp_path: Path) -> None:
    kinds = {"steps": 80.0, "filler": 10.0, "leap": 5.0, "wrong": 5.0, "other": 0.0}
    students: Any = {
        "base": {"accuracy": [20.0], "greedy": [90.0]},
        "rlt": {"accuracy": [95.0], "greedy": [99.0], "traces": [kinds]},
    }
    figures, sampled, greedy = driver.list_tables(students, {}, 512)[1::2]
    assert "| base | 20.00 ± 3.46 | 90.00 ± 2.60 |  |" in figures
    assert "| steps 80 / filler 10 / leap 5 / wrong 5 / other 0 |" in figures
    assert "| rlt |  | +75.0 ± 3.9 |" in sampled or "| rlt | +75.0 ± 3.9 |" in sampled
    assert "+9.0 ± 2.7" in greedy
    driver.draw([Setting("main")], [students], tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
