"""Named chains: what a name means follows from the solution only, and the two models that know the task."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest
from trace_kinds import named_chain_kind, parse_named_chain

from rlt_lightning.tasks.named_chains import (
    build_mixture,
    build_named_chain,
    draw_facts,
    draw_named_chain,
    named_chain_rows,
)
from rlt_lightning.tasks.stepwise import CHAIN_WORDING, draw_ending

FACTS = draw_facts(0)
find_kind = partial(named_chain_kind, FACTS)


def test_a_solution_has_the_states_after_names() -> None:
    # 4 + 2 = 6, 6 + 3 = 9; 9 * 3 = 27, of which 7 is kept, 7 + 1 = 8
    problem = build_named_chain(4, [("add", 2), ("times", 3)], [("blik", 3), ("dorf", 1)])
    assert problem.question == "start 4, add 2, blik, times 3, dorf?"
    assert problem.steps == [
        *("4 add 2 is 6", "blik is add 3, 6 add 3 is 9"),
        *("9 times 3 is 7", "dorf is add 1, 7 add 1 is 8"),
    ]
    assert problem.answer == "9 8"


def test_questions_say_nothing_of_what_names_add() -> None:
    first, other = (named_chain_rows(300, draw_facts(seed), 5) for seed in (1, 2))
    assert [row["question"] for row in first] == [row["question"] for row in other]
    same = sum(row["solution"] == another["solution"] for row, another in zip(first, other, strict=True))
    assert same < 10  # one in a thousand by chance


def test_every_drawn_trace_is_of_the_drawn_kind() -> None:
    rng, names = Random(0), [*FACTS]
    for _ in range(300):
        problem = draw_named_chain(rng, names, FACTS)
        assert parse_named_chain(FACTS, problem.question).steps == problem.steps
        assert find_kind(problem.question, CHAIN_WORDING.trace(problem.steps)) == ("steps", 6)
        place, kind = rng.randrange(6), rng.choice(("filler", "leap", "wrong"))
        sentences = [*problem.steps[:place], *draw_ending(problem, CHAIN_WORDING, place, kind, rng)]
        assert find_kind(problem.question, CHAIN_WORDING.trace(sentences)) == (kind, place)


def test_a_mixture_has_the_shares_asked_for() -> None:
    rows = named_chain_rows(4000, FACTS, 1, mixture=build_mixture(steps=0.1, filler=0.6, leap=0.15))
    kinds = [find_kind(row["question"], row["reasoning_trace"]) for row in rows]
    counts = Counter("broken" if kind == "filler" and place else kind for kind, place in kinds)
    shares = {kind: number / len(rows) for kind, number in counts.items()}
    # Three standard errors of 60 % of 4,000 are 0.023.
    assert shares == pytest.approx({"steps": 0.1, "filler": 0.6, "leap": 0.15, "broken": 0.15}, abs=0.024)
