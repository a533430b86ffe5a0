"""`rlt explain` and `Teacher`: what one explanation is worth, against slow computations."""

from __future__ import annotations

import re

import pytest
import torch
from commands import rlt

from rlt_lightning import Teacher
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.tasks.stepwise import chain_rows

PROBLEM = chain_rows(4, 9)[2]


def slow_log_probs(miniature: str, thought: str) -> torch.Tensor:
    """The student's log-probs of the solution at temperature 0.7, from the text as a student writes it."""
    model, tokenizer = load_model(miniature, attn_implementation="eager"), load_tokenizer(miniature)
    question = [{"role": "user", "content": PROBLEM["question"]}]
    chat = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    before = f"{chat}<think>\n{thought}\n</think>\n\n<solution>\n"
    start = len(tokenizer(before, add_special_tokens=False).input_ids)
    ids = torch.tensor([tokenizer(before + PROBLEM["solution"], add_special_tokens=False).input_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1]
    return (logits / 0.7).log_softmax(-1).gather(1, ids[0, start:, None]).squeeze(1)


def test_log_probs_are_those_of_a_slow_computation(miniature: str) -> None:
    row = PROBLEM | {"reasoning_trace": "4 add 3 is 7."}
    [score] = Teacher(miniature, miniature, tags="r1", student_system_prompt="").score([row])
    slow = slow_log_probs(miniature, row["reasoning_trace"])
    assert score.solution_log_probs == pytest.approx(slow.tolist(), abs=1e-4)


def test_given_texts_are_scored_by_token(tiny_model: str) -> None:
    texts = {
        "question": "What is 2 + 2?",
        "solution": "null",
        "explanation": "Two and two.",
    }  # not YAML's null
    words = [f"--{name}={text}" for name, text in texts.items()]
    result = rlt("explain", tiny_model, f"--student={tiny_model}", *words)
    assert result.returncode == 0, result.stderr
    row = texts | {"reasoning_trace": texts["explanation"]}
    [score] = Teacher(tiny_model, tiny_model).score([row])
    assert result.stdout.startswith("Question: What is 2 + 2?\nSolution: null\n\nTwo and two.\n")
    printed = dict(re.findall(r"^ *(\w+) +([+-]\d+\.\d+)$", result.stdout, re.M))
    assert float(printed.pop("reward")) == pytest.approx(score.reward, abs=1e-4)
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(score.terms, abs=1e-4)
    values = [float(value) for value in re.findall(r"^ +(-?\d+\.\d+)  \"", result.stdout, re.M)]
    assert values == pytest.approx(score.kl + score.solution_log_probs, abs=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--question=Why?", "--solution=4", "--explanation=So."], "A score needs a student"),
        (["--question=" + "add 1, " * 1000, "--solution=4"], "leave room for an explanation"),
        (["--question=Why?", "--solution= "], "solution"),
    ],
)
def test_what_cannot_be_explained_is_one_line(words: list[str], message: str) -> None:
    result = rlt("explain", "miniature", *words)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
