"""Judge responses against references, in processes that are killed when they take too long.

    Judge ─▶ ProcessPool ─▶ forkserver (has imported WORKER_MODULES) ─▶ worker ─▶ judging.answers
      │          │                                                        │
      │          └── kills and replaces a worker after `deadline_s` ──────┤
      └── starts a new pool if an idle worker dies, which ends the pool ──┘

A killed worker is replaced within a second because the forkserver has done its imports. So this module and
`judging.answers` must stay small: neither loads torch (tests/docs/test_layout.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from rlt_lightning.judging.answers import (
    AnswerKind,
    Reference,
    arithmetic_expression,
    equivalence_classes,
    find_answer,
    find_letter,
    read_countdown,
    require_answer,
    solution_block,
    solves_countdown,
)
from rlt_lightning.judging.compare import same_answer
from rlt_lightning.tags import TagStyle, tag_style
from rlt_lightning.types import InputError, first_line

# What the processes need. Names, because the forkserver imports them, not this process.
WORKER_MODULES = ["math_verify", "rlt_lightning.judging.judge"]
PR_SET_PDEATHSIG = 1  # of prctl(2)
POLL_S = 1.0  # between two checks that the processes of a waiting task still exist
MAX_POOLS = 2  # a task is given up after this many pools broke
# Name of a process that only imports the main script, and its exit status if that import starts a judge.
PROBE, UNGUARDED = "rlt-judge-probe", 78
GUARD_MISSING = (
    "A script that starts processes must do so below `if __name__ == '__main__':`, but this one does so on "
    "import, and each process imports it again. Move the code that it runs below that line."
)


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response.

    Args:
        correct: Whether its answer is equivalent to the reference.
        formatted: Whether it has a thought and then a solution, both between their tags.
        answer: The answer that was found in it; None if there is none.
        timed_out: Whether judging stopped at its limit of time or memory. The answer then counts as wrong.
    """

    correct: bool
    formatted: bool
    answer: str | None
    timed_out: bool = False


class Judge:
    """Judge responses by the equivalence of their answers, not by equal text.

    math_verify compares answers in processes that are killed at a deadline: a signal would not interrupt C
    code that computes a power tower. Only bounded pieces of a response reach these processes; see
    `judging.answers`. A process that ends for another reason, such as a lack of memory, is replaced.

    Args:
        tags: Tags of the responses: "stratos", "r1" or a TagStyle.
        deadline_s: Seconds for one response. A process that exceeds them is killed and replaced.
        num_workers: Number of processes; None: one per core, four at most.
        memory_gib: Address space of each process beyond what it starts with; only on Linux.
    """

    def __init__(
        self,
        tags: str | TagStyle = "stratos",
        deadline_s: float = 10.0,
        num_workers: int | None = None,
        memory_gib: float = 4.0,
    ) -> None:
        if deadline_s <= 0 or memory_gib <= 0 or (num_workers is not None and num_workers < 1):
            raise InputError(
                f"A judge needs deadline_s > 0, memory_gib > 0 and num_workers >= 1, but got {deadline_s}, "
                f"{memory_gib} and {num_workers}. Correct them."
            )
        self.tags = tag_style(tags)
        self.deadline_s = deadline_s
        self.num_workers = num_workers or min(4, os.cpu_count() or 1)
        self.memory_gib = memory_gib
        self._pool: ProcessPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def judge(self, response: str, reference: Reference) -> Verdict:
        """Judge one response."""
        return self.judge_all([(response, reference)])[0]

    def judge_all(self, pairs: Iterable[tuple[str, Reference]]) -> list[Verdict]:
        """Judge many responses at once.

        Args:
            pairs: Responses with their references.

        Returns:
            Their verdicts, in the same order.

        Raises:
            InputError: If a reference has no answer, or processes end as soon as they begin.
        """
        waiting = [self._begin(response, reference) for response, reference in pairs]
        return [end() for end in waiting]

    def same_answers(self, verdicts: list[Verdict], kind: AnswerKind) -> list[int | None]:
        """Number the answers to one problem so that equivalent ones have the same number.

        Right answers are all equivalent. math_verify compares each wrong answer with the first of every
        class. Answers whose judging timed out are compared by text, and so are all wrong ones if this
        comparison times out.

        Returns:
            For each verdict, the index of the first response with an equivalent answer; None without an
            answer.
        """
        # Text of an answer -> the first response that has it.
        firsts: dict[str, int] = {}
        right = next((i for i, verdict in enumerate(verdicts) if verdict.correct), None)
        for i, verdict in enumerate(verdicts):
            if verdict.answer is not None and not verdict.correct:
                firsts.setdefault(verdict.answer, i)
        hard = {verdict.answer for verdict in verdicts if verdict.timed_out}
        texts = [text for text in firsts if text not in hard]
        if kind == "math" and len(texts) > 1:
            classes, timed_out = self._submit(equivalence_classes, texts)(None)
            if classes is not None and not timed_out:
                firsts |= {text: firsts[texts[number]] for text, number in zip(texts, classes, strict=True)}
        return [
            right if verdict.correct else None if verdict.answer is None else firsts[verdict.answer]
            for verdict in verdicts
        ]

    def is_formatted(self, response: str) -> bool:
        """Return whether a response has a thought and then a solution, each between its tags."""
        tags, rest = self.tags, response
        for tag in (tags.thought_open, tags.thought_close, tags.solution_open, tags.solution_close):
            if tag not in rest:
                return False
            rest = rest.partition(tag)[2]
        return True

    def start(self) -> None:
        """Start the processes now, and not with the first response, so that nothing is sampled in vain.

        Raises:
            InputError: If they do not start.
        """
        try:
            wait_for_result(*self._schedule(os.getpid))
        except (OSError, BrokenProcessPool) as error:
            raise InputError(
                f"The processes that judge answers must start, but did not ({first_line(error)}). Give them "
                f"memory_gib={self.memory_gib:g}, and a TMPDIR whose path is short, for their sockets."
            ) from error

    def close(self) -> None:
        """End the processes; safe to call twice. The next response starts new processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    # Helpers

    def _begin(self, response: str, reference: Reference) -> Callable[[], Verdict]:
        """Begin to judge a response, and return a function that waits for the verdict.

        Quick work is done here. Work that may hang is handed to a process.
        """
        formatted = self.is_formatted(response)
        tags = self.tags
        block = solution_block(response, tags)
        kind = reference.get("kind", "math")
        if kind == "choice":
            letter = find_letter(block)
            correct = letter is not None and letter == require_answer(reference)
            return lambda: Verdict(correct, formatted, letter)
        if kind == "countdown":
            expression = arithmetic_expression(block)
            if (problem := read_countdown(reference)) is None:
                raise InputError(
                    "A countdown reference must have `numbers` and `target`, but has only the columns "
                    f"{', '.join(map(str, reference))}. Add them."
                )
            correct = expression is not None and solves_countdown(expression, *problem)
            return lambda: Verdict(correct, formatted, expression)
        if kind != "math":
            raise InputError(f"The kind of a reference must be math, choice or countdown, but is '{kind}'.")
        wanted, answer = require_answer(reference), find_answer(block)
        result = self._submit(same_answer, wanted or "", answer or "")

        def end() -> Verdict:
            correct, timed_out = result(False)
            return Verdict(correct, formatted, answer, timed_out)

        return end

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Callable[[Any], tuple[Any, bool]]:
        """Hand a task to a process, and return a function that waits for its result.

        That function takes a fallback and returns the result and False. If the process was killed, died, or
        ran out of memory or stack, it returns the fallback and True.
        """
        pool, future = self._schedule(function, *arguments)

        def result(fallback: Any) -> tuple[Any, bool]:
            nonlocal pool, future
            for _ in range(MAX_POOLS):
                try:
                    return wait_for_result(pool, future), False
                except (TimeoutError, ProcessExpired, MemoryError, RecursionError):
                    return fallback, True
                except BrokenProcessPool:
                    self._replace_broken_pool()
                    pool, future = self._schedule(function, *arguments)
            return fallback, True

        return result

    def _schedule(self, function: Callable[..., Any], *arguments: Any) -> tuple[ProcessPool, Future[Any]]:
        if self._pool is None:
            # Processes are not forked from this one, whose threads may hold locks. A server that has done the
            # slow imports forks them, so that a killed one is replaced quickly.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(WORKER_MODULES)
            require_guarded_main(context)
            self._pool = ProcessPool(
                self.num_workers, initializer=enter_worker, initargs=[self.memory_gib], context=context
            )
        try:
            return self._pool, self._pool.schedule(function, args=arguments, timeout=self.deadline_s)
        except RuntimeError:  # it broke since the last task
            self._replace_broken_pool()
            return self._schedule(function, *arguments)

    def _replace_broken_pool(self) -> None:
        """Replace a pool that ended, unless another task has. A pool ends if one of its idle workers dies."""
        if self._pool is not None and self._pool.active:
            return
        self.close()
        self.start()


def require_guarded_main(context: Any) -> None:
    """Check that each process can import the main script again before its first task.

    Raises:
        InputError: If that import starts a judge. Python would start processes without end.
    """
    refuse_while_imported()
    probe = context.Process(target=int, name=PROBE)
    probe.start()
    probe.join()
    if probe.exitcode == UNGUARDED:
        raise InputError(GUARD_MISSING)


def refuse_while_imported() -> None:
    """End a worker process whose import of the main script runs the script again.

    Raises:
        InputError: In a process that other code started. Our own probe ends silently; the process that
            started it reports the error.
    """
    process = multiprocessing.current_process()
    # multiprocessing itself checks this attribute.
    if getattr(process, "_inheriting", False):
        if process.name == PROBE:
            os._exit(UNGUARDED)
        raise InputError(GUARD_MISSING)


def wait_for_result(pool: ProcessPool, future: Future[Any]) -> Any:
    """Wait for the result of a task. A broken pool may never report it, so the pool is checked, too."""
    while not wait([future], timeout=POLL_S).done:
        if not pool.active:
            raise BrokenProcessPool("The pool ended before the task.")
    return future.result()


# In the judging processes


def enter_worker(memory_gib: float) -> None:
    """Make a judging process end with the run, limit its memory, and import what its first task needs."""
    import math_verify  # noqa: F401

    threading.Thread(target=end_with_run, daemon=True).start()
    if sys.platform == "linux":
        # No thread runs while C code computes a power tower; the kernel's signal ends the process even then.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        import resource

        # The imports take up to one GiB, which does not count against the answer.
        start = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = start + int(memory_gib * 2**30)
        # The system may have set a lower limit already.
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def end_with_run() -> None:
    """End this process as soon as the run's process has ended, for whatever reason."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)
