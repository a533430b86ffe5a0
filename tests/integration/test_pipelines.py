"""Rejection sampling: a model's own right answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commands import rlt, run_rlt
from fits import assert_one_clear_line
from rows_of import read, write
from sampling import Scripted
from trainers import bare_trainer

from rlt_lightning.callbacks import DistillationWriter, RolloutCallback
from rlt_lightning.datamodules import StudentRLData, StudentSFTData
from rlt_lightning.datamodules.rows import split_response
from rlt_lightning.engines import SampleRequest, Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.tags import R1
from rlt_lightning.teacher import NoReward
from rlt_lightning.types import Completion, InputError

PROBLEMS, ANSWERS = 24, 4
SHORT = Sampling(max_completion_length=1000)


def rejection(folder: Path, *options: str) -> list[str]:
    """`rlt predict` of the miniature's own answers to last-digit chains: a few seconds."""
    return [
        *("predict", "--config=configs/laptop/rejection.yaml", f"--data.num_embedded_rows={PROBLEMS}"),
        *("--data.prompts_per_step=2", f"--rollouts.num_traces={ANSWERS}", "--distillation.select=all"),
        *(f"--output_dir={folder}", *options),
    ]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answered") / "run"
    result = run_rlt(*rejection(folder))
    assert "Next: rlt fit --config" in result.stdout
    assert "--config laptop/sft " in result.stdout
    assert "--model.pretrained" not in result.stdout  # the miniature, as that config has it
    return folder


def last_digit(question: str) -> str:
    """Work a chain out, with nothing of the package: every step is one operation on the last digit."""
    first, *steps = question.removesuffix("?").split(", ")
    value = int(first.removeprefix("start "))
    for step in steps:
        name, number = step.split()
        value = (value + int(number) if name == "add" else value * int(number)) % 10
    return str(value)


# A model's own right answers


def test_kept_answers_are_right(answered: Path) -> None:
    rows, kept = read(answered / "traces.jsonl"), read(answered / "distillation.jsonl")
    places = [(row["row"], row["trace"]) for row in rows]
    assert places == [(row, i) for row in range(1, PROBLEMS + 1) for i in range(ANSWERS)]
    for row in rows:
        boxed = re.search(r"\\boxed\{(.*?)\}", row["solution"])
        right = boxed is not None and boxed[1] == last_digit(row["question"])
        assert (row["correct"] == 1) == right
        assert row["answer"] == last_digit(row["question"])
        assert row["found_answer"] == (boxed and boxed[1])
        of_problem = [other["correct"] for other in rows if other["row"] == row["row"]]
        assert row["pass_rate"] == sum(of_problem) / ANSWERS
    assert 0 < len(kept) < len(rows)
    assert kept == [row for row in rows if row["correct"]]


def test_stage_4_learns_the_sampled_turn(answered: Path, miniature: str) -> None:
    kept = read(answered / "distillation.jsonl")
    for columns in (("question", "solution", "reasoning_trace"), ("system", "conversations")):
        rows = [{name: row[name] for name in columns} for row in kept]
        source = str(write(answered.parent / f"{columns[0]}.jsonl", rows))
        options: dict[str, Any] = {"prompts_per_step": 1, "tags": "r1", "student_system_prompt": ""}
        data = StudentSFTData(source, tokenizer=miniature, **options)
        data.setup("fit")
        for example, row in zip(data.items, kept, strict=True):
            assert len(example.token_ids) == row["student_tokens"]
            text = data.format.tokenizer.decode(example.token_ids)
            assert turn(row["reasoning_trace"], row["solution"]) in text


def turn(thought: str, solution: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n<solution>\n{solution}\n</solution>"


def test_every_answer_is_counted_once_by_what_it_is(tiny_model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_embedded_rows": 3, "student_context": 200, "prompts_per_step": 2}
    data = StudentRLData("chains", tokenizer=tiny_model, tags="r1", **options)
    data.setup("predict")
    tokenizer = data.format.tokenizer
    questions = [(p.question, p.columns["answer"]) for p in data.problems]
    right = [turn("Add.", f"\\boxed{{{answer}}}") for _, answer in questions]
    answers = {
        questions[0][0]: [right[0], turn("Longer thought.", f"So \\boxed{{{questions[0][1]}}}"), right[0]],
        questions[1][0]: [turn("No.", "\\boxed{-1}"), f"\\boxed{{{questions[1][1]}}}", right[1] + "..."],
        questions[2][0]: [right[2].replace("Add", "word " * 300), right[2] + right[2], turn("", right[2])],
    }

    def write_answers(request: SampleRequest) -> list[Completion]:
        text = tokenizer.decode(request.prompt)
        [texts] = [texts for question, texts in answers.items() if question in text]
        ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in texts]
        return [
            Completion(ids[i], None, "length", request.seed)
            if answer.endswith("...")  # it was cut off
            else Completion([*ids[i], tokenizer.eos_token_id], None, "eos", request.seed)
            for i, answer in enumerate(texts)
        ]

    rollouts = RolloutCallback(Scripted(write_answers), SHORT, num_traces=3)
    module = RLTModule(tiny_model, None, reward=CorrectnessReward())
    bare_trainer(tmp_path, rollouts, DistillationWriter("all")).predict(module, datamodule=data)
    kept = read(tmp_path / "distillation.jsonl")
    assert [(row["row"], row["trace"]) for row in kept] == [(1, 0), (1, 1), (1, 2)]
    for row in kept:
        assert f"\\boxed{{{dict(questions)[row['question']]}}}" in row["solution"]
        assert row["model"] == tiny_model
    rows = read(tmp_path / "traces.jsonl")
    # Without: an answer without tags, one that opens a second thought, one without a thought.
    assert sum(not row["solution"] for row in rows) == 3
    assert sum(bool(row["solution"]) and not row["correct"] for row in rows) == 1
    assert [row["pass_rate"] for row in rows][::3] == [1, 2 / 3, 1]


def test_resamples_of_answers_are_refused(tmp_path: Path) -> None:
    refused = rlt(*rejection(tmp_path / "run", "--rollouts.max_resamples=2"))
    assert_one_clear_line(refused, "rollouts.max_resamples must be 0, since pass_rate counts every")


def test_a_set_without_a_right_answer_is_refused_and_its_answers_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = rlt(*rejection(folder, "--rollouts.sampling.max_completion_length=1"))
    assert result.returncode == 2
    assert "traces.jsonl can be one" in result.stderr
    assert len(read(folder / "traces.jsonl")) == PROBLEMS * ANSWERS
    assert not (folder / "distillation.jsonl").read_text()


def test_a_reward_without_verdicts_keeps_no_answers(tiny_model: str, tmp_path: Path) -> None:
    data = StudentRLData(tokenizer=tiny_model, num_embedded_rows=2)
    trainer = bare_trainer(tmp_path, RolloutCallback(sampling=SHORT), DistillationWriter())
    with pytest.raises(InputError, match="must be CorrectnessReward, but is NoReward"):
        trainer.predict(RLTModule(tiny_model, None, reward=NoReward()), datamodule=data)


def test_a_response_with_a_second_tag_is_not_split() -> None:
    assert split_response(turn("Hm.", "2"), R1) == ("Hm.", "2")
    assert split_response(turn("Hm.</solution>", "2"), R1) is None
    assert split_response(turn("Hm.", "2") + turn("Hm.", "3"), R1) is None
    assert split_response(turn("<|end_of_thought|>", "2"), R1) is None
