"""`rlt explain` and `Teacher`: what one explanation is worth, against slow computations."""

from __future__ import annotations

import re

import pytest
from commands import rlt

from rlt_lightning import Teacher


def test_given_texts_are_scored_by_token(tiny_model: str) -> None:
    # The solution is not YAML's null.
    texts = {"question": "What is 2 + 2?", "solution": "null", "explanation": "Two and two."}
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
