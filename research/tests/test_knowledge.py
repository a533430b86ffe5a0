"""The ways to make explanations of facts that only the rows hold, and what selects among them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import driver
import knowledge
import make_miniature
import pytest
from arms import read
from finding import take_best
from gates import measure_named_base
from knowledge import KNOWLEDGE, Knowledge
from make_miniature import Phase, words_tokenizer
from stages import Stages

from rlt_lightning.models.load import load_tokenizer
from rlt_lightning.tasks.named_chains import make_names
from rlt_lightning.types import InputError


def test_selection_takes_a_part_or_all_above(tmp_path: Path) -> None:
    one = Knowledge(Stages(tmp_path), KNOWLEDGE, 0)
    traces = [{"reward": reward} for reward in (-1.5, -0.3, -0.6, -3.0)]
    assert take_best(traces, 1) == [{"reward": -0.3}]
    assert one.take_above(traces) == [{"reward": -0.3}, {"reward": -0.6}]
    assert one.take_above(traces[:1]) == traces[:1]  # the best one, if none is above


def test_wrong_solutions_have_no_right_number(tmp_path: Path) -> None:
    one = Knowledge(Stages(tmp_path), KNOWLEDGE, 3)
    row = {"question": "start 4, add 2, blik?", "answer": "9 8 4", "solution": "\\boxed{9 8 4}"}
    [*digits] = one.show_wrong(row)["solution"].removeprefix("\\boxed{").removesuffix("}").split()
    assert len(digits) == 3
    assert all(a != b for a, b in zip(digits, "984", strict=True))


def test_arms_without_a_meaning_are_refused() -> None:
    for arm in (*Knowledge.ARMS, "shuffled_t0", "expert"):
        Knowledge.check_arm(arm)
    with pytest.raises(InputError, match="raft"):
        Knowledge.check_arm("raft")


def test_three_explanations_of_a_row_are_equal() -> None:
    # 32 iterations of 8 problems with 8 explanations, and one of each of 1,024 rows.
    assert KNOWLEDGE.num_equal == 3


@pytest.mark.parametrize(("known", "most"), [(0, 3), (1, 16)])
def test_only_what_names_add_counts_in_dense_examples(known: float, most: int) -> None:
    tokenizer = words_tokenizer(make_names())
    corpus = make_miniature.NamedCorpus(tokenizer, 0)
    for _ in range(20):
        example = corpus.draw(Phase(1, known=known, dense=1), at=1.0)
        ids, mask = example.token_ids, example.loss_mask
        counted = [tokenizer.decode(ids[i - 2 : i + 1]) for i, counts in enumerate(mask) if counts]
        assert 1 <= len(counted) <= most
        assert all(text.startswith(" is add ") for text in counted)


def test_a_name_is_to_be_copied_from_nearby() -> None:
    tokenizer = words_tokenizer(make_names())
    example = make_miniature.NamedCorpus(tokenizer, 0).draw(Phase(1, twice=1), at=0.0)
    ids, mask = example.token_ids, example.loss_mask
    places = [place for place, counts in enumerate(mask) if counts]
    assert len(places) == make_miniature.NUM_LISTED - 1  # without a space before it, the first is bytes
    assert all(ids[place] == ids[place - 2] for place in places)


def test_a_dense_chain_begins_with_zero_before_names() -> None:
    tokenizer = words_tokenizer(make_names())
    corpus = make_miniature.NamedCorpus(tokenizer, 0)
    for _ in range(20):
        text = tokenizer.decode(corpus.draw(Phase(1, dense=1, grows=True), at=0.0).token_ids)
        steps = re.findall(r"is (\d), \w+ is add (\d), (\d) add \d is (\d)", text)
        assert steps
        # What a name adds is then the state after it, which the solution has.
        assert all(before == again == "0" and operand == after for before, operand, again, after in steps)


def test_both_bases_pass_their_gates() -> None:
    teacher, student = (measure_named_base(name) for name in (KNOWLEDGE.base, KNOWLEDGE.student))
    assert min(teacher["steps"], student["steps"], student["copies"]) > 0.99
    assert teacher["teacher_operands"] > 0.97
    assert min(teacher["teacher_words"], student["student_words"], student["known_operands"]) > 0.95
    least, most = knowledge.UNKNOWN
    assert least < student["student_operand_nats"] < most


@pytest.mark.full
def test_a_short_remake_of_both_bases_is_the_same(tmp_path: Path) -> None:
    script = Path(make_miniature.__file__)
    for name in ("a", "b"):
        words = [sys.executable, script, "--corpus", "knowledge", "--stop_after", "3", "--output_dir"]
        subprocess.run([*words, tmp_path / name], check=True, capture_output=True)
    for base in ("named-chains-teacher", "named-chains-student"):
        first, again = (tmp_path / name / base / "model.safetensors" for name in ("a", "b"))
        assert first.read_bytes() == again.read_bytes()
        assert len(load_tokenizer(str(first.parent))) == len(load_tokenizer(base))


@pytest.mark.full
def test_every_arm_runs_at_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge, "STUDENT_STEPS", 4)
    monkeypatch.setattr(knowledge, "EXPERT_STEPS", 4)
    monkeypatch.setattr(knowledge, "FILTERED_STEPS", 4)
    setting = replace(KNOWLEDGE, num_traces=32, num_test=16, num_iterations=2, right_traces=(0, 1))
    arms = list(Knowledge.ARMS)
    stages = Stages(tmp_path)
    figures = driver.run("knowledge", Knowledge, stages, [setting], [0], arms)["settings"]["knowledge"]
    found = figures["arms"]
    assert list(found) == arms
    one = Knowledge(stages, setting, 0)
    assert setting.num_equal == 5  # 2 x 64 of the iterations and 32, of 32 rows
    assert len(read(one.folder / "warmup/traces_5_t0.7/traces.jsonl")) == 5 * 32
    assert found["quarter"]["rows"] == [8]
    assert found["best_of_equal"]["rows"] == found["rlt_t0"]["rows"] == [32]
    assert found["quarter"]["reward"][0] >= found["best_of_equal"]["reward"][0]
    # All but one of five explanations of each row, of which the teacher learns from the best eighth.
    assert len(read(one.data_file("expert"))) == 16
    assert found["oracle"]["traces"][0]["steps"] == 100
    assert sum(row["number"] for row in figures["tables"][next(iter(figures["tables"]))].values()) == 32
