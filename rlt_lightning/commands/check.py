"""`rlt check`: find out before a run starts whether it can teach anything (docs/data.md).

    rows    ─▶ lengths, steps                               nothing is loaded
    model   ─▶ closed, right, spread   of a few completions that it samples
    student ─▶ ranking                 of right traces above leaps and filler
    control ─▶ what no check can say: whether RLT does more than the teacher's greedy traces

The ranking shows whether the frozen students give right traces the highest reward, or worse texts:

    a row's right trace ─┬▶ leap     straight to the answer
                         └▶ filler   as many sentences that say nothing
    teacher, students ───▶ the reward of each, under the exact KL ─▶ Ranking

RLT trains a teacher to write whatever earns most. A student that does not know a step finds it unlikely even
when it reads it, so leaps and filler earn more (research/rounds.md). Both variants are built from sentences
of the rows, since these are what a teacher writes that is warmed up on the rows.

The figures come from the code that a run uses: the datamodule's reports, `score_problems`, and the judge.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from statistics import fmean, pstdev
from typing import Any, Literal

from rlt_lightning.callbacks.alarms import GROUP_STD_BELOW
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.commands.scoring import ScoredBatch, score_problems
from rlt_lightning.console import announce
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.rows import TRACE_COLUMN, ParsedRow, require_judgeable
from rlt_lightning.datamodules.stages import ScoringData, StudentRLData, StudentSFTData, TeacherRLData
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.datamodules.views import StudentViews
from rlt_lightning.judging.answers import reference_answer
from rlt_lightning.judging.judge import Judge
from rlt_lightning.modules.base import PolicyModule, count_steps
from rlt_lightning.modules.opd import OPDModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.types import BadRowError, BadRowReason, InputError, Rollout

Status = Literal["pass", "warn", "fail", "cannot"]
TOO_LONG = {BadRowReason.PROMPT_TOO_LONG, BadRowReason.SOLUTION_TOO_LONG, BadRowReason.TOO_LONG}
READ_ROWS = 5_000  # the checked rows are drawn from so many, from the start of the source
# Limits: (below this it fails, below this it warns). Of lengths and of bad rows it is above.
CLOSED, RIGHT, SPREAD = (0.5, 0.95), (1e-9, 0.1), (1e-9, 0.5)
STAGE_0 = (0.1, 0.5)  # part of the problems that the untrained model explains
# Over leaps and filler miniature-teacher has 100 and 100 %, a teacher of 9 steps 44 and 28 %; on the task
# `new` it is 0 and 0 % under the untrained student, 100 and 91 % under one that has learned 64 traces.
RANKED = (0.5, 0.75)
LEFT_OUT = (0.01, 0.1)
# Optimizer steps below which a run hardly changes a model: the shortest shipped run that is meant to has 24.
MIN_STEPS = 20
MORE_STEPS = "Add rows, raise trainer.max_epochs or max_steps, or lower data.prompts_per_step"
REFERENCE = ("answer", "kind", "numbers", "target")  # columns by which answers are judged
SENTENCE = re.compile(r"(?<=[.,;!?\n])\s+")
MARKS = " .,;:!?"  # what may follow a sentence
WORD = re.compile(r"[^\W\d_]+")
ADVICE = (
    "RLT teaches what earns most: let the student learn some traces first (examples/rounds.sh), or warm the "
    "teacher up longer."
)
CONTROL = (
    "whether RLT does more than decoding: before you train, compare with greedy traces of this teacher, "
    "rlt predict with --rollouts.sampling.temperature 0, and with the student's own greedy answers "
    "(docs/pipeline.md, what to do first)"
)
VARIANTS = {"leap": "a leap to the answer", "filler": "filler"}  # of a right trace, and how they are called
COUNTED = 4  # problems that are sampled and counted together
JUDGED = 16  # rows that are judged, for each that is ranked
NUM_PHRASES = 16  # the most sentences of filler, and words


@dataclass(frozen=True)
class CheckOptions:
    """How much `rlt check` computes.

    Args:
        rows: Problems that completions are sampled of, and traces that are ranked.
        completions: Completions of each problem.
        bad_traces: Columns of traces that the reward must rank below reasoning_trace.
    """

    rows: int = 16
    completions: int = 4
    bad_traces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rows < 2 or self.completions < 2:
            raise InputError(
                f"check.rows and check.completions must be at least 2, but are {self.rows} and "
                f"{self.completions}. Raise them."
            )


@dataclass(frozen=True)
class Check:
    """One line of `rlt check`.

    Example: `Check("steps", "fail", "9 optimizer steps", "at least 20", "Add rows")`.

    Attributes:
        name: What is checked.
        status: pass; warn: the run may teach little; fail: it cannot teach; cannot: it cannot be said.
        figure: What was found, or why nothing can be.
        limit: What should be; '' if there is nothing to say.
        remedy: What to do unless it passes.
    """

    name: str
    status: Status
    figure: str
    limit: str = ""
    remedy: str = ""

    def line(self) -> str:
        """Return the check as a line."""
        limit = f" ({self.limit})" if self.limit and self.status != "cannot" else ""
        remedy = f". {self.remedy}" if self.remedy and self.status != "pass" else ""
        return f"{self.status:6} {self.name:8} {self.figure}{limit}{remedy}"


def grade(value: float, limits: tuple[float, float]) -> Status:
    """Return the status of a fraction that should be high: fail and warn below the limits."""
    return "fail" if value < limits[0] else "warn" if value < limits[1] else "pass"


def check_run(
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: CheckOptions,
    length: dict[str, Any],
    **trainer: Any,
) -> Iterator[Check]:
    """Yield the checks of a run as they are made.

    Args:
        module: The run's module.
        data: Its rows.
        rollouts: How it samples.
        options: How much is computed.
        length: The trainer's max_steps, max_epochs and limit_train_batches.
        trainer: Arguments of Lightning's Trainer, such as accelerator and precision.

    Raises:
        InputError: If the rows cannot be read, or a model cannot be loaded.
    """
    # Rows that are left out are a figure here, not an error.
    limit, data.max_bad_frac = data.max_bad_frac, 1.0
    data.setup("fit")
    yield check_rows(data, limit)
    yield check_lengths(data)
    yield check_steps(data, length)
    rows = draw_rows(data, JUDGED * options.rows, options.bad_traces)
    with Judge(data.format.student_tags) as judge:
        right = judge_traces(judge, rows)
        yield check_given_traces(rows, right, isinstance(data, StudentSFTData))
        sampling = build_sampling_module(module)
        if sampling is None:
            reason = "before the warm-up the model does not know the format: check stage 2 with its model/"
            if isinstance(data, StudentSFTData):
                reason = "before the fine-tuning the student does not know the format: see `rlt test`"
            yield Check("closed", "cannot", reason)
        else:
            asked = rows[: options.rows]
            yield from check_completions(sampling, data, rollouts, options, asked, judge, trainer)
    phrases = Phrases.find(row for row in rows if row.trace)
    good = choose_good_rows(rows, right, phrases)[: options.rows]
    yield check_ranking(module, data, rollouts, good, phrases, options.bad_traces, trainer)
    if has_student_reward(module):
        yield Check("control", "cannot", CONTROL)


# The rows


def check_rows(data: StratosDataModule, most: float) -> Check:
    """Check that rows can be used, whatever their lengths."""
    total = sum(report.num_rows for report in data.reports)
    bad = [error.reason for report in data.reports for _, error in report.bad if error.reason not in TOO_LONG]
    status: Status = "pass" if len(bad) <= most * total else "fail"
    reasons = ", ".join(sorted(set(map(str, bad))))
    figure = f"{len(bad)} of {total} rows cannot be used" + (f" ({reasons})" if bad else "")
    return Check("rows", status, figure, f"at most {100 * most:g} %", "See docs/data.md, columns of a row")


def check_lengths(data: StratosDataModule) -> Check:
    """Check that limits leave out or cut few rows."""
    total = sum(report.num_rows for report in data.reports)
    long = sum(error.reason in TOO_LONG for report in data.reports for _, error in report.bad)
    cut = sum(len(report.truncated) for report in data.reports)
    part = (long + cut) / max(1, total)
    status: Status = "fail" if part > LEFT_OUT[1] else "warn" if part > LEFT_OUT[0] else "pass"
    return Check(
        "lengths",
        status,
        f"{long} of {total} rows are too long and left out, {cut} are cut",
        f"together at most {100 * LEFT_OUT[0]:g} %",
        "Raise data.max_prompt_length, max_solution_length or max_length",
    )


def check_steps(data: StratosDataModule, length: dict[str, Any]) -> Check:
    """Check that the run takes enough optimizer steps."""
    per_epoch = len(data.step_loader())
    steps = count_steps(per_epoch, **length)
    figure = f"{steps} optimizer steps, {per_epoch} in an epoch of {len(data.items)} items"
    status: Status = "pass" if steps >= MIN_STEPS else "fail"
    return Check("steps", status, figure, f"at least {MIN_STEPS}", MORE_STEPS)


def can_be_judged(reference: dict[str, Any]) -> bool:
    """Return whether answers to a row can be compared with one."""
    try:
        require_judgeable(reference)
    except BadRowError:
        return False
    return True


def draw_rows(data: StratosDataModule, number: int, bad_traces: Sequence[str]) -> list[DrawnRow]:
    """Return usable rows, drawn by the seed of the data."""
    usable = [
        DrawnRow.of(columns, texts, bad_traces)
        for columns, texts in islice(data.read_usable_rows(), READ_ROWS)
    ]
    return Random(data.seed).sample(usable, min(number, len(usable)))


def judge_traces(judge: Judge, rows: Sequence[DrawnRow]) -> list[bool | None]:
    """Return whether each row's trace ends with the right answer; None without a trace or an answer."""
    known = [i for i, row in enumerate(rows) if row.trace and can_be_judged(row.reference)]
    verdicts = judge.judge_all((rows[i].trace, rows[i].reference) for i in known)
    right: list[bool | None] = [None] * len(rows)
    for i, verdict in zip(known, verdicts, strict=True):
        right[i] = verdict.correct
    return right


def check_given_traces(
    rows: Sequence[DrawnRow], right: Sequence[bool | None], student_learns: bool = False
) -> Check:
    """Check that enough of the rows' own traces end with the right answer."""
    known = [float(value) for value in right if value is not None]
    if not known:
        missing = "have no answer"
        if not any(row.trace for row in rows):
            missing = "have no reasoning_trace: stage 0 writes them for the warm-up (docs/data.md)"
        return Check("traces", "cannot", f"the {len(rows)} rows that were read {missing}")
    part = fmean(known)
    # A student learns what it is shown; a warm-up may show traces of uneven quality.
    limits = (0.1, 0.5) if student_learns else RIGHT
    return Check(
        "traces",
        grade(part, limits),
        f"{show_part(part, len(known))} of the rows' traces end with the right answer",
        f"at least {100 * limits[1]:g} %",
        "Add good traces: RLT selects among what its teacher writes, and a student learns what it is shown",
    )


# Completions


def build_sampling_module(module: PolicyModule) -> RLTModule | None:
    """Return a module that samples what the run will train on; None if it samples nothing."""
    thinks = isinstance(module, RLTModule) and "thoughts" in module.reward.judges
    if not thinks and not isinstance(module, OPDModule):
        return module if isinstance(module, RLTModule) else None
    # Its answers are judged, whole ones, not scored by its teacher or by the solution's log-probs.
    return RLTModule(
        module.pretrained,
        student=None,
        reward=CorrectnessReward(),
        micro_batch_tokens=module.micro_batch_tokens,
        dtype=module.dtype_name,
        trust_remote_code=module.trust_remote_code,
    )


def check_completions(
    module: RLTModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: CheckOptions,
    rows: Sequence[DrawnRow],
    judge: Judge,
    trainer: dict[str, Any],
) -> Iterator[Check]:
    """Sample completions, and check that they are closed, that some are right, and that rewards differ."""
    is_answer = module.reward.judges_answers
    if is_answer and not all(can_be_judged(row.reference) for row in rows):
        yield Check("closed", "cannot", "rows without an answer: answers to them cannot be judged")
        return
    texts = [
        {"question": row.texts.question, "solution": row.texts.solution.strip(), **row.columns}
        for row in rows
    ]
    asked = data.copy_settings(StudentRLData if is_answer else TeacherRLData, texts)
    asked.student_names = tuple(module.students.names)
    asked.val_batch_size = COUNTED
    rollouts.num_traces, rollouts.max_resamples = options.completions, 0
    announce(f"sampling {options.completions} completions of each of {len(rows)} problems")
    scored = score_problems(module, asked, rollouts, progress=True, **trainer)
    sampled = [rollout for batch in scored for rollout in batch.rollouts]
    number = len(sampled)
    closed = fmean(r.closed for r in sampled)
    cut = fmean(r.completion.finish_reason == "length" for r in sampled)
    yield Check(
        "closed",
        grade(closed, CLOSED),
        f"{show_part(closed, number)} of {number} completions close the format; {100 * cut:.0f} % reach the "
        f"limit of {rollouts.sampling.max_completion_length} tokens{propose_limit(scored)}",
        f"at least {100 * CLOSED[1]:g} %",
        "Warm up longer, or raise rollouts.sampling.max_completion_length",
    )
    if isinstance(asked, TeacherRLData) and not any(row.trace for row in rows):
        yield check_stage_0(asked, sampled, options.completions)
    yield check_sampled(sampled, judge)
    yield check_spread(scored, options.completions)


def propose_limit(scored: Sequence[ScoredBatch]) -> str:
    """Return a clause: what completions at the length limit earn, and a limit by the longest that ends."""
    earned: dict[bool, list[float]] = {True: [], False: []}  # whether it was cut -> rewards
    ended = [0]
    for batch in scored:
        for rollout, reward in zip(batch.rollouts, batch.step.rewards.tolist(), strict=True):
            is_cut = rollout.completion.finish_reason == "length"
            earned[is_cut].append(reward)
            ended.append(0 if is_cut else len(rollout.completion.token_ids))
    cost = ""
    if all(earned.values()):
        cost = f", which earn {fmean(earned[True]):.2f} where others earn {fmean(earned[False]):.2f}"
    if not max(ended):
        return f"{cost}: none ends, so nothing says how long they would be"
    least = "at least " if len(earned[True]) > LEFT_OUT[0] * len(ended) else ""
    return f"{cost}; 1.5 times the longest that ends is {least}{math.ceil(1.5 * max(ended))}"


def check_stage_0(data: TeacherRLData, sampled: Sequence[Rollout], completions: int) -> Check:
    """Check that this teacher explains most problems at least once: its explanations can warm it up."""
    usable = [data.fits_student(rollout) for rollout in sampled]
    part = fmean(any(usable[i : i + completions]) for i in range(0, len(usable), completions))
    return Check(
        "stage0",
        grade(part, STAGE_0),
        f"rows without traces: of {completions} explanations one is closed and without tags for "
        f"{show_part(part, len(usable) // completions)} of the problems; stage 0 keeps those that earn more "
        "than filler (docs/data.md)",
        f"at least {100 * STAGE_0[1]:g} %",
        "Show an example in data.teacher_system_prompt, as laptop/smollm2_explain does, or raise "
        "rollouts.num_traces there",
    )


def check_sampled(rollouts: Sequence[Rollout], judge: Judge) -> Check:
    """Check that some of the sampled completions end with the right answer."""
    judged = [rollout for rollout in rollouts if can_be_judged(rollout.problem.reference)]
    if not judged:
        return Check("right", "cannot", "rows without an answer: completions cannot be judged; read thirty")
    verdicts = judge.judge_all((r.text, r.problem.reference) for r in judged)
    part = fmean(verdict.correct for verdict in verdicts)
    return Check(
        "right",
        grade(part, RIGHT),
        f"{show_part(part, len(judged))} of {len(judged)} completions end with the right answer",
        f"at least {100 * RIGHT[1]:g} %",
        "With fewer, many groups have none to select: warm up longer, or take easier problems",
    )


def check_spread(scored: Sequence[ScoredBatch], size: int) -> Check:
    """Check that the completions of a problem earn different rewards."""
    rewards = [float(value) for batch in scored for value in batch.step.rewards]
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    part = fmean(pstdev(group) > GROUP_STD_BELOW for group in groups)
    return Check(
        "spread",
        grade(part, SPREAD),
        f"in {show_part(part, len(groups))} of {len(groups)} groups the rewards differ",
        f"at least {100 * SPREAD[1]:g} %",
        "Raise rollouts.sampling.temperature or model.group_size, or take other problems",
    )


# Right traces, leaps and filler


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


@dataclass(frozen=True)
class Phrases:
    """Phrases that a task's traces repeat whatever the problem.

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
            filler.update({text for text in sentences if WORD.search(text) and not re.search(r"\d", text)})
            words.update(WORD.findall(row.trace))
            if sentences and (leap := read_leap(sentences[-1], row.reference)):
                leaps[leap] += 1
        frequent = tuple(text for text, number in filler.most_common(NUM_PHRASES) if number > 1)
        several = [leap for leap, number in leaps.most_common(1) if number > 1]
        most = tuple(word for word, _ in words.most_common(NUM_PHRASES))
        return cls(frequent, several[0] if several else None, most)

    def measure_share(self, row: DrawnRow) -> float:
        """Return the part of a trace's sentences that are phrases."""
        sentences = split_sentences(row.trace)
        leaps = self.leap is not None and read_leap(sentences[-1], row.reference) is not None
        return (sum(text in self.filler for text in sentences) + leaps) / len(sentences)

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
    return [text.rstrip(MARKS) for text in SENTENCE.split(trace) if text.rstrip(MARKS)]


def read_leap(sentence: str, reference: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what stands around the answer in a sentence that names no other number; None if it does."""
    answer = reference_answer(reference)
    matches = [*re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", sentence)] if answer else []
    if not matches:
        return None
    before, after = sentence[: matches[-1].start()], sentence[matches[-1].end() :]
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
    """Yield each row with its trace and the trace's worse variants, each in a column."""
    for number, row in enumerate(rows):
        yield {
            "question": row.texts.question,
            "solution": row.texts.solution.strip(),
            TRACE_COLUMN: row.trace,
            "leap": phrases.build_leap(row),
            "filler": phrases.build_filler(row, Random(number)),
            **row.columns,
        }


@dataclass(frozen=True)
class Ranking:
    """The rewards of right traces and of their worse variants, by problem.

    Example: `Ranking([{"reasoning_trace": -0.2, "leap": -0.9, "filler": -0.8}], VARIANTS)`.

    Attributes:
        rewards: Of each problem the rewards, nats, by column.
        kinds: What the worse ones are, by column.
    """

    rewards: list[dict[str, float]]
    kinds: dict[str, str]

    @classmethod
    def of(cls, rewards: Iterable[tuple[Rollout, float]], kinds: dict[str, str]) -> Ranking:
        """Return the ranking of scored rollouts; problems with a variant beyond a limit do not count."""
        by_question: dict[str, dict[str, float]] = {}
        for rollout, reward in rewards:
            columns = rollout.problem.columns
            by_question.setdefault(columns["question"], {})[columns["trace_column"]] = reward
        return cls([row for row in by_question.values() if len(row) == 1 + len(kinds)], kinds)

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
    """Return the reward, with the exact KL if possible: given texts are no samples of the teacher."""
    crosses = any(isinstance(form, CrossTokenizerFormat) for form in views.formats)
    return reward if crosses else replace(reward, kl_estimator="exact")


# Ranking


def has_student_reward(module: PolicyModule) -> bool:
    """Return whether a module's explanations are rewarded by a student, as in stage 2."""
    return isinstance(module, RLTModule) and module.reward.has_tokens


def check_ranking(
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    good: Sequence[DrawnRow],
    phrases: Phrases,
    bad_traces: Sequence[str],
    trainer: dict[str, Any],
) -> Check:
    """Check that the reward ranks right traces above leaps and filler, and above the user's bad ones."""
    if not isinstance(module, RLTModule) or not has_student_reward(module):
        return Check("ranking", "cannot", "this stage has no reward of a student: it is a check of stage 2")
    if len(good) < 2:
        reason = f"it needs rows with a right reasoning_trace of several sentences, and found {len(good)}"
        return Check("ranking", "cannot", reason)
    kinds = VARIANTS | {name: name for name in bad_traces}
    variants = [*build_variants(good, phrases)]
    asked = data.copy_settings(ScoringData, variants, trace_columns=[TRACE_COLUMN, *kinds])
    module.reward = choose_reward(module.reward, data.student_views)
    asked.val_batch_size = COUNTED * (1 + len(kinds))
    announce(f"ranking the right traces of {len(good)} problems")
    scored = score_problems(module, asked, rollouts, progress=True, **trainer)
    rewards = (
        pair for batch in scored for pair in zip(batch.rollouts, batch.step.rewards.tolist(), strict=True)
    )
    return describe_ranking(Ranking.of(rewards, kinds))


def describe_ranking(ranking: Ranking) -> Check:
    """Return the check of ranked traces: the variant that wins most often decides."""
    number = len(ranking.rewards)
    if number < 2:
        return Check("ranking", "cannot", "the limits of length leave fewer than two rows with all variants")
    won = {kind: ranking.measure_won(kind) for kind in ranking.kinds}
    shares = (f"{show_part(won[kind], number)} over {text}" for kind, text in ranking.kinds.items())
    return Check(
        "ranking",
        grade(min(won.values()), RANKED),
        f"{ranking.describe()}: right traces are ranked first in {' and '.join(shares)}",
        f"each at least {100 * RANKED[1]:g} %",
        f"{ADVICE} rlt explain shows one",
    )


def show_part(part: float, number: int) -> str:
    """Return a fraction of so many in percent, with its standard error."""
    return f"{100 * part:.0f} ± {100 * math.sqrt(part * (1 - part) / number):.0f} %"
