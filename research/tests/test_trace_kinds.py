"""The kind of a trace, told from its text."""

from __future__ import annotations

import pytest
from trace_kinds import chain_kind, word_sum_kind

CHAIN = "start 2, add 1, add 3, times 7?"  # 2 -> 3 -> 6 -> 42, of which 2 is kept
WORD_SUM = "Ana has 8 shells, buys 5, finds 3 and gets 4. How many shells does Ana have now?"


@pytest.mark.parametrize(
    ("trace", "kind", "num_right"),
    [
        ("2 add 1 is 3, 3 add 3 is 6, 6 times 7 is 2.", "steps", 3),
        ("2 add 1 is 3, 3 add 3 is 7, 7 times 7 is 9.", "wrong", 1),
        ("2 add 1 is 3, one looks at the numbers, one keeps going like this.", "filler", 1),
        ("one looks at the numbers, one looks at the numbers, one takes the next part.", "filler", 0),
        ("clearly it must be 2.", "leap", 0),
        ("2 add 1 is 3, clearly the answer is 8.", "leap", 1),
        ("2 add 1 is 3, 3 add 3 is 6.", "other", 2),
        ("2 add 1 is 3, 3 add 3 is 6, 6 times 7 is 2, clearly it must be 2.", "other", 3),
        ("6 times 7 is 2.", "wrong", 0),
        ("clearly it must be 2, one looks at the numbers.", "other", 0),
        ("", "other", 0),
        ("2 add 1 is 3 3 add 3 is 6 6 times 7 is 2.", "other", 0),  # no joints
        ("2 add 1 is 4 and so on.", "other", 0),
        ("2 add 1 is 4, clearly it must be 2.", "wrong", 0),
        ("2 add 1 is 3, 3 add 3 is 6, 6 times 7 is 2", "steps", 3),
    ],
)
def test_the_kind_of_a_chains_trace_is_told_from_its_text(trace: str, kind: str, num_right: int) -> None:
    assert chain_kind(CHAIN, trace) == (kind, num_right)


@pytest.mark.parametrize(
    ("trace", "kind", "num_right"),
    [
        ("8 + 5 = 13. 13 + 3 = 16. 16 + 4 = 20.", "steps", 3),
        ("\n8 + 5 = 13. 13 + 3 = 16. 16 + 4 = 20\n", "steps", 3),
        ("8 + 5 = 13. 13 + 3 = 15. 15 + 4 = 19.", "wrong", 1),
        ("8 + 5 = 130. 13 + 3 = 16. 16 + 4 = 20.", "wrong", 0),
        ("8 + 6 = 14. 14 + 3 = 17. 17 + 4 = 21.", "wrong", 0),
        ("It is easy to see that the answer is 20.", "leap", 0),
        ("8 + 5 = 13. Clearly the answer must be 21.", "leap", 1),
        ("8 + 5 = 13. This is not hard. Then we do what it says.", "filler", 1),
        ("This is not hard.", "filler", 0),
        ("8 + 5 = 13.", "other", 1),
        ("8 + 5 = 13. 13 + 3 = 16. 16 + 4 = 20. This is not hard.", "other", 3),
        ("", "other", 0),
        ("Ana buys shells.", "other", 0),
    ],
)
def test_the_kind_of_a_word_sums_trace_is_told_from_its_text(trace: str, kind: str, num_right: int) -> None:
    assert word_sum_kind(WORD_SUM, trace) == (kind, num_right)
