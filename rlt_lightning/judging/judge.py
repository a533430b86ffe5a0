"""Responses judged against references, in processes that are killed when they take too long."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from rlt_lightning.judging.answers import (
    ANSWER_CHARS,
    Kind,
    Reference,
    arithmetic_expression,
    chosen_letter,
    equals_reference,
    equivalence_classes,
    marked_answer,
    require_answer,
    require_reasoning_gym,
    solution_block,
    solves_countdown,
)
from rlt_lightning.judging.worker import enter_worker
from rlt_lightning.tags import TagStyle, tag_style
from rlt_lightning.types import InputError

WORKER_MODULES = ["math_verify", "rlt_lightning.judging.answers"]  # no torch: they start in a second
POLL_S = 1.0  # between two looks at whether the processes that a task waits for are still there
MAX_POOLS = 2  # that may break under one task
PROBE = "rlt-judge-probe"  # name of a process that only imports what the main script imports
UNGUARDED = 78  # its exit status where that leads back to here
GUARD_MISSING = (
    "A script that starts processes must do so below `if __name__ == '__main__':`, but this one does so on "
    "import, and each process imports it again. Put what it runs below that line."
)


@dataclass(frozen=True)
class Verdict:
    """What the judge says of one response.

    Args:
        correct: Whether its answer is equivalent to the reference.
        formatted: Whether it has a thought and then a solution, both between their tags.
        answer: The answer that was found in it; None if there is none.
        timed_out: Whether judging was broken off at its limit of time or memory. It then counts as wrong.
    """

    correct: bool
    formatted: bool
    answer: str | None
    timed_out: bool = False


class Judge:
    """Judge responses by the equivalence of their answers, never by equal text alone.

    Answers are compared by math_verify, in processes with a hard deadline: a signal interrupts no C code, and
    so no power tower. Only bounded pieces of a response reach them; see `judging.answers`. Processes
    that something else ends, such as a system short of memory, are replaced.

    Args:
        tags: Of the responses: "stratos", "r1" or a TagStyle.
        deadline_s: For one response. A process that exceeds it is killed and replaced.
        num_workers: Processes; None: one per core, four at most.
        memory_gib: Address space of each, beyond what it starts with; on Linux alone.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            InputError: If a reference has no answer, reasoning-gym is needed and not installed, or processes
                end as soon as they begin.
        """
        waiting = [self._begin(response, reference) for response, reference in pairs]
        return [end() for end in waiting]

    def same_answers(self, verdicts: list[Verdict], kind: Kind) -> list[int | None]:
        """Number the answers to one problem so that equivalent ones have the same number.

        Right answers are all equivalent. Wrong ones are compared by math_verify, each with the first of every
        class; those whose judging was broken off, and all of them if this is broken off too, by their text.

        Returns:
            One number per verdict, that of the first response with such an answer; None without an answer.
        """
        firsts: dict[str, int] = {}  # text -> first response that has it
        right = next((i for i, verdict in enumerate(verdicts) if verdict.correct), None)
        for i, verdict in enumerate(verdicts):
            if verdict.answer is not None and not verdict.correct:
                firsts.setdefault(verdict.answer, i)
        hard = {verdict.answer for verdict in verdicts if verdict.timed_out}
        texts = [text for text in firsts if text not in hard]
        if kind == "math" and len(texts) > 1:
            classes, broken_off = self._submit(equivalence_classes, texts)(None)
            if classes is not None and not broken_off:
                firsts |= {text: firsts[texts[number]] for text, number in zip(texts, classes, strict=True)}
        return [
            right if verdict.correct else None if verdict.answer is None else firsts[verdict.answer]
            for verdict in verdicts
        ]

    def is_formatted(self, response: str) -> bool:
        """Whether a response has a thought and then a solution, each between its tags."""
        tags = self.tags
        rest, found = response, "found"
        for tag in (tags.thought_open, tags.thought_close, tags.solution_open, tags.solution_close):
            _, found, rest = rest.partition(tag)
        return bool(found)

    def close(self) -> None:
        """End the processes; safe to call twice. The next response starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    # Helpers

    def _begin(self, response: str, reference: Reference) -> Callable[[], Verdict]:
        """Do what is quick, hand out what may hang, and return what waits for it."""
        formatted = self.is_formatted(response)
        block = solution_block(response, self.tags.solution_open, self.tags.solution_close)
        kind = reference.get("kind", "math")
        if kind == "choice":
            letter = chosen_letter(block)
            correct = letter is not None and letter == require_answer(reference)
            return lambda: Verdict(correct, formatted, letter)
        if kind == "countdown":
            return self._begin_countdown(block, reference, formatted)
        if kind != "math":
            raise InputError(f"The kind of a reference must be math, choice or countdown, but is '{kind}'.")
        marked = marked_answer(block)
        text = block[-ANSWER_CHARS:] if marked is None else marked
        result = self._submit(equals_reference, require_answer(reference), text, marked is not None)

        def end() -> Verdict:
            (correct, answer), broken_off = result((False, marked))
            return Verdict(correct, formatted, answer, broken_off)

        return end

    def _begin_countdown(self, block: str, reference: Reference, formatted: bool) -> Callable[[], Verdict]:
        require_reasoning_gym()
        expression = arithmetic_expression(block)
        if expression is None:
            return lambda: Verdict(False, formatted, None)
        numbers, target = [int(number) for number in reference["numbers"]], int(reference["target"])
        result = self._submit(solves_countdown, expression, numbers, target)

        def end() -> Verdict:
            correct, broken_off = result(False)
            return Verdict(correct, formatted, expression, broken_off)

        return end

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Callable[[Any], tuple[Any, bool]]:
        """Hand out a task, and return what waits for it.

        That takes what to say if a process was killed, died, or ran out of memory or stack, and returns what
        the process found, or this; and whether it was broken off.
        """
        pool, future = self._schedule(function, *arguments)

        def result(otherwise: Any) -> tuple[Any, bool]:
            nonlocal pool, future
            for _ in range(MAX_POOLS):
                try:
                    return result_of(pool, future), False
                except (TimeoutError, ProcessExpired, MemoryError, RecursionError):
                    return otherwise, True
                except BrokenProcessPool:
                    self._replace_broken_pool()
                    pool, future = self._schedule(function, *arguments)
            return otherwise, True

        return result

    def _schedule(self, function: Callable[..., Any], *arguments: Any) -> tuple[ProcessPool, Future[Any]]:
        if self._pool is None:
            # Not forked from this process, whose threads may hold locks; a server forks them that has
            # imported what takes long, so that a killed one is soon replaced.
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
        """Start anew, if no other task has: a pool ends when a process of it dies that has no task yet."""
        if self._pool is not None and self._pool.active:
            return
        self.close()
        try:
            result_of(*self._schedule(os.getpid))
        except BrokenProcessPool as error:
            raise InputError(
                "The processes that judge answers must start, but end at once. Give them more memory than "
                f"memory_gib={self.memory_gib:g}, or free some."
            ) from error


def require_guarded_main(context: Any) -> None:
    """Check that the main script can be imported again: each process does so before its first task.

    Raises:
        InputError: If importing it leads back to here. Python would start processes without end.
    """
    refuse_while_imported()
    probe = context.Process(target=int, name=PROBE)
    probe.start()
    probe.join()
    if probe.exitcode == UNGUARDED:
        raise InputError(GUARD_MISSING)


def refuse_while_imported() -> None:
    """End a process that imports the main script of the one that started it, and so would run it again.

    Raises:
        InputError: In a process that somebody else's code has started; ours end in silence, since the process
            that started them tells it.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # what multiprocessing itself looks at
        if process.name == PROBE:
            os._exit(UNGUARDED)
        raise InputError(GUARD_MISSING)


def result_of(pool: ProcessPool, future: Future[Any]) -> Any:
    """Wait for a task; a pool that breaks may forget one."""
    while not wait([future], timeout=POLL_S).done:
        if not pool.active:
            raise BrokenProcessPool("The pool ended before the task.")
    return future.result()
