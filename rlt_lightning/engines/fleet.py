"""Keep track of an engine's vLLM workers: whether they all serve, and how a lost one comes back.

All workers hold the same weights, and serve together or not at all:

    down ──── bring back ───▶ up ──── push ───▶ current ──── verify ───▶ verified
      ▲                        │                   │                        │
      └────── lose, close ─────┴───────────────────┴────────────────────────┘

A worker that dies, hangs or sends garbage takes all to down, and ends what is sampled; what has come stays
valid. `health` starts a launched worker again, waits for the others, and a push follows. A second loss before
a request is sampled to its end ends the run. Without a trainer (NoPush) workers that are up are current.
Workers that fall asleep drop their weights, so a push follows.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlt_lightning.engines.base import AGREEMENT, EngineError, NamedTensor, find_disagreement
from rlt_lightning.engines.client import WorkerClient, WorkerError
from rlt_lightning.engines.launch import EXTENSION, Launch, read_last_error, start_server, stop_server
from rlt_lightning.engines.push import WeightPush
from rlt_lightning.engines.threads import run_coroutine
from rlt_lightning.run.console import waiting_for
from rlt_lightning.run.interrupt import is_terminated

log = logging.getLogger(__name__)
# Deadline of the first call to a worker that may not be there.
GREETING_S = 5.0
SLEEP = "/sleep?level=2"  # level 1 would copy the weights to pinned main memory, 2 drops them


class Worker(WorkerClient):
    """A worker's routes, and all that the fleet knows of it."""

    greeted = False  # since the last loss
    silence = "It never answered."  # the error of the last attempt to greet it
    max_model_len = sys.maxsize  # tokens; known once it was greeted
    process: subprocess.Popen[bytes] | None = None  # if it was launched


class Fleet:
    """All workers of an engine, and the version of the weights that they were pushed.

    Args:
        workers: One for each server.
        push: How weights reach them.
        run_id: Marks the versions of this trainer: those of another run's trainer are not ours.
        launch: How workers are started; None: they run already.
        sleeps: Whether workers sleep while the GPUs train.
        call_timeout_s: Deadline of every call, except in a push, in falling asleep and in waking.
        recovery_timeout_s: How long to wait for workers that run already.
    """

    def __init__(
        self,
        workers: list[Worker],
        push: WeightPush,
        run_id: str,
        launch: Launch | None,
        sleeps: bool,
        call_timeout_s: float,
        recovery_timeout_s: float,
    ) -> None:
        self.workers = workers
        self.weights = push
        self.run_id = run_id
        self.launch = launch
        self.sleeps = sleeps
        self.call_timeout_s = call_timeout_s
        self.recovery_timeout_s = recovery_timeout_s
        self.model = ""  # what launched workers load, and where their logs are
        self.logs = Path()
        self.started = False
        self.without_trainer = False  # whether only the workers have weights
        self.up = False  # whether all workers answer
        self.pushed = -1  # policy version of the last push
        self.policy_version = -1  # of the weights that all workers hold; -1: a push is needed
        self.verified = False
        self.losses = 0  # since a request was sampled to its end
        # Weights travel in these, or in the worker's if that is narrower.
        self.trainer_dtypes: set[str] = set()

    @property
    def version_name(self) -> str:
        """Return the workers' name of the last push's version."""
        return f"{self.run_id}-{self.pushed:06d}"

    @property
    def urls(self) -> str:
        """Return the addresses of all workers, for a message."""
        return ", ".join(worker.url for worker in self.workers)

    # Start and stop

    def start(self, model: str, logs: Path) -> None:
        """Start the workers that are to be launched, and wait until every worker answers."""
        self.model, self.logs = model, logs
        self._bring_back()
        self.started = True

    def close(self) -> None:
        """Stop the workers that were launched. What the others hold later on is not known."""
        for worker in self.workers:
            stop_server(worker.process)
            worker.process = None
        self._forget()
        self.started = self.without_trainer = False
        self.pushed, self.losses = -1, 0

    # Workers that come and go

    def health(self) -> None:
        """Look after every worker; bring back what was lost.

        Raises:
            EngineError: If they do not come back.
        """
        if self.up:
            with waiting_for(f"a sign of life from vLLM worker {self.urls}"), self._losing():
                self._call_all(self._look_after)
        if not self.up:
            self._bring_back()

    def put_to_sleep(self) -> None:
        """Put all workers to sleep: none may keep its memory of the GPU that trains."""
        asleep = not self.sleeps
        while not asleep:
            if not self.up:
                self._bring_back()
            with waiting_for(f"vLLM worker {self.urls} to fall asleep"), self._losing():
                self._call_all(lambda worker: worker.call("POST", SLEEP, None, self.weights.timeout_s))
                asleep = True
        if self.sleeps:
            self.policy_version, self.verified = -1, False

    def lose(self, error: WorkerError) -> None:
        """Take all workers out of service, since one failed.

        Raises:
            EngineError: If it would fail again, or did so before.
        """
        if not error.retryable:
            raise error
        self._forget()
        self.losses += 1
        # Logged and not warned: Python shows a warning only once.
        log.warning("Lost vLLM worker: %s", error)
        if self.losses > 1:
            raise EngineError(
                f"A vLLM worker was lost twice in one iteration: {error} Repair it, then resume with "
                "--resume true."
            )

    def _forget(self) -> None:
        """Forget weights and connections."""
        self.up, self.policy_version, self.verified = False, -1, False
        self.weights.disconnect()
        for worker in self.workers:
            worker.greeted = False

    def _bring_back(self) -> None:
        """Start launched workers that do not answer, and wait until all do."""
        if self.launch is not None:
            for index, worker in enumerate(self.workers):
                if worker.process is None or not self._answers(worker):
                    stop_server(worker.process)
                    worker.process = self._start_server(worker, index, self.launch)
        run_coroutine(self._wait())
        self.up = True
        if self.without_trainer:
            self.policy_version = self.pushed = 0

    def _answers(self, worker: Worker) -> bool:
        """Tell whether a launched worker runs and is well."""
        assert worker.process is not None
        if worker.process.poll() is not None:
            return False
        try:
            run_coroutine(worker.probe(self.call_timeout_s))
        except WorkerError:
            return False
        return True

    def _start_server(self, worker: Worker, index: int, launch: Launch) -> subprocess.Popen[bytes]:
        """Start the process of worker number `index`."""
        port = int(worker.url.rpartition(":")[2])
        command = launch.build_command(index, port, self.model, self.weights.backend, str(worker.model))
        environment = launch.environment | launch.build_gpu_environment(index)
        if key := worker.api_key:
            # Not on the command line, where every user of the machine could read it.
            environment["VLLM_API_KEY"] = key
        environment["VLLM_SERVER_DEV_MODE"] = "0" if worker.keeps_weights else "1"
        return start_server(command, environment, self._log_of(index))

    def _log_of(self, index: int) -> Path:
        return self.logs / f"worker-{index}.log"

    async def _look_after(self, worker: Worker) -> None:
        """Raise if a worker does not answer, or was restarted."""
        if self.policy_version >= 0:
            await self.require_current(worker)
        else:
            await worker.probe(self.call_timeout_s)

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
            if not worker.keeps_weights:
                await self._wake(worker)  # another run may have left it asleep
        except WorkerError as error:
            if not error.retryable or (is_well and error.refused and not self.started):
                raise
            worker.silence = str(error)
            return
        worker.max_model_len, worker.greeted = max_model_len, True

    async def _wake(self, worker: Worker) -> None:
        """Wake a worker, or find it awake: vLLM ends if an update begins while it sleeps."""
        await worker.call("POST", "/wake_up", None, self.weights.timeout_s)

    async def _wait(self) -> None:
        """Wait until all workers are greeted.

        Raises:
            EngineError: After the deadline, or if a launched one ends.
        """
        deadline_s = self.recovery_timeout_s if self.launch is None else self.launch.start_deadline_s
        end = time.monotonic() + deadline_s

        with waiting_for(f"vLLM worker {self.urls} to answer, at most {deadline_s:.0f} s"):
            while True:
                absent = [worker for worker in self.workers if not worker.greeted]
                await asyncio.gather(*map(self._greet, absent))
                if all(worker.greeted for worker in absent):
                    return
                for index, worker in enumerate(self.workers):
                    if worker.process is not None and worker.process.poll() is not None:
                        raise EngineError(
                            f"vLLM worker {worker.url} must start, but ended: "
                            f"{read_last_error(self._log_of(index))} Correct what it reports."
                        )
                reasons = " ".join(worker.silence for worker in absent if not worker.greeted)
                if is_terminated():
                    raise EngineError(f"A vLLM worker was down when this run was terminated. {reasons}")
                if time.monotonic() > end:
                    raise EngineError(
                        f"All vLLM workers must answer within {deadline_s:g} s, but did not. {reasons} Then "
                        "resume with --resume true."
                    )
                await asyncio.sleep(0.5)

    # Weights

    def push(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Wake all workers and push to them. If one fails, all need another push when it is back."""
        self.policy_version, self.pushed = -1, policy_version
        with waiting_for(f"vLLM worker {self.urls} to take the weights"), self._losing():
            if self.sleeps:
                self._call_all(self._wake)
            self.weights.push(named_tensors, list(self.workers), self.version_name)
            self.policy_version = policy_version

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]], needs_log_probs: bool) -> None:
        """Compare every worker's log-probs of a text with the trainer's.

        Args:
            token_ids: The text.
            log_probs: The trainer's log-probs of it, by policy version; see `Engine.verify`.
            needs_log_probs: Whether workers must report log-probs at the sampling temperature.

        Raises:
            EngineError: If the log-probs differ, or are those of another temperature.
        """

        async def verify(worker: Worker) -> None:
            scores = await worker.score(token_ids, self.call_timeout_s)
            exact = await worker.reports_sampled_log_probs(token_ids[0], self.call_timeout_s)
            dtypes = {worker.dtype, *self.trainer_dtypes}
            bound = max(AGREEMENT.get(dtype, AGREEMENT["bfloat16"]) for dtype in dtypes)
            if fault := find_disagreement(scores, log_probs, bound):
                advice = (
                    "It serves another model: let it serve the one that is loaded here."
                    if worker.keeps_weights
                    else "Its weights are stale, or a part of them, such as a tied output head; check its "
                    f"--weight-transfer-config and that it runs our {EXTENSION}."
                )
                raise EngineError(
                    f"vLLM worker {worker.url} must hold the trainer's weights of step {max(log_probs)}, but "
                    f"{fault} {advice}"
                )
            if needs_log_probs and not exact:
                raise EngineError(
                    f"vLLM worker {worker.url} must report log-probs at the sampling temperature, but "
                    "reports raw ones. Start it with --logprobs-mode processed_logprobs, or set the engine's "
                    "log_probs to trainer."
                )

        with waiting_for(f"vLLM worker {self.urls} to score a text"), self._losing():
            self._call_all(verify)
            self.verified = True

    async def require_current(self, worker: Worker) -> None:
        """Raise WorkerError if a worker shows no sign of life, or has other weights than it was pushed."""
        version = await worker.probe(self.call_timeout_s)
        if version not in (None, self.version_name):
            raise WorkerError(
                f"vLLM worker {worker.url} was restarted: it has weights '{version}' instead of "
                f"'{self.version_name}'. What it sampled is dropped and it gets the current weights.",
                retryable=True,
            )

    async def watch(self) -> None:
        """Look for signs of life while requests are in flight; only an error ends it."""
        while True:
            await asyncio.sleep(self.call_timeout_s / 4)
            await asyncio.gather(*map(self.require_current, self.workers))

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Take it for the loss of a worker if a call inside the block fails."""
        try:
            yield
        except WorkerError as error:
            self.lose(error)

    def _call_all(self, function: Callable[[Worker], Coroutine[Any, Any, Any]]) -> None:
        """Call a function for all workers at the same time."""

        async def call() -> None:
            await asyncio.gather(*map(function, self.workers))

        run_coroutine(call())
