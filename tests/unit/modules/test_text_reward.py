"""Rewards of a completion's text: the correctness reward by hand, in a step, and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import rlt
from fits import metrics
from grpo import rollout_callback
from lightning.pytorch import Callback
from rows_of import write_rows
from trainers import bare_trainer

from rlt_lightning.datamodules import StratosDataModule, StudentRLData
from rlt_lightning.engines import Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.rollout_rows import rollout_rows
from rlt_lightning.modules.step_metrics import reward_metrics
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.rollouts.columns import REWARD, Level, Log, Term
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.rollouts.step import ScoringPass, Shards, StepBatch
from rlt_lightning.tags import R1, TagStyle
from rlt_lightning.types import Completion, InputError, Problem, Rollout, Rollouts

# One-letter tags, which a model with random weights writes now and then.
LETTERS = TagStyle("e", "t", "a", "o", "{", "}", separator="\n")


def answer(text: str, **columns: Any) -> Rollout:
    """An answer to a problem with these columns."""
    problem = Problem(1, "?", columns.get("solution", ""), [], [], [], [], [], columns=columns)
    return Rollout(problem, Completion([1], None, "eos"), text, closed=True)


def in_tags(solution: str) -> str:
    return f"<think>\nHm.\n</think>\n\n<solution>\n{solution}\n</solution>"


def data(model: str, folder: Path, **options: Any) -> StratosDataModule:
    settings = {"source": "chains", "num_embedded_rows": 8, "prompts_per_step": 2}
    return StudentRLData(tokenizer=model, output_dir=str(folder), **settings | options)


# The reward

MAKE_35 = {"kind": "countdown", "numbers": [3, 4, 5], "target": 35}


@pytest.mark.parametrize(
    ("text", "columns", "expected"),  # reward, correct, formatted
    [
        (in_tags(r"It is \boxed{7}."), {"answer": "7"}, (1.0, 1, 1)),
        (in_tags(r"It is \boxed{7}."), {"answer": 7}, (1.0, 1, 1)),
        (in_tags(r"\boxed{\frac{1}{2}}"), {"solution": r"So \boxed{0.5}."}, (1.0, 1, 1)),
        (in_tags("#### 18"), {"answer": "9 * 2 = 18\n#### 18"}, (1.0, 1, 1)),
        (in_tags(r"\boxed{(3 + 4) * 5}"), MAKE_35, (1, 1, 1)),
        (in_tags(r"\boxed{3 * 4 + 5}"), MAKE_35, (-0.5, 0, 1)),
        (in_tags(r"\boxed{B}"), {"kind": "choice", "answer": "B"}, (1.0, 1, 1)),
        (in_tags(r"It is \boxed{8}."), {"answer": "7"}, (-0.5, 0, 1)),
        (in_tags("I do not know."), {"answer": "7"}, (-0.5, 0, 1)),
        (r"It is \boxed{7}.", {"answer": "7"}, (-1.0, 1, 0)),
        ("<think>\nHm.\n</think>\n\n<solution>\n7", {"answer": "7"}, (-1.0, 1, 0)),
        ("<solution>\n7\n</solution>\n<think>\nHm.\n</think>", {"answer": "8"}, (-1.0, 0, 0)),
        ("", {"answer": "7"}, (-1.0, 0, 0)),
    ],
)
def test_an_answer_earns_what_the_paper_says(text: str, columns: Any, expected: Any, judging: Any) -> None:
    terms = judging([answer(text, **columns)], R1)
    names = (REWARD, Level("correct"), Level("formatted"), Level("timed_out"))
    assert tuple(terms[name].item() for name in names) == (*expected, 0)


@pytest.fixture(scope="module")
def judging() -> Any:
    reward = CorrectnessReward()
    yield reward
    reward.close()
    assert reward.judge is not None
    assert reward.judge._pool is None
    reward.close()


def test_a_wrong_answer_may_earn_as_much_as_none() -> None:
    assert CorrectnessReward(right=2.0, wrong=0.0, unformatted=0.0).wrong == 0


# Its rows


def test_rows_need_an_answer_and_no_solution(tiny_model: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "9 * 2?", "answer": "9 * 2 = 18\n#### 18"},  # GSM8K
        {"problem": "1 + 1?", "answer": 2, "solution": None},  # AMC
        {"question": "1 + 2?", "solution": r"So \boxed{3}."},
        {"question": "Which?", "answer": "B", "kind": "choice"},
        {"question": "Make 35.", "solution": "(3 + 4) * 5", **MAKE_35},
        {"question": "Prove it.", "solution": "Clear."},
        {"question": "1 + 3?", "answer": "4", "kind": "puzzle"},
        {"question": "Make 35.", "solution": "35", "kind": "countdown", "numbers": "3 4 5", "target": 35},
        {"question": "1 + 4?"},
        {"question": "1 + 5?", "answer": {"value": 6}},
        {"question": "1 + 6?", "answer": "???", "solution": r"\boxed{7}"},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    made = data(tiny_model, tmp_path, source=source, prompts_per_step=1, max_bad_frac=0.9)
    made.setup("fit")
    assert [problem.row for problem in made.problems] == [1, 2, 3, 4, 5]
    reasons = {row: str(error.reason) for row, error in made.reports[0].bad}
    expected = {6: "no_answer", 7: "wrong_type", 8: "wrong_type", 9: "missing_column"}
    assert reasons == expected | {10: "bad_answer", 11: "bad_answer"}
    terms = CorrectnessReward()
    answers = ["18", "2", "3", "B", r"\boxed{(3 + 4) * 5}"]
    right = [
        Rollout(problem, Completion([1], None, "eos"), in_tags(text), True)
        for problem, text in zip(made.problems, answers, strict=True)
    ]
    assert terms(right, R1)[REWARD].tolist() == [1.0] * 5
    terms.close()


def test_the_student_writes_its_whole_turn(tiny_model: str, tmp_path: Path) -> None:
    made = data(tiny_model, tmp_path, tags="r1", student_system_prompt="Think.")
    made.setup("fit")
    tokenizer = made.format.tokenizer
    problem = made.problems[0]
    chat = f"<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n{problem.question}<|im_end|>\n"
    assert tokenizer.decode(problem.teacher_prompt) == chat + "<|im_start|>assistant\n"
    assert made.stop == ""
    turn = in_tags("7")
    ids = tokenizer(turn).input_ids
    ended = made.build_rollout(problem, Completion([*ids, tokenizer.eos_token_id], None, "eos"))
    assert (ended.text, ended.closed) == (turn, True)
    cut = made.build_rollout(problem, Completion(ids, None, "length"))
    assert (cut.text, cut.closed) == (turn, False)


# In a step


def test_the_judge_ends_with_a_run_that_fails(tiny_model: str, tmp_path: Path) -> None:
    class Failure(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            assert reward.judge is not None
            assert reward.judge._pool is not None
            raise OSError("no space left on device")

    reward = CorrectnessReward()
    student = RLTModule(tiny_model, student=None, reward=reward, group_size=2)
    with pytest.raises(OSError, match="no space"):
        bare_trainer(tmp_path, rollout_callback(4), Failure()).fit(student, data(tiny_model, tmp_path))
    assert reward.judge is not None
    assert reward.judge._pool is None


# From the command line


@pytest.mark.full
def test_two_processes_judge_their_own(tiny_model: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    words = ["fit", "--config=research/configs/correctness.yaml", f"--model.teacher={tiny_model}"]
    words += ["--data.source=chains", "--data.val_source=chains", "--data.num_embedded_rows=10"]
    words += ["--data.prompts_per_step=2", "--data.val_rows=2", f"--data.tags={json.dumps(vars(LETTERS))}"]
    words += ["--model.group_size=2", "--model.optimizer.lr=1e-3", "--model.optimizer.scheduler=constant"]
    words += ["--rollouts.sampling.max_completion_length=16", "--trainer.max_steps=2"]
    for folder, ranks in ((one, []), (two, ["--trainer.devices=2", "--trainer.strategy=ddp"])):
        result = rlt(*words, *ranks, f"--output_dir={folder}")
        assert result.returncode == 0, result.stderr
    for name in ("reward/mean", "reward/formatted", "reward/correct"):
        assert metrics(two)[1][name] == pytest.approx(metrics(one)[1][name]), name


def scored(*columns: Any) -> StepBatch:
    """A step of two completions with these columns."""
    step = StepBatch.of_rollouts(Rollouts([answer("a"), answer("b")], 2, 0, 1.0))
    step.set_scores(dict.fromkeys([REWARD, *columns], torch.zeros(2)))
    return step


def test_what_is_no_column_is_refused() -> None:
    with pytest.raises(InputError, match=r"such as Term\(name\), .* but has .*, 'term/brevity'\. Correct"):
        scored("term/brevity")


def test_a_column_may_not_take_the_name_of_another() -> None:
    assert [row["brevity_reward"] for row in rollout_rows(scored(Term("brevity")), [0])] == [0]
    with pytest.raises(TypeError, match="multiple values for keyword argument 'seed'"):
        list(rollout_rows(scored(Level("seed")), [0]))
    for column in (Term("std"), Level("mean"), Term("group_std"), Log("reward/mean")):
        with pytest.raises(TypeError, match="multiple values for keyword argument"):
            reward_metrics(scored(column))


def test_a_loss_leaves_the_reward_its_token_columns() -> None:
    step, scoring = scored(), ScoringPass("policy", [1], [2], {"solution": (1, 2)})
    step.tokens["solution"] = {0: torch.tensor([-0.5])}  # of the student; row 1 is another rank's
    micro = SimpleNamespace(rows=[0, 1], passes=[scoring, scoring], scale=1.0)
    output = SimpleNamespace(loss=torch.zeros(()), metrics={}, mismatch={})
    step.add_loss(micro, None, torch.tensor([-1.0, -2.0]), output)
    assert step.tokens["solution"] == {0: torch.tensor([-0.5]), 1: torch.tensor([-2.0])}


def test_ranks_share_the_tokens_of_a_reward() -> None:
    def build(rank: int) -> StepBatch:
        request = RolloutRequest([9], [[1]], [0], 0, Sampling(temperature=1.0), 2, "")
        request.completions = {i: Completion([5] * (i + 1), None, "stop") for i in (0, 1)}
        return StepBatch.of_request(request, Shards(rank, 2, 2, True))

    steps = [build(rank) for rank in (0, 1)]
    for step, row in zip(steps, (0, 1), strict=True):
        step.put_tokens("steps", [row], [torch.full((row + 1,), row + 3.0)])
        step.measured = [row]
    steps[1].put_tokens("steps", [0], [torch.full((1,), 99.0)])  # of a dummy, which rank 0 has measured too
    shared: list[Any] = []
    steps[0].share_tokens(["steps"], lambda flat: shared.append(flat) or flat)
    steps[1].share_tokens(["steps"], lambda flat: flat + shared[0])
    assert {row: values.tolist() for row, values in steps[1].tokens["steps"].items()} == {0: [3], 1: [4, 4]}
    with pytest.raises(InputError, match="steps of a reward must have a value for each sampled token"):
        steps[0].put_tokens("steps", [1], [torch.zeros(1)])
