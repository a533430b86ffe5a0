"""Which answers are equal, where an answer is found, which rows can be judged: answers.yaml has the cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlt_lightning.judging import compare
from rlt_lightning.judging.answers import find_answer, find_letter, read_reference
from rlt_lightning.judging.compare import same_answer, same_formula
from rlt_lightning.judging.judge import Judge
from rlt_lightning.judging.normalise import normalise
from rlt_lightning.types import BadRowError, BadRowReason

CASES = yaml.safe_load((Path(__file__).parent / "answers.yaml").read_text(encoding="utf-8"))
# No answer at all, or what no parser takes.
UNSOUND = ["", "?", "???", "nan", "None", "{", "}", "}{", "[,", "7 }", "\ud800", "\x00", "\u202e"]
UNSOUND += [r"\frac{", r"\frac{7}{", r"\left(", r"\begin{pmatrix}1", r"\sqrt" * 100]
UNSOUND += ["(" * 300, "=" * 500, "1/" * 500, "^" * 900]


@pytest.mark.parametrize("case", CASES["normalised"], ids=lambda case: case["text"])
def test_texts_are_written_in_one_notation(case: dict[str, Any]) -> None:
    assert {text: normalise(text) for text in case["from"]} == dict.fromkeys(case["from"], case["text"])
    assert normalise(f"\u200b{case['text']}\ufe0f") == case["text"]


@pytest.mark.parametrize("kind", CASES["compared"])
def test_answers_are_compared_by_what_they_mean(kind: str) -> None:
    faults = []
    for case in CASES["compared"][kind]:
        reference = case["reference"]
        right, wrong = [reference, *case.get("right", [])], case.get("wrong", [])
        faults += [(reference, "is", answer) for answer in right if not same_answer(reference, answer)]
        faults += [(reference, "is not", answer) for answer in wrong if same_answer(reference, answer)]
    assert faults == []


# What sympy raises of the first one: TypeError, ValueError, ZeroDivisionError.
@pytest.mark.parametrize(("a", "b"), [("i>1", "5"), ("[i,2]", "5"), (r"{0.4}<{\cot 0}", "1+i<2")])
def test_formulas_without_a_value_equal_nothing(a: str, b: str) -> None:
    assert not same_formula(a, b)


def test_a_bug_of_the_judge_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "same_expression", lambda *_: {}["bug"])
    with pytest.raises(KeyError, match="bug"):
        same_formula("x+1", "1+x")


@pytest.mark.parametrize("answer", UNSOUND, ids=range(len(UNSOUND)))
def test_unsound_answers_are_wrong_and_raise_nothing(answer: str) -> None:
    for reference in ("7", "(3,4)", "x+1", "2x+y=3", r"\text{odd}"):
        assert not same_answer(reference, answer)
        assert not same_answer(answer, reference)
    for find in (find_answer, find_letter):
        find(answer)
        find(f"The answer is {answer}")
        find(f"\\boxed{{{answer}}}")


@pytest.mark.parametrize("kind", CASES["found"])
def test_an_answer_is_found_where_it_stands(kind: str) -> None:
    cases = [(case["solution"], case["answer"]) for case in CASES["found"][kind]]
    found = [(solution, normalise(find_answer(solution) or "")) for solution, _ in cases]
    assert found == [(solution, normalise(answer or "")) for solution, answer in cases]


def test_a_mark_is_found_far_before_the_end() -> None:
    assert find_answer("#### 42\n" + "and this agrees with the check. " * 80) == "42"


@pytest.mark.parametrize("case", CASES["letters"], ids=lambda case: str(case["letter"]))
def test_a_choice_is_one_letter(case: dict[str, Any]) -> None:
    found = {solution: find_letter(solution) for solution in case["solutions"]}
    assert found == dict.fromkeys(case["solutions"], case["letter"])


READ: list[tuple[dict[str, Any], str]] = [
    ({"answer": 7}, "7"),
    ({"answer": 27.0}, "27"),
    ({"answer": 0.1 + 0.2}, "0.3"),
    ({"answer": 0.00001}, "1e-05"),
    ({"answer": -0.0}, "-0"),
    ({"answer": False}, "False"),
    ({"answer": ["7"]}, "7"),
    ({"answer": ["3", 5]}, "3, 5"),
    ({"answer": " 7 "}, "7"),
    ({"answer": "1 + 1 = 2\n#### 1,080"}, "1,080"),
    ({"answer": "6 * 2 = 12 #### 12"}, "12"),
    ({"answer": r"so \boxed{3} or \boxed{4}"}, "3, 4"),
    ({"answer": "The answer is 7."}, "7"),
    ({"answer": "", "solution": r"So \boxed{2}."}, "2"),
    ({"answer": float("nan"), "solution": r"So \boxed{2}."}, "2"),
    ({"answer": None, "solution": "It is 2\n#### 2"}, "2"),
    ({"answer": "None"}, "None"),
    ({"answer": r"\infty"}, r"\infty"),
    ({"solution": r"so \boxed{(H)}", "kind": "choice"}, "H"),
]
CHOICES = ["B", "b.", "(B)", "B)", " B ", "B. 12 apples", "(b) some", "Answer: B", "Ｂ"]
CHOICES += [r"\boxed{B}", r"\text{(B)}"]
READ += [({"answer": answer, "kind": "choice"}, "B") for answer in CHOICES]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "no_answer"),
    ({"answer": float("nan")}, "no_answer"),
    ({"answer": []}, "no_answer"),
    ({"solution": "So it is 2."}, "no_answer"),
    ({"answer": {"value": 7}, "solution": r"\boxed{7}"}, "bad_answer"),
    ({"answer": [{"value": 7}]}, "bad_answer"),
    ({"answer": b"7"}, "bad_answer"),
    ({"answer": "nan", "solution": r"\boxed{7}"}, "bad_answer"),
    ({"answer": "???"}, "bad_answer"),
    ({"answer": "-"}, "bad_answer"),
    ({"answer": r"\frac{"}, "bad_answer"),
    ({"answer": r"\boxed{"}, "bad_answer"),
    ({"answer": "####"}, "bad_answer"),
    ({"answer": "7" * 1001}, "bad_answer"),
    ({"answer": "12", "kind": "choice"}, "bad_answer"),
    ({"answer": "A, C", "kind": "choice"}, "bad_answer"),
    ({"answer": "K", "kind": "choice"}, "bad_answer"),
    ({"answer": "A triangle", "kind": "choice"}, "bad_answer"),
]


@pytest.mark.parametrize(("row", "answer"), READ)
def test_references_are_read_from_answers_and_solutions(row: dict[str, Any], answer: str) -> None:
    assert read_reference(row) == answer


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_references_that_can_never_be_right_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError) as error:
        read_reference(row)
    assert error.value.reason == reason


def test_a_judge_takes_nothing_for_right_where_nothing_can_be() -> None:
    rows = [row for row, reason in REFUSED if reason == BadRowReason.BAD_ANSWER]
    with Judge("r1", num_workers=1) as judge:
        verdicts = judge.judge_all((r"\boxed{7}", row) for row in rows)
        verdicts += judge.judge_all((rf"\boxed{{{row['answer']}}}", row) for row in rows)
    assert not any(verdict.correct for verdict in verdicts)


def test_cases_from_the_wild_are_judged_right(shared: Path) -> None:
    cases = [json.loads(line) for line in (shared / "cases" / "judging.jsonl").read_text().splitlines()]
    with Judge("r1", num_workers=1) as judge:
        verdicts = judge.judge_all((case["response"], case["row"]) for case in cases)
    wrong = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case["right"]]
    assert len(wrong) <= 0.02 * len(cases), wrong
    assert not any(verdict.timed_out for verdict in verdicts)
