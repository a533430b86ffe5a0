"""Last-digit chains: steps, splits, kinds of traces, and the tiny models that were pretrained on them."""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path
from random import Random

import pytest
import torch
from commands import rlt
from safetensors.torch import load_file
from trace_kinds import chain_kind, parse_chain

from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.models.embedded import MINIATURES
from rlt_lightning.tasks.draw import find_split
from rlt_lightning.tasks.stepwise import (
    CHAIN_SPLITS,
    CHAIN_WORDING,
    build_chain,
    chain_rows,
    draw_chains,
    draw_ending,
)
from rlt_lightning.types import InputError

QUESTION = "start 2, add 1, add 3, times 7?"  # 2 -> 3 -> 6 -> 42, of which 2 is kept


def test_a_chain_keeps_the_last_digit() -> None:
    problem = build_chain(2, [("add", 1), ("add", 3), ("times", 7)])
    assert problem.question == QUESTION
    assert problem.steps == ["2 add 1 is 3", "3 add 3 is 6", "6 times 7 is 2"]
    assert problem.answer == "2"
    assert parse_chain(QUESTION).steps == problem.steps


def test_every_drawn_trace_is_of_the_kind_that_was_drawn() -> None:
    rng = Random(0)
    for _ in range(300):
        [problem] = draw_chains(rng, 1, 5, "train")
        place, kind = rng.randrange(5), rng.choice(("filler", "leap", "wrong"))
        sentences = [*problem.steps[:place], *draw_ending(problem, CHAIN_WORDING, place, kind, rng)]
        assert chain_kind(problem.question, CHAIN_WORDING.trace(sentences)) == (kind, place)


def test_no_question_is_in_two_splits() -> None:
    found = {split: {row["question"] for row in chain_rows(2000, 1, split)} for split in ("train", "test")}
    found["pretrain"] = {draw_chains(Random(i), 1, 5, "pretrain")[0].question for i in range(2000)}
    for split, questions in found.items():
        assert {find_split(question, CHAIN_SPLITS) for question in questions} == {split}
    assert not found["train"] & found["test"] | found["pretrain"] & (found["train"] | found["test"])


def test_chains_are_an_embedded_source() -> None:
    assert [row for _, row in read_rows("chains", "train", 8, 3)] == chain_rows(8, 3)
    with pytest.raises(InputError, match="splits train and test"):
        read_rows("chains", "validation", 8, 3)
    with pytest.raises(InputError, match="Lower data"):
        chain_rows(100, length=1)


# The embedded models

SHA256 = {
    "miniature": "30a07cc29a29b8962f30db812f59ea23fbf1baea8c4a84050a30efb8ada5ab2e",
    "miniature-teacher": "68619331d413974cc735b6069a9e0b1c561fe01d731a282bf32a50c201567192",
    "named-chains-teacher": "f9bb502e6d336889f71e9471e3e210d650310598c7a45a16e3b3d3ece3e37898",
    "named-chains-student": "3a5cfccfe8aec43741582818a50f0ddd54cfc1acd1091350bdc9351489b7f6ca",
}


def test_the_embedded_weights_are_those_that_were_made() -> None:
    contents = {name: (folder / "model.safetensors").read_bytes() for name, folder in MINIATURES.items()}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} == SHA256


@pytest.mark.full
def test_the_warmed_up_teacher_is_made_by_one_command(tmp_path: Path) -> None:
    readme = (MINIATURES["miniature"].parent / "README.md").read_text()
    [command] = re.findall(r"`rlt (fit --config laptop/warmup [^`]*)`", readme)
    assert rlt(*shlex.split(command), f"--output_dir={tmp_path}").returncode == 0
    folders = (tmp_path / "model", MINIATURES["miniature-teacher"])
    made, shipped = (load_file(folder / "model.safetensors") for folder in folders)
    assert made.keys() == shipped.keys()
    for name, weight in made.items():
        # Sums in another order, on another processor, change the last digits.
        torch.testing.assert_close(weight, shipped[name], atol=1e-3, rtol=0)
