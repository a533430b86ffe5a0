"""Whether the frozen students can reward right traces, or would rather have a teacher write something else.

    a row's right trace ─┬▶ leap     straight to the answer
                         └▶ filler   as many sentences that say nothing
    teacher, students ───▶ the reward of each, under the exact KL ─▶ Ranking

RLT teaches what earns most. A student that does not know a step finds it unlikely even when it reads it, and
pays more for leaps and filler (research/rounds.md). `rlt check` makes a ranking before a run. Leaps and
filler are made of the rows' own sentences, as a teacher that is warmed up on them does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from statistics import fmean
from typing import Any

from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.rows import TRACE_COLUMN, ParsedRow
from rlt_lightning.datamodules.student_views import StudentViews
from rlt_lightning.judging.answers import reference_answer
from rlt_lightning.types import Rollout

REFERENCE = ("answer", "kind", "numbers", "target")  # columns by which answers are judged
SENTENCE = re.compile(r"(?<=[.,;!?\n])\s+")
MARKS = " .,;:!?"  # what may follow a sentence
WORD = re.compile(r"[^\W\d_]+")
ADVICE = (
    "RLT teaches what earns most: let the student learn some traces first (examples/rounds.sh), or warm the "
    "teacher up longer."
)
VARIANTS = {"leap": "a leap to the answer", "filler": "filler"}  # of a right trace, and how they are called
JUDGED = 8  # rows that are judged, for each that is ranked
NUM_PHRASES = 16  # the most sentences of filler, and words


@dataclass(frozen=True)
class DrawnRow:
    """A row with its texts, and the columns by which an answer to it is judged."""

    texts: ParsedRow
    columns: dict[str, Any]

    @classmethod
    def of(cls, columns: Mapping[str, Any], texts: ParsedRow, names: Sequence[str] = ()) -> DrawnRow:
        """Return a row with these texts; it keeps further columns of these names."""
        kept = {name: columns[name] for name in (*REFERENCE, *names) if columns.get(name) is not None}
        return cls(texts, kept)

    @property
    def trace(self) -> str:
        """Return the row's reasoning trace; '' without one."""
        return self.texts.traces.get(TRACE_COLUMN, "").strip()

    @property
    def reference(self) -> dict[str, Any]:
        """Return what an answer is judged by."""
        return {"question": self.texts.question, "solution": self.texts.solution} | self.columns


# Leaps and filler


@dataclass(frozen=True)
class Phrases:
    """What traces of a task say whatever the problem.

    Example: of last-digit chains `Phrases(("one looks at the numbers", …), ("clearly it must be ", ""), …)`.

    Attributes:
        filler: Sentences without a number that stand in several traces.
        leap: What stands before and after the answer in the most frequent last sentence that has no other
            number; None if there is none in several traces.
        words: The most frequent words.
    """

    filler: tuple[str, ...]
    leap: tuple[str, str] | None
    words: tuple[str, ...]

    @classmethod
    def find(cls, rows: Iterable[DrawnRow]) -> Phrases:
        """Return the phrases of some rows' traces."""
        filler, leaps, words = Counter[str](), Counter[tuple[str, str]](), Counter[str]()
        for row in rows:
            sentences = split_sentences(row.trace)
            filler.update({one for one in sentences if WORD.search(one) and not re.search(r"\d", one)})
            words.update(WORD.findall(row.trace))
            if sentences and (leap := read_leap(sentences[-1], row.reference)):
                leaps[leap] += 1
        frequent = tuple(one for one, number in filler.most_common(NUM_PHRASES) if number > 1)
        several = [leap for leap, number in leaps.most_common(1) if number > 1]
        most = tuple(word for word, _ in words.most_common(NUM_PHRASES))
        return cls(frequent, several[0] if several else None, most)

    def measure_share(self, row: DrawnRow) -> float:
        """Return the part of a trace's sentences that are phrases."""
        sentences = split_sentences(row.trace)
        leaps = self.leap is not None and read_leap(sentences[-1], row.reference) is not None
        return (sum(one in self.filler for one in sentences) + leaps) / len(sentences)

    def build_leap(self, row: DrawnRow) -> str:
        """Return a row's trace without its steps: a leap to the answer, else its last sentence."""
        last = SENTENCE.split(row.trace)[-1]
        answer = reference_answer(row.reference)
        if self.leap is None or answer is None:
            return last
        end = last[len(last.rstrip(MARKS)) :]
        return answer.join(self.leap) + end

    def build_filler(self, row: DrawnRow, rng: Random) -> str:
        """Return filler in place of each sentence of a row's trace, with the trace's marks between them.

        Where traces have no filler, each sentence becomes as many of their frequent words.
        """
        pieces = re.split(f"({SENTENCE.pattern})", row.trace)  # sentences, and what is between them
        filler = cycle(rng.sample(self.filler, len(self.filler)))
        for place in range(0, len(pieces), 2):
            sentence = pieces[place].rstrip(MARKS)
            words = rng.choices(self.words or ("so",), k=len(sentence.split()))
            pieces[place] = next(filler, " ".join(words)) + pieces[place][len(sentence) :]
        return "".join(pieces)


def split_sentences(trace: str) -> list[str]:
    """Return the sentences of a trace, without the marks behind them."""
    return [one.rstrip(MARKS) for one in SENTENCE.split(trace) if one.rstrip(MARKS)]


def read_leap(sentence: str, reference: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what stands around the answer in a sentence that names no other number; None if it does."""
    answer = reference_answer(reference)
    found = [*re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", sentence)] if answer else []
    if not found:
        return None
    before, after = sentence[: found[-1].start()], sentence[found[-1].end() :]
    return None if re.search(r"\d", before + after) else (before, after)


def choose_good_rows(
    rows: Sequence[DrawnRow], right: Sequence[bool | None], phrases: Phrases
) -> list[DrawnRow]:
    """Return the rows whose trace has several sentences and is right, as far as that can be judged.

    Those with the fewest phrases come first: a trace of right steps that leaps in the end is right too.
    """
    judged = any(value is not None for value in right)
    good = [row for row, value in zip(rows, right, strict=True) if value or not judged]
    return sorted((row for row in good if len(split_sentences(row.trace)) > 1), key=phrases.measure_share)


def build_variants(rows: Sequence[DrawnRow], phrases: Phrases) -> Iterator[dict[str, Any]]:
    """Yield each row with its trace and the worse variants of it, in columns of their names."""
    for number, row in enumerate(rows):
        yield {
            "question": row.texts.question,
            "solution": row.texts.solution.strip(),
            TRACE_COLUMN: row.trace,
            "leap": phrases.build_leap(row),
            "filler": phrases.build_filler(row, Random(number)),
            **row.columns,
        }


# Rewards


@dataclass(frozen=True)
class Ranking:
    """The rewards of right traces and of what is worse, by problem.

    Example: `Ranking([{"reasoning_trace": -0.2, "leap": -0.9, "filler": -0.8}], VARIANTS)`.

    Attributes:
        rewards: Of each problem the rewards, nats, by column.
        kinds: What the worse ones are, by column.
    """

    rewards: list[dict[str, float]]
    kinds: dict[str, str]

    @classmethod
    def of(cls, rewards: Iterable[tuple[Rollout, float]], kinds: dict[str, str]) -> Ranking:
        """Return the ranking of scored rollouts; problems of which limits left a variant out do not count."""
        found: dict[str, dict[str, float]] = {}
        for rollout, reward in rewards:
            columns = rollout.problem.columns
            found.setdefault(columns["question"], {})[columns["trace_column"]] = reward
        return cls([row for row in found.values() if len(row) == 1 + len(kinds)], kinds)

    def measure_mean(self, column: str) -> float:
        """Return the mean reward of a column."""
        return fmean(row[column] for row in self.rewards)

    def measure_won(self, column: str) -> float:
        """Return the part of problems whose right trace earns more than this variant."""
        return fmean(row[TRACE_COLUMN] > row[column] for row in self.rewards)

    def describe(self) -> str:
        """Return what right traces and their variants earn, as a clause."""
        variants = (f"{text} {self.measure_mean(kind):.2f}" for kind, text in self.kinds.items())
        right = f"{len(self.rewards)} right traces earn {self.measure_mean(TRACE_COLUMN):.2f} nats"
        return f"{right} on average, {' and '.join(variants)}"


def choose_reward(reward: Any, views: StudentViews) -> Any:
    """Return the reward by which given texts are scored: sampled estimators hold for samples only."""
    crosses = any(isinstance(form, CrossTokenizerFormat) for form in views.formats)
    return reward if crosses else replace(reward, kl_estimator="exact")
