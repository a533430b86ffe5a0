"""Likelihood rewards in miniature: the arms, tasks and figures of research/likelihood.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import driver
import pytest
from arms import read
from likelihood import Likelihood
from stages import Stages

from rlt_lightning.models.load import load_tokenizer

TINY = {"num_warmup": 128, "num_traces": 64, "num_test": 8, "num_iterations": 2, "student_epochs": 1}


def test_the_long_solution_is_the_chain_in_words(tmp_path: Path) -> None:
    one = Likelihood(Stages(tmp_path), replace(Likelihood.SETTINGS["long"], **TINY), seed=0)
    solution = one.write_solution({"question": "start 2, add 1, add 3, times 7?"})
    assert solution == "2 add 1 is 3, 3 add 3 is 6, 6 times 7 is 2.\n\\boxed{2}"
    one.write_data()
    assert read(one.data_file("raw")) == read(one.data_file("rlt"))  # all methods have the same problems
    lengths = {len(load_tokenizer("miniature").encode(row["solution"])) for row in read(one.data_file("raw"))}
    assert lengths == {34}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_arms_run_at_tiny_size(tmp_path: Path) -> None:
    names = ["base", "warm", "binary_base", "nover_warm", "opd_self_base", "rlt_base", "warmup_t0_warm"]
    setting = replace(Likelihood.SETTINGS["long"], **TINY)
    page = driver.run("likelihood", Likelihood, Stages(tmp_path), [setting], [0], names)["settings"]["long"]
    found = page["arms"]
    assert list(found) == names
    # The miniature was trained on boxes alone: every word of the chain is a surprise to it.
    assert found["base"]["log p"][0] < -50
    assert {"length at step 1", "length at step 2"} <= found["nover_warm"].keys()
    assert {arm for arm in names if "maj_at_k" in found[arm]} == {"base", "warm"}
    answers = read(tmp_path / "long/seed0/warm/votes/responses.jsonl")
    assert len(answers) == setting.num_votes * TINY["num_test"]
    assert len(read(tmp_path / "long/seed0/warmup_t0_warm/traces/traces.jsonl")) == 64
    samples = read(tmp_path / "long/seed0/opd_self_base/student/rollouts.jsonl")
    assert len(samples) == len(read(tmp_path / "long/seed0/nover_warm/student/rollouts.jsonl")) == 2 * 64
    assert any("nover_warm, steps 1 to 5" in title for title in page["tables"])
