"""Keep track of an engine's vLLM workers: which of them serve, and how a failed one comes back.

A worker is in one state. A failure takes it back to DOWN; a launched worker is then started again. Only a
push that a worker refuses ends the run.

              greet          push             verify
      ┌────▶ DOWN ────▶ READY ────▶ CURRENT ────────▶ VERIFIED
      │                   │          │   ▲ │ push      │   ▲ │ push
      │                   │          │   └─┘           │   └─┘
      └──── lose, close ──┴──────────┴─────────────────┘

    state      answers   has the weights   agrees with the          samples
               calls     of the last push  trainer's log-probs
    DOWN       no        no                unknown                  no
    READY      yes       no                unknown                  no
    CURRENT    yes       yes               unknown                  yes
    VERIFIED   yes       yes               yes, when last compared  yes

A worker is READY while weights are pushed to it: after a push that broke off no worker seems current. Without
a trainer (NoPush) a greeted worker is CURRENT at once. A worker that falls asleep drops its weights and is
READY, since a push follows; with an adapter it keeps the base's weights, and its state. `health` wakes it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from rlt_lightning.console import size_text, waiting_for
from rlt_lightning.engines.base import AGREEMENT, EngineError, NamedTensor, find_disagreement
from rlt_lightning.engines.client import WorkerClient, WorkerError
from rlt_lightning.engines.launch import EXTENSION, Launch, LocalServer
from rlt_lightning.engines.push import Failures, WeightPush
from rlt_lightning.engines.threads import run_coroutine
from rlt_lightning.models.load import model_size
from rlt_lightning.models.weights import weights_size
from rlt_lightning.run.interrupt import is_terminated

log = logging.getLogger(__name__)
# Deadline of the first call to a worker that may not be there.
GREETING_S = 5.0
NO_ANSWER = "It never answered."


class State(Enum):
    """Where a worker stands; the head of fleet.py draws it."""

    DOWN = "down"
    READY = "ready"
    CURRENT = "current"
    VERIFIED = "verified"


class Worker(WorkerClient):
    """A worker's routes, and all that the fleet knows of it."""

    state = State.DOWN
    reason = NO_ANSWER  # why it is down
    silence = ""  # the error of the last attempt to greet it
    asleep = False
    losses = 0  # times it was lost since any prompt got all its completions
    max_model_len = sys.maxsize  # tokens; known once it was greeted
    server: LocalServer | None = None  # its process, if it was launched

    @property
    def up(self) -> bool:
        """Tell whether the worker answers calls."""
        return self.state is not State.DOWN

    @property
    def current(self) -> bool:
        """Tell whether the worker has the weights of the last push."""
        return self.state in (State.CURRENT, State.VERIFIED)

    def go_down(self, reason: str) -> None:
        """Mark the worker as down, and forget its weights and connections."""
        self.state, self.reason, self.asleep = State.DOWN, reason, False
        self.adapter = None
        self.incarnation += 1


class Fleet:
    """All workers of an engine, and the version of the weights that they were pushed.

    Args:
        workers: One for each server.
        run_id: Marks the versions of this trainer: those of another run's trainer are not ours.
        launch: How workers are started; None: they run already.
        sleeps: Whether workers sleep while the GPUs train.
        keeps_weights: Whether a sleeping worker's weights wait in main memory, since no push brings them.
        call_timeout_s: Deadline of every call but these two:
        sleep_timeout_s: Deadline of falling asleep, and of waking.
        recovery_timeout_s: How long to wait for one worker if none is left.
        max_restarts: How often a worker may be lost in a row, while no prompt gets all its completions.
    """

    def __init__(
        self,
        workers: list[Worker],
        run_id: str,
        launch: Launch | None,
        sleeps: bool,
        keeps_weights: bool,
        call_timeout_s: float,
        sleep_timeout_s: float,
        recovery_timeout_s: float,
        max_restarts: int,
    ) -> None:
        self.workers = workers
        self.run_id = run_id
        self.launch = launch
        self.sleeps = sleeps
        self.call_timeout_s = call_timeout_s
        self.sleep_timeout_s = sleep_timeout_s
        self.keeps_weights = keeps_weights
        self.recovery_timeout_s = recovery_timeout_s
        self.max_restarts = max_restarts
        self.pushed = -1  # policy version of the last push
        # Weights travel in these, or in the worker's if that is narrower.
        self.trainer_dtypes: set[str] = set()
        self.started = False
        self.without_trainer = False  # whether there are no weights but the workers' own

    @property
    def serving(self) -> list[Worker]:
        """Return the workers that are not down."""
        return [worker for worker in self.workers if worker.up]

    @property
    def absent(self) -> list[Worker]:
        """Return the workers that are down."""
        return [worker for worker in self.workers if not worker.up]

    @property
    def down(self) -> dict[str, str]:
        """Return the workers that are down, by URL, each with the reason."""
        return {worker.url: worker.reason for worker in self.absent}

    @property
    def version_name(self) -> str:
        """Return what workers call the version of the last push."""
        return f"{self.run_id}-{self.pushed:06d}"

    @property
    def policy_version(self) -> int:
        """Return the optimizer steps of the weights of all serving workers; -1 if one needs a push."""
        serving = self.serving
        return self.pushed if serving and all(worker.current for worker in serving) else -1

    @property
    def unverified(self) -> bool:
        """Tell whether a worker has come, or come back, since the last verification."""
        return not self.serving or any(worker.state is not State.VERIFIED for worker in self.serving)

    @property
    def max_model_len(self) -> int:
        """Return the tokens of prompt and completion that every greeted worker takes."""
        return min(worker.max_model_len for worker in self.workers)

    # Start and stop

    def start(self, model: str, push: WeightPush, logs: Path) -> None:
        """Start the workers that are to be launched, and wait until every worker answers."""
        for worker in self.workers:
            worker.reason = NO_ANSWER
        if self.launch is not None:
            for index, worker in enumerate(self.workers):
                worker.server = build_server(worker, index, self.launch, model, push, logs)
                worker.server.start()
        run_coroutine(self._wait(all_of_them=True))
        self.started = True

    def close(self) -> None:
        """Stop the workers that were launched. What the others hold later on is not known."""
        for worker in self.workers:
            if worker.server is not None:
                worker.server.stop()
            worker.server = None
            worker.go_down("The engine is closed.")
        self.started = self.without_trainer = False
        self.pushed = -1

    # Workers that come and go

    def health(self) -> None:
        """Look after every worker, and wake it; wait for one if none is left."""
        with waiting_for(f"a sign of life from vLLM worker {join_urls(self.workers)}"):
            run_coroutine(call_all(self.workers, self._look_after))
        if not self.serving:
            run_coroutine(self._wait(all_of_them=False))

    def put_to_sleep(self) -> None:
        """Put all workers to sleep, a launched one that is being started as soon as it is ready.

        A worker takes its memory of the GPU when it starts, and must not do so while the GPU trains.
        """
        while self.sleeps:
            if self.launch is not None:
                run_coroutine(self._wait(all_of_them=True))
            awake = [worker for worker in self.serving if not worker.asleep]
            with waiting_for(f"vLLM worker {join_urls(awake)} to fall asleep"):
                run_coroutine(call_all(awake, self._put_to_sleep))
            if self.launch is None or not self.absent:
                return

    def lose(self, worker: Worker, reason: str, restart: bool = True) -> None:
        """Take a worker out of service; start a launched one again.

        Raises:
            EngineError: If it was lost too often, or because the whole run was told to end.
        """
        worker.go_down(reason)
        worker.losses += 1
        # Logged and not warned: Python shows a warning only once.
        log.warning("Lost vLLM worker %s: %s", worker.url, reason)
        if worker.losses > self.max_restarts:
            raise EngineError(
                f"vLLM worker {worker.url} was lost {worker.losses} times in a row: {reason} Repair it, then "
                "resume with --resume true."
            )
        if is_terminated():
            raise EngineError(f"vLLM worker {worker.url} was lost when this run was terminated: {reason}")
        if restart and worker.server is not None:
            worker.server.start()

    def forgive_losses(self) -> None:
        """Count losses from zero again: a prompt got all its completions."""
        for worker in self.workers:
            worker.losses = 0

    async def _look_after(self, worker: Worker) -> None:
        """Greet a worker that is down; lose one that does not answer, or that was restarted."""
        if not worker.up:
            self._restart_if_ended(worker)
            await self._greet(worker)
            return
        try:
            version = await worker.probe(self.call_timeout_s)
            if worker.current and version not in (None, self.version_name):
                self.lose(worker, "It was restarted and holds old weights.", restart=False)
                await self._greet(worker)
                return
            await self._wake(worker)
        except WorkerError as error:
            self.lose(worker, str(error))

    async def _greet(self, worker: Worker) -> None:
        """Take a worker into service if it answers.

        Raises:
            WorkerError: If it answers, but is not set up as it must be; at the run's start also if it is well
                and refuses a call, as it would again.
        """
        is_well = False
        try:
            await worker.call("GET", "/health", None, min(GREETING_S, self.call_timeout_s))
            is_well = True
            max_model_len = await worker.fetch_context(self.call_timeout_s)
            await worker.describe(self.call_timeout_s, self.sleeps)
            await self._wake(worker)  # another run may have left it asleep
        except WorkerError as error:
            if not error.retryable or (is_well and error.refused and not self.started):
                raise
            worker.silence = str(error)
            return
        worker.max_model_len = max_model_len
        worker.state = State.CURRENT if self.without_trainer else State.READY

    async def _wake(self, worker: Worker) -> None:
        """Wake a worker, or find it awake."""
        if self.sleeps:
            await worker.call("POST", "/wake_up", None, self.sleep_timeout_s)
            worker.asleep = False

    async def _put_to_sleep(self, worker: Worker) -> None:
        try:
            # Level 1 copies the weights to pinned main memory, level 2 drops them.
            level = 1 if self.keeps_weights else 2
            await worker.call("POST", f"/sleep?level={level}", None, self.sleep_timeout_s)
            worker.asleep = True
        except WorkerError as error:
            self._lose_or_raise(worker, error)
            return
        if not self.keeps_weights:
            worker.state = State.READY

    def _lose_or_raise(self, worker: Worker, error: WorkerError) -> None:
        """Lose a worker that may be well later; raise an error that would only come again."""
        if not error.retryable:
            raise error
        self.lose(worker, str(error))

    def _restart_if_ended(self, worker: Worker) -> None:
        """Start a launched worker again if its process has ended while it was waited for."""
        ending = worker.server.find_error() if worker.server else None
        if ending and not self.started:
            raise EngineError(
                f"vLLM worker {worker.url} must start, but ended: {ending}. Correct what it reports."
            )
        if ending:
            self.lose(worker, f"It ended: {ending}.")

    async def _wait(self, all_of_them: bool) -> None:
        """Wait until all workers serve, or one of them.

        Raises:
            EngineError: After the deadline.
        """
        deadline_s = self.recovery_timeout_s if self.launch is None else self.launch.start_deadline_s
        end = time.monotonic() + deadline_s

        def missing() -> str:
            return f"vLLM worker {join_urls(self.absent)} to answer" if self.absent else ""

        with waiting_for(missing, deadline_s):
            await call_all(self.absent, self._greet)
            while self.absent if all_of_them else not self.serving:
                absent = self.absent
                for worker in absent:
                    self._restart_if_ended(worker)
                if is_terminated():
                    raise EngineError(
                        f"vLLM worker {join_urls(absent)} was down when this run was terminated."
                    )
                if time.monotonic() > end:
                    reasons = " ".join(f"{worker.reason} {worker.silence}" for worker in absent)
                    raise EngineError(
                        f"vLLM worker {join_urls(absent)} must answer within {deadline_s:g} s, but did not. "
                        f"{reasons} Then resume with --resume true."
                    )
                await asyncio.sleep(0.5)
                await call_all(absent, self._greet)

    # Weights

    def prepare_push(self, push: WeightPush) -> None:
        """Let all serving workers get ready for a push. One that fails is lost."""
        serving = self.serving
        with waiting_for(f"vLLM worker {join_urls(serving)} to get ready for new weights"):
            failures = push.prepare_all(list(serving))
        self._lose_failed(serving, failures)

    def push(self, push: WeightPush, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Push to all serving workers. One that fails is lost, and needs another push when it is back."""
        before = {worker: worker.state for worker in self.serving}
        self.pushed = policy_version
        for worker in before:
            worker.state = State.READY
        size = size_text(weights_size(tensor for _, tensor in named_tensors))
        weights = f"the weights of step {policy_version} ({size}) by {type(push).__name__}"
        with waiting_for(f"vLLM worker {join_urls(before)} to take {weights}"):
            failures = push.push(named_tensors, list(before), self.version_name)
        for worker, state in before.items():
            if worker.url not in failures:
                worker.state = State.VERIFIED if state is State.VERIFIED else State.CURRENT
        self._lose_failed(before, failures)

    def _lose_failed(self, workers: Iterable[Worker], failures: Failures) -> None:
        """Lose the workers that a push has failed at; raise an error that would only come again."""
        for worker in workers:
            error = failures.get(worker.url)
            if isinstance(error, WorkerError) and not error.retryable:
                raise error
            if error is not None:
                self.lose(worker, f"The weights could not be pushed to it: {error}")

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]], needs_log_probs: bool) -> None:
        """Compare every current worker's log-probs of a text with the trainer's.

        Args:
            token_ids: The text.
            log_probs: The trainer's log-probs of it, by policy version; see `Engine.verify`.
            needs_log_probs: Whether workers must report log-probs at the sampling temperature.
        """

        async def verify(worker: Worker) -> None:
            dtypes = {worker.dtype, *self.trainer_dtypes}
            bound = max(AGREEMENT.get(dtype, AGREEMENT["bfloat16"]) for dtype in dtypes)
            try:
                await verify_worker(worker, token_ids, log_probs, bound, needs_log_probs, self.call_timeout_s)
                worker.state = State.VERIFIED
            except WorkerError as error:
                self._lose_or_raise(worker, error)

        current = [worker for worker in self.serving if worker.current]
        with waiting_for(f"vLLM worker {join_urls(current)} to score a text"):
            run_coroutine(call_all(current, verify))

    async def require_current(self, worker: Worker) -> None:
        """Raise WorkerError if a worker shows no sign of life, or has other weights than it was pushed."""
        version = await worker.probe(self.call_timeout_s)
        if version not in (None, self.version_name):
            raise WorkerError(
                f"vLLM worker {worker.url} was restarted: it has weights '{version}' instead of "
                f"'{self.version_name}'. What it sampled is dropped and it gets the current weights.",
                retryable=True,
            )

    async def watch(self, worker: Worker) -> list[Any]:
        """Look for signs of life while requests are in flight; only an error ends it."""
        while True:
            await asyncio.sleep(self.call_timeout_s / 4)
            unpaused = worker.require_unpaused(self.call_timeout_s)
            await asyncio.gather(self.require_current(worker), unpaused)


def build_server(
    worker: Worker, index: int, launch: Launch, model: str, push: WeightPush, logs: Path
) -> LocalServer:
    """Return the process of worker number `index`, not started yet."""
    port = int(worker.url.rpartition(":")[2])
    arguments, environment = push.launch_options()
    command = launch.build_command(index, port, model, push.backend, str(worker.model)) + arguments
    environment = environment | launch.environment | launch.build_gpu_environment(index)
    if key := worker.api_key:
        # Not on the command line, where every user of the machine could read it.
        environment["VLLM_API_KEY"] = key
    size = model_size(launch.model or model)
    return LocalServer(command, environment, logs / f"worker-{index}.log", not worker.own_weights, size)


async def verify_worker(
    worker: WorkerClient,
    token_ids: list[int],
    log_probs: dict[int, list[float]],
    bound: float,
    needs_log_probs: bool,
    deadline_s: float,
) -> None:
    """Compare a vLLM worker's log-probs of a text with the trainer's.

    Args:
        worker: The worker that is asked.
        token_ids: The text.
        log_probs: The trainer's log-probs of it, nats, by policy version; see `Engine.verify`.
        bound: The largest mean difference that rounding explains, nats.
        needs_log_probs: Whether the worker must report log-probs at the sampling temperature.
        deadline_s: Deadline of each call.

    Raises:
        EngineError: If the log-probs differ, or are those of another temperature.
        WorkerError: If the worker does not answer.
    """
    scores = await worker.score(token_ids, deadline_s)
    exact = await worker.reports_sampled_log_probs(token_ids[0], deadline_s)
    if fault := find_disagreement(scores, log_probs, bound):
        advice = (
            "It serves another model: let it serve the one that is loaded here."
            if worker.own_weights
            else "Its weights are stale, or a part of them, such as a tied output head; check its "
            f"--weight-transfer-config and that it runs our {EXTENSION}."
        )
        raise EngineError(
            f"vLLM worker {worker.url} must hold the trainer's weights of step {max(log_probs)}, but "
            f"{fault} {advice}"
        )
    if needs_log_probs and not exact:
        raise EngineError(
            f"vLLM worker {worker.url} must report log-probs at the sampling temperature, but reports "
            "raw ones. Start it with --logprobs-mode processed_logprobs, or set the engine's log_probs "
            "to trainer."
        )


def join_urls(workers: Iterable[Worker]) -> str:
    """Return the addresses of workers, for a message."""
    return ", ".join(worker.url for worker in workers)


async def call_all(workers: list[Worker], function: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
    """Call a function for all workers at the same time."""
    await asyncio.gather(*map(function, workers))
