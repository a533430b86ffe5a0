"""Likelihood rewards in miniature: the arms, tasks and figures of research/likelihood.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import likelihood
import pytest
from arms import read
from likelihood import SETTINGS, Likelihood
from stages import Stages

from rlt_lightning.models.load import load_tokenizer

TINY = {"num_warmup": 128, "num_traces": 64, "num_test": 8, "num_iterations": 2, "student_epochs": 1}


def test_the_long_solution_is_the_chain_in_words(tmp_path: Path) -> None:
    one = Likelihood(Stages(tmp_path), replace(SETTINGS["long"], **TINY), seed=0)
    solution = one.solution({"question": "start 2, add 1, add 3, times 7?"})
    assert solution == "2 add 1 is 3, 3 add 3 is 6, 6 times 7 is 2.\n\\boxed{2}"
    one.write_data()
    assert read(one.data_file("raw")) == read(one.data_file("rlt"))  # all methods have the same problems
    lengths = {len(load_tokenizer("miniature").encode(row["solution"])) for row in read(one.data_file("raw"))}
    assert lengths == {34}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_arms_run_at_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        likelihood, "SETTINGS", {task: replace(setting, **TINY) for task, setting in SETTINGS.items()}
    )
    arms = ["binary_base", "nover_warm", "opd_self_base", "rlt_base", "warmup_t0_warm", "best_of_4_base"]
    likelihood.run(tmp_path, [0], arms, ["long"], num_workers=2)
    found = json.loads((tmp_path / "likelihood.json").read_text())["tasks"]["long"]
    assert list(found["arms"]) == ["base", "warm", *arms]
    # The miniature was trained on boxes alone: every word of the chain is a surprise to it.
    assert found["arms"]["base"]["log_prob"][0] < -50
    assert len(found["arms"]["nover_warm"]["lengths"][0]) == 2  # steps
    assert found["arms"]["warm"].keys() - found["arms"]["rlt_base"].keys() == {"majority"}
    answers = read(tmp_path / "long/seed0/warm/votes/responses.jsonl")
    assert len(answers) == likelihood.NUM_VOTES * TINY["num_test"]
    numbers = [
        len(read(tmp_path / f"long/seed0/{arm}/traces/traces.jsonl"))
        for arm in ("warmup_t0_warm", "best_of_4_base")
    ]
    assert numbers == [64, 4 * 64]
    samples = read(tmp_path / "long/seed0/opd_self_base/student/rollouts.jsonl")
    assert len(samples) == len(read(tmp_path / "long/seed0/nover_warm/student/rollouts.jsonl")) == 2 * 64
    assert "| NOVER |" in (tmp_path / "likelihood.md").read_text()
    assert "<svg" in (tmp_path / "likelihood.svg").read_text()
