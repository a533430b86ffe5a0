"""The judge compares answers by what they mean, and always within the deadline."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, wait_until
from kills import is_alive
from rows_of import stratos_turn

from rlt_lightning.judging.answers import arithmetic_expression, marked_answer
from rlt_lightning.judging.judge import Judge, Verdict
from rlt_lightning.types import InputError

COUNTDOWN = {"kind": "countdown", "numbers": [95, 21, 38], "target": 36}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(deadline_s=20.0, num_workers=1) as judge:  # of a busy machine
        yield judge


def test_the_answer_is_looked_for_in_the_solution_block_then_at_the_end(judge: Judge) -> None:
    verdicts = {
        stratos_turn(r"Perhaps \boxed{4}.", r"It is \boxed{5}."): Verdict(True, True, "5"),
        stratos_turn(r"It is \boxed{5}.", "It is 4."): Verdict(False, True, "4"),
        r"First \boxed{4}, then \boxed{5}": Verdict(True, False, "5"),
        "The final answer is 5.": Verdict(True, False, "5"),
        "2 + 3 is\n#### 5": Verdict(True, False, "5"),
        "I do not know.": Verdict(False, False, None),
        r"\boxed{5} and \boxed{6": Verdict(True, False, "5"),  # the last one is never closed
    }
    assert {text: judge.judge(text, {"answer": "5"}) for text in verdicts} == verdicts


def test_formatted_means_thought_and_solution_in_order_and_closed() -> None:
    whole = stratos_turn("a", "b")
    judge = Judge()
    assert judge.is_formatted(whole)
    for tag in ("<|begin_of_thought|>", "<|end_of_thought|>", "<|begin_of_solution|>", "<|end_of_solution|>"):
        assert not judge.is_formatted(whole.replace(tag, ""))
    thought, solution = whole.split("\n\n<|begin_of_solution|>")
    assert not judge.is_formatted("<|begin_of_solution|>" + solution + thought)
    assert not judge.is_formatted("")
    assert Judge("r1").is_formatted("<think>\na\n</think>\n<solution>\nb\n</solution>")


def test_a_reference_without_an_answer_is_refused(judge: Judge) -> None:
    with pytest.raises(InputError, match=r"have an `answer`, or a `solution`.* only the columns question"):
        judge.judge("5", {"question": "?"})
    with pytest.raises(InputError, match="must be math, choice or countdown, but is 'essay'"):
        judge.judge("5", {"answer": "5", "kind": "essay"})


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        (r"\boxed{95 - 38 - 21}", "95 - 38 - 21"),
        (r"\boxed{3 \times (4 \div 2) = 6}", "3 * (4 / 2)"),
        ("Let me see.\nAnswer: (1 + 2) * 3.", "(1 + 2) * 3"),
        (r"\boxed{2**9}", None),
        (r"\boxed{2* *9}", None),
        (r"\boxed{9//2}", None),
        (r"\boxed{2.5 * 4}", None),  # would pass for a use of 2 and 5
        (r"\boxed{__import__('os').abort()}", None),
        (r"\boxed{" + "1+" * 200 + "1}", None),
    ],
)
def test_only_plain_arithmetic_is_evaluated(text: str, expression: str | None) -> None:
    assert arithmetic_expression(text) == expression


def test_countdown_is_judged_by_value_and_by_the_numbers_used(judge: Judge) -> None:
    right = ["95 - 38 - 21", "(95-21)-38"]
    wrong = ["95 - 38", "36", "21 + 38 - 95", "95 - 38 - 21 - 0", "95 - 38 - 21 + 21 - 21", "(95)(21)", "1 2"]
    verdicts = judge.judge_all((f"\\boxed{{{answer}}}", COUNTDOWN) for answer in right + wrong)
    assert [verdict.correct for verdict in verdicts] == [True] * 2 + [False] * 7
    large = COUNTDOWN | {"numbers": [1000, 1000, 1], "target": 1000001}
    nearly = judge.judge_all((f"\\boxed{{1000*1000{sign}1}}", large) for sign in "+-")
    assert [verdict.correct for verdict in nearly] == [True, False]


def test_equivalent_answers_share_a_number(judge: Judge) -> None:
    written = ["4", "0.5", r"\frac12", None, "4.0", "7", r"\frac{2}{4}", "five"]
    texts = ["I do not know" if text is None else f"\\boxed{{{text}}}" for text in written]
    verdicts = judge.judge_all((text, {"answer": "7"}) for text in texts)
    assert judge.same_answers(verdicts, "math") == [0, 1, 1, None, 0, 5, 1, 7]
    letters = [Verdict(letter == "B", True, letter) for letter in "CBAC"]
    assert judge.same_answers(letters, "choice") == [0, 1, 2, 0]


HARMLESS = {  # bounded before anything is parsed
    "a million digits": "1" * 10**6,
    "a million braces": "{" * 10**6,
    "boxes never closed": r"\boxed{" * 10**5,
    "many boxes": "\\boxed{1}\n" * 10**5,
    "emoji": "\U0001f600" * 10**6,
    "dollars": "$" * 10**6,
    "tags": "<|begin_of_solution|>" * 10**5 + "<|end_of_thought|>" * 10**5,
    "nothing": "",
    "half a surrogate pair, NUL and bidi": "\ud800\x00\u202e",
    "an answer beyond the bound": r"\boxed{" + "7" * 10**6 + "}",
    "a million words": "so so " * 10**6,
}
MONSTERS = {  # sympy alone would compute some of these for longer than anyone waits, in C code too
    "power tower": r"\boxed{9^{9^{9}}}",
    "higher power tower": r"\boxed{9^{9^{9^{9}}}}",
    "factorial of a tower": r"\boxed{10^{10^{10}}!}",
    "binomial": r"\boxed{(1+x)^{99999}}",
    "sum": r"\boxed{\sum_{k=1}^{10^{9}} \sin(k^{k})}",
    "integral": r"\boxed{\int_0^{\infty} x^{x^{x}} dx}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 60 + "2" + "}" * 60 + "}",
    "nested braces": r"\boxed{" + "{" * 400 + "}" * 400 + "}",
    "nested parentheses": r"\boxed{" + "(" * 450 + ")" * 450 + "}",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_monstrous_responses_are_wrong_at_once(name: str, judge: Judge) -> None:
    verdict = judge.judge(HARMLESS[name], {"answer": "17"})
    assert (verdict.correct, verdict.timed_out) == (False, False)


def test_monsters_are_cut_off_and_their_neighbours_judged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with Judge(deadline_s=300.0, num_workers=3) as judge:
        neighbour = judge._submit(Path.read_text, tmp_path / "fifo")  # runs until the text is written
        judge.deadline_s = 1.0
        verdicts = judge.judge_all([(monster, {"answer": "17"}) for monster in MONSTERS.values()])
        assert judge._submit(time.sleep, 60)(None) == (None, True)  # whatever sympy bounds by itself
        (tmp_path / "fifo").write_text("17")
        assert neighbour(None) == ("17", False)
        judge.deadline_s = 300.0
        assert judge.judge_all([(r"\boxed{17}", {"answer": "17"})] * 6) == [Verdict(True, False, "17")] * 6
    assert not any(verdict.correct for verdict in verdicts)
    by_name = dict(zip(MONSTERS, verdicts, strict=True))
    assert by_name["power tower"] == Verdict(False, False, "9^{9^{9}}")  # known to be too large


def test_memory_is_limited_beyond_what_a_process_begins_with() -> None:
    with Judge(num_workers=1, memory_gib=0.1) as judge:
        assert judge._submit(bytes, 20 * 2**20)(None) == (bytes(20 * 2**20), False)
        assert judge._submit(bytes, 200 * 2**20)(None) == (None, True)
        assert judge.judge(r"\boxed{17}", {"answer": "17"}).correct


def test_idle_processes_that_something_else_kills_are_replaced() -> None:
    right = [(r"\boxed{17}", {"answer": "17"})] * 5
    with Judge(deadline_s=30.0, num_workers=2) as judge:
        judge.judge_all(right)
        broken = judge._pool
        assert broken is not None
        for worker in list(broken._pool_manager.worker_manager.workers):
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not broken.active)
        lost = iter([(broken, Future[Any]())])  # a task that was handed over just before
        schedule = judge._schedule
        judge._schedule = lambda *task: next(lost, None) or schedule(*task)  # type: ignore[method-assign]
        assert all(verdict.correct for verdict in judge.judge_all(right))
        assert next(lost, None) is None
        assert [judge._submit(os._exit, 1)(None) for _ in range(3)] == [(None, True)] * 3  # dies at once
        assert judge.judge(*right[0]).correct


def test_processes_that_end_as_soon_as_they_begin_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlt_lightning.judging.judge.enter_worker", os._exit)  # with status memory_gib
    with (
        Judge(num_workers=1, memory_gib=1) as judge,
        pytest.raises(InputError, match=r"must start, but did not.* memory_gib=1"),
    ):
        judge.judge(r"\boxed{17}", {"answer": "17"})


def test_a_judge_closes_twice_starts_again_and_can_be_sent_to_other_processes() -> None:
    judge = Judge("r1", num_workers=1)
    assert judge.judge("5", {"answer": "5"}).correct
    assert pickle.loads(pickle.dumps(judge)).tags == judge.tags
    judge.close()
    judge.close()
    assert judge.judge("5", {"answer": "5"}).correct
    judge.close()


KILLED = """
import os, signal, time
from rlt_lightning.judging.judge import Judge
judge = Judge(num_workers=1)
judge.judge("5", {"answer": "5"})
print(*judge._pool._pool_manager.worker_manager.workers, flush=True)
_, task = judge._schedule(time.sleep, 600)
while not task.running():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_judging_processes_end_with_a_killed_run() -> None:
    command = [sys.executable, "-c", KILLED]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=570)
    [worker] = map(int, run.stdout.split())
    wait_until(lambda: not is_alive(worker))


def test_marked_answers_balance_their_braces() -> None:
    answers = {
        r"\boxed{\frac{1}{2}} and \boxed{x": r"\frac{1}{2}",
        r"\boxed{\left\{1, 2\right\}}": r"\left\{1, 2\right\}",
        r"\boxed{1\\{2}}": r"1\\{2}",  # a line break, then a brace
    }
    answers |= {r"\fbox{3}": "3", r"\boxed {3}": "3", "3": None}
    assert {text: marked_answer(text) for text in answers} == answers
