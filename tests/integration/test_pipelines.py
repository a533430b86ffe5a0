"""Rejection sampling: a model's own right answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import rlt
from fits import assert_one_clear_line
from lightning.pytorch import Trainer
from rows_of import read
from sampling import numbered

from rlt_lightning.callbacks import DistillationWriter, RolloutCallback
from rlt_lightning.datamodules import (
    StratosDataModule,
    StudentRLData,
    StudentSFTData,
)
from rlt_lightning.datamodules.rows import split_response
from rlt_lightning.engines import HFEngine, SampleRequest, Sampling
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
    result = rlt(*rejection(folder))
    assert result.returncode == 0, result.stderr
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
        source = answered.parent / f"{columns[0]}.jsonl"
        source.write_text("".join(json.dumps({name: row[name] for name in columns}) + "\n" for row in kept))
        data = student_data(source, miniature)
        for example, row in zip(data.items, kept, strict=True):
            assert len(example.token_ids) == row["student_tokens"]
            turn = (
                f"<think>\n{row['reasoning_trace']}\n</think>\n\n<solution>\n{row['solution']}\n</solution>"
            )
            assert turn in data.format.tokenizer.decode(example.token_ids)


class Scripted(HFEngine):
    """Write given answers, a problem's one after another."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        super().__init__()
        self.answers = answers  # by question

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        groups = []
        for request in requests:
            seed = request.seed
            text = self.tokenizer.decode(request.prompt)
            [answers] = [answers for question, answers in self.answers.items() if question in text]
            ids = [self.tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
            eos = self.tokenizer.eos_token_id
            groups.append([Completion([*some, eos], None, "eos", seed) for some in ids])
            # An answer that says so was cut off.
            for i, answer in enumerate(answers):
                if answer.endswith("..."):
                    groups[-1][i] = Completion(ids[i], None, "length", seed)
        yield from numbered(groups)


def turn(thought: str, solution: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n<solution>\n{solution}\n</solution>"


@pytest.mark.parametrize("source", ["chains"])
def test_every_answer_is_counted_once_by_what_it_is(source: str, tiny_model: str, tmp_path: Path) -> None:
    data = StudentRLData(
        source,
        tokenizer=tiny_model,
        num_embedded_rows=3,
        tags="r1",
        student_context=200,
        prompts_per_step=2,
    )
    data.setup("predict")
    questions = [(p.question, p.columns["answer"]) for p in data.problems]
    right = [turn("Add.", f"\\boxed{{{answer}}}") for _, answer in questions]
    answers = {
        questions[0][0]: [right[0], turn("Longer thought.", f"So \\boxed{{{questions[0][1]}}}"), right[0]],
        questions[1][0]: [turn("No.", "\\boxed{-1}"), f"\\boxed{{{questions[1][1]}}}", right[1] + "..."],
        questions[2][0]: [right[2].replace("Add", "word " * 300), right[2] + right[2], turn("", right[2])],
    }
    callbacks = [RolloutCallback(Scripted(answers), SHORT, num_traces=3), DistillationWriter("all")]
    module = RLTModule(tiny_model, None, reward=CorrectnessReward())
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=callbacks)
    trainer.predict(module, datamodule=data)
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


def test_selections_of_answers_take_what_they_say() -> None:
    lengths = {1: [9, 7, 8, 7], 2: [5]}
    rows = [
        {"row": row, "trace": i, "student_tokens": length, "reward": 1.0, "fits": True}
        for row, some in lengths.items()
        for i, length in enumerate(some)
    ]

    def chosen(*options: Any) -> list[tuple[int, int]]:
        return [(row["row"], row["trace"]) for row in DistillationWriter(*options).select_traces(rows)]

    assert chosen("first", 2) == [(1, 0), (1, 1), (2, 0)]
    assert chosen("shortest") == [(1, 1), (2, 0)]
    assert chosen("shortest", 3) == [(1, 1), (1, 3), (1, 2), (2, 0)]
    assert chosen("all") == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rollouts.max_resamples=2"], "rollouts.max_resamples must be 0, since pass_rate counts every"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(
    options: list[str], expected: str, tmp_path: Path
) -> None:
    assert_one_clear_line(rlt(*rejection(tmp_path / "run", *options)), expected)


def test_a_set_without_a_right_answer_is_refused_and_its_answers_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = rlt(*rejection(folder, "--rollouts.sampling.max_completion_length=1"))
    assert result.returncode == 2
    assert "traces.jsonl can be one" in result.stderr
    assert len(read(folder / "traces.jsonl")) == PROBLEMS * ANSWERS
    assert not (folder / "distillation.jsonl").read_text()


def test_a_reward_without_verdicts_keeps_no_answers(tiny_model: str, tmp_path: Path) -> None:
    data = StudentRLData(tokenizer=tiny_model, num_embedded_rows=2)
    callbacks = [RolloutCallback(sampling=SHORT), DistillationWriter()]
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=callbacks)
    with pytest.raises(InputError, match="must be CorrectnessReward, but is NoReward"):
        trainer.predict(RLTModule(tiny_model, None, reward=NoReward()), datamodule=data)


def test_a_response_with_a_second_tag_is_not_split() -> None:
    assert split_response(turn("Hm.", "2"), R1) == ("Hm.", "2")
    assert split_response(turn("Hm.</solution>", "2"), R1) is None
    assert split_response(turn("Hm.", "2") + turn("Hm.", "3"), R1) is None
    assert split_response(turn("<|end_of_thought|>", "2"), R1) is None


def student_data(source: Path | str, model: str, **options: Any) -> StratosDataModule:
    settings: dict[str, Any] = {"prompts_per_step": 1, "tags": "r1", "student_system_prompt": ""} | options
    kind = settings.pop("kind", StudentSFTData)
    data = kind(str(source), tokenizer=model, **settings)
    data.setup("fit")
    return data
