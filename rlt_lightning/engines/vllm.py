"""Rollouts from `vllm serve` workers over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import sys
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

from rlt_lightning.engines.base import (
    SEED_MASK,
    Engine,
    EngineDescription,
    EngineError,
    NamedTensor,
    Sampling,
    WorkerSettings,
    WorkersLost,
    require_context,
)
from rlt_lightning.engines.client import ADDRESS, Request, WorkerClient, WorkerError, key_from
from rlt_lightning.engines.hf import eos_token_ids
from rlt_lightning.engines.launch import EXTENSION, Launch, LocalServer
from rlt_lightning.engines.verification import AGREEMENT, disagreement
from rlt_lightning.engines.weights import GlooPush, WeightPush, free_port, in_background
from rlt_lightning.gloo import LOOPBACK
from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.weights import gathered_groups
from rlt_lightning.types import Completion, InputError

T = TypeVar("T")
log = logging.getLogger(__name__)
GREETING_S = 5.0  # deadline of the first call to a worker that may not be there


class VLLMEngine(Engine):
    """Sample with vLLM workers that hold copies of the teacher, and keep those copies up to date.

    Prompts go to whichever worker has room. What a request samples depends on its seed alone, not on the
    worker. A worker that dies, hangs or talks nonsense loses its requests to the others. A launched one is
    restarted; one that is named by its URL is waited for. Either gets the current weights before it serves
    again.

    Args:
        urls: Workers that run already, such as [http://127.0.0.1:8000]; or
        launch: Workers to start and to stop.
        push: How weights travel; None: GlooPush(). A running worker must name its `backend` in
            --weight-transfer-config. NoPush: they do not, and any vLLM server will do.
        log_probs: worker: take the workers' log-probs, which must be those of sampling (--logprobs-mode
            processed_logprobs, checked at the start). trainer: take none, the trainer's own are the only
            ones.
        served_model: Name that running workers serve the teacher under; None: the first that they list.
        api_key_env: Environment variable that holds the workers' API key, if they ask for one.
        max_sequences: Completions in work at one worker.
        request_timeout_s: Deadline of a request, from sending to the last token of its longest completion.
        call_timeout_s: Deadline of every other call; a worker that takes longer to show a sign of life is
            lost.
        max_retries: How often a request that failed at a living worker is sent again.
        backoff_s: Wait before the first retry; doubles with each.
        recovery_timeout_s: How long to wait for one worker to come back when none is left.
        max_restarts: How often a worker may be lost in a row, while no request is completed.
        sleep: Let workers share the GPUs that train: they sleep, weights in main memory, from a step's last
            completion to the next push. They need --enable-sleep-mode, and as much memory of the GPU as
            training leaves between two steps (--gpu-memory-utilization).
    """

    def __init__(
        self,
        urls: list[str] | None = None,
        launch: Launch | None = None,
        push: WeightPush | None = None,
        log_probs: Literal["worker", "trainer"] = "worker",
        served_model: str | None = None,
        api_key_env: str = "VLLM_API_KEY",
        max_sequences: int = 256,
        request_timeout_s: float = 3600.0,
        call_timeout_s: float = 60.0,
        max_retries: int = 3,
        backoff_s: float = 1.0,
        recovery_timeout_s: float = 600.0,
        max_restarts: int = 5,
        sleep: bool = False,
    ) -> None:
        self.push = push or GlooPush()
        self.plain = self.push.backend is None  # workers serve weights of their own
        if self.plain and sleep:
            raise InputError(
                "The engine's sleep needs workers that are pushed weights, but its push is NoPush. Set sleep "
                "to false."
            )
        if bool(urls) == (launch is not None):
            raise InputError(
                f"VLLMEngine needs either urls or launch, but got urls={urls} and launch={launch}. Name the "
                "workers that run, or have some started."
            )
        self.launch = launch
        self.takes_adapters = self.push.takes_adapters
        self.reports_log_probs = log_probs == "worker"
        self.max_sequences = max_sequences
        self.request_timeout_s = request_timeout_s
        self.call_timeout_s = call_timeout_s
        self.max_retries = max_retries
        self.backoff_s = backoff_s
        self.recovery_timeout_s = recovery_timeout_s
        self.max_restarts = max_restarts
        self.takes_turns = sleep
        self.run_id = uuid4().hex[:8]  # versions of another run's trainer are not ours
        self.pushed = -1  # policy version of the last push
        self.down: dict[str, str] = {}  # URL of each worker that does not serve -> why
        self.silence: dict[str, str] = {}  # URL -> what came of the last attempt to greet it
        self.servers: dict[str, LocalServer] = {}  # URL -> process, of launched workers
        self.stop_ids: tuple[int, ...] = ()
        self.vocab_size = 0
        self.max_model_len = sys.maxsize
        self.started = False
        api_key = key_from(api_key_env)
        faulty = [url for url in urls or [] if not re.fullmatch(ADDRESS, url)]
        if faulty or len({url.rstrip("/") for url in urls or []}) < len(urls or []):
            raise InputError(
                "VLLMEngine.urls must be different addresses such as http://127.0.0.1:8000, without user and "
                f"path, but one of the {len(urls or [])} is not. Correct them."
            )
        if launch is not None:
            ports = [launch.port + i if launch.port else free_port() for i in range(launch.num_workers)]
            urls = [f"http://{LOOPBACK}:{port}" for port in ports]
            served_model = f"teacher-{self.run_id}"  # no other server on the port is taken for ours
        self.workers = [WorkerClient(url, served_model, api_key, self.plain) for url in urls or []]
        self.alone = False  # whether there is no trainer, and so no weights but the workers' own

    @property
    def serving(self) -> list[WorkerClient]:
        """The workers that are not down."""
        return [worker for worker in self.workers if worker.url not in self.down]

    @property
    def version_name(self) -> str:
        """What workers call the version of the last push."""
        return f"{self.run_id}-{self.pushed:06d}"

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Optimizer steps of the weights that all serving workers hold; -1 if one of them needs a push."""
        current = [worker.weights == self.version_name for worker in self.serving]
        return self.pushed if current and all(current) else -1

    @property
    def unverified(self) -> bool:  # type: ignore[override]
        """Whether a worker has come, or come back, since the last verification."""
        return any(worker.verified != worker.incarnation for worker in self.serving)

    # Start and stop

    def describe(self) -> EngineDescription:
        """Return the workers as the settings name them."""
        workers = WorkerSettings(
            num_workers=len(self.workers),
            launch=self.launch,
            max_sequences=self.max_sequences,
            push_backend=self.push.backend,
            push_dtype=self.push.dtype,
            push_bytes=self.push.gather_bytes,
        )
        return EngineDescription(workers=workers)

    def load_own_model(self, name: str) -> bool:
        """Let launched workers load the model `name`, unless the launch names one; with NoPush only."""
        if self.plain and self.launch is not None and self.launch.model is None:
            self.launch = replace(self.launch, model=resolve(name))
        return self.plain

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Start the workers that are to be launched, and wait until every worker answers.

        With NoPush, `model` may be None. Completions then end where the worker's own model ends them, and
        carry no log-probs, since nobody has verified what the worker calls so.
        """
        if self.started:
            return
        if model is None:
            self._be_alone()
        else:
            self.stop_ids = tuple(sorted(eos_token_ids(model, tokenizer)))
            self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.push.open(model, folder / "weights")
        self.down = {worker.url: "It never answered." for worker in self.workers}
        try:
            if self.launch is not None:
                name = self.launch.model or model.name_or_path
                self._start_servers(self.launch, name, folder / "workers")
            self._run(self._wait_for(all_of_them=True))
        except BaseException:
            self.close()
            raise
        self.started = True

    def _be_alone(self) -> None:
        """Get ready to take the workers as they are."""
        if not self.plain:
            raise InputError(
                f"Without a model, workers must serve weights of their own, but push is "
                f"{type(self.push).__name__}. Set it to rlt_lightning.engines.NoPush."
            )
        if self.launch is not None and self.launch.model is None:
            raise InputError(
                "Without a model, launch.model must name what the workers load, but is not set. Set it."
            )
        self.alone = True
        self.pushed = 0
        self.vocab_size = sys.maxsize

    def _start_servers(self, launch: Launch, model: str, logs: Path) -> None:
        for index, worker in enumerate(self.workers):
            port = int(worker.url.rpartition(":")[2])
            arguments, environment = self.push.launch_options()
            command = launch.command(index, port, model, self.push.backend, str(worker.model)) + arguments
            environment = environment | launch.environment
            if launch.gpus is not None:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus[index]))
            if key := worker.api_key:
                environment["VLLM_API_KEY"] = key  # not on the command line, where every user could read it
            log = logs / f"worker-{index}.log"
            self.servers[worker.url] = LocalServer(command, environment, log, dev_mode=not self.plain)
            self.servers[worker.url].start()

    def close(self) -> None:
        """Leave the workers' groups and stop those that were launched."""
        self.push.close()
        for server in self.servers.values():
            server.stop()
        self.servers = {}
        self.started = self.alone = False
        self.pushed = -1  # what the workers hold later on is not known
        for worker in self.workers:
            worker.weights = worker.adapter = None
            worker.incarnation += 1

    # Workers that come and go

    def health(self) -> None:
        """Look after every worker, and wake it; wait for one if none is left."""
        self._run(self._look_after_all())

    async def _look_after_all(self) -> None:
        await asyncio.gather(*map(self._look_after, self.workers))
        if not self.serving:
            await self._wait_for(all_of_them=False)

    def put_to_sleep(self) -> None:
        """Put all workers to sleep, a launched one that is being started as soon as it is ready.

        It takes its memory when it starts, and must not do so while the GPU trains.
        """
        if self.takes_turns:
            self._run(self._put_all_to_sleep())

    async def _put_all_to_sleep(self) -> None:
        asleep: set[str] = set()
        while True:
            if self.launch is not None:
                await self._wait_for(all_of_them=True)
            awake = [worker for worker in self.serving if worker.url not in asleep]
            await asyncio.gather(*map(self._put_to_sleep, awake))
            asleep |= {worker.url for worker in self.serving}
            if self.launch is None or not self.down:
                return

    async def _put_to_sleep(self, worker: WorkerClient) -> None:
        try:
            await worker.call("POST", "/sleep?level=1", None, self.call_timeout_s)
        except WorkerError as error:
            if not error.retryable:
                raise
            self._lose(worker, str(error))

    async def _wake(self, worker: WorkerClient) -> None:
        """Wake a worker, or find it awake.

        Raises:
            WorkerError: If it cannot be woken.
        """
        if self.takes_turns:
            await worker.call("POST", "/wake_up", None, self.call_timeout_s)

    async def _look_after(self, worker: WorkerClient) -> None:
        """Take a worker back that answers again; notice one that does not, or that was restarted."""
        if worker.url in self.down:
            self._restart_if_ended(worker)
            await self._greet(worker)
            return
        try:
            if await worker.probe(self.call_timeout_s) != worker.weights and worker.weights is not None:
                self._lose(worker, "It was restarted and holds old weights.", restart=False)
                await self._greet(worker)
                return
            await self._wake(worker)
        except WorkerError as error:
            self._lose(worker, str(error))

    async def _greet(self, worker: WorkerClient) -> None:
        """Take a worker into service if it answers.

        Raises:
            WorkerError: If it answers, but is not set up as it must be.
        """
        try:
            await worker.call("GET", "/health", None, min(GREETING_S, self.call_timeout_s))
            limit = await worker.context(self.call_timeout_s)
            await worker.describe(self.call_timeout_s, self.takes_turns)
            await self._wake(worker)  # whom another run may have left asleep
        except WorkerError as error:
            if not error.retryable:
                raise
            self.silence[worker.url] = str(error)
            return
        if self.alone:
            worker.weights = self.version_name
        self.max_model_len = min(self.max_model_len, limit)
        self.down.pop(worker.url, None)

    def _lose(self, worker: WorkerClient, reason: str, restart: bool = True) -> None:
        """Take a worker out of service; start a launched one again."""
        self.down[worker.url] = reason
        worker.weights = worker.adapter = None
        worker.incarnation += 1
        worker.losses += 1
        log.warning("Lost vLLM worker %s: %s", worker.url, reason)  # each time: a warning is shown but once
        if worker.losses > self.max_restarts:
            raise EngineError(
                f"vLLM worker {worker.url} was lost {worker.losses} times in a row: {reason} Mend it, then "
                "go on with --resume true."
            )
        if restart and worker.url in self.servers:
            self.servers[worker.url].start()

    def _restart_if_ended(self, worker: WorkerClient) -> None:
        """Start a launched worker again whose process has ended while it was waited for."""
        server = self.servers.get(worker.url)
        ending = server.ending() if server else None
        if ending and not self.started:
            raise EngineError(
                f"vLLM worker {worker.url} must start, but ended: {ending}. Correct what it tells."
            )
        if ending:
            self._lose(worker, f"It ended: {ending}.")

    async def _wait_for(self, all_of_them: bool) -> None:
        """Wait until one worker serves, or all of them do."""
        deadline_s = self.recovery_timeout_s if self.launch is None else self.launch.start_deadline_s
        progress = WaitingLine(deadline_s)
        await asyncio.gather(*map(self._greet, [w for w in self.workers if w.url in self.down]))
        while self.down if all_of_them else not self.serving:
            absent = [worker for worker in self.workers if worker.url in self.down]
            for worker in absent:
                self._restart_if_ended(worker)
            if progress.over():
                reasons = " ".join(
                    f"{reason} {self.silence.get(url, '')}" for url, reason in self.down.items()
                )
                raise EngineError(
                    f"vLLM worker {', '.join(self.down)} must answer within {deadline_s:g} s, but did not. "
                    f"{reasons} Then go on with --resume true."
                )
            await asyncio.sleep(0.5)
            await asyncio.gather(*map(self._greet, absent))
            progress.show(self.down)
        progress.end()

    # Weights

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Push to all serving workers. One that fails is lost, and needs another push when it is back."""
        workers = self.serving
        self.pushed = policy_version
        failures = self.push.push(named_tensors, workers, self.version_name)
        for worker in workers:
            if worker.url not in failures:
                worker.weights = self.version_name
        for worker in workers:
            error = failures.get(worker.url)
            if isinstance(error, WorkerError) and not error.retryable:
                raise error
            if error is not None:
                self._lose(worker, f"The weights could not be pushed to it: {error}")

    def gather_weights(self, named_tensors: list[NamedTensor]) -> None:
        """Gather in step with rank 0, if it gathers anything."""
        if self.plain:
            return
        for _ in gathered_groups(named_tensors, self.push.gather_bytes):
            pass

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Compare every worker's log-probs of a text with the trainer's."""

        async def verify_all() -> None:
            await asyncio.gather(*(self._verify(worker, token_ids, log_probs) for worker in self.serving))

        self._run(verify_all())

    async def _verify(
        self, worker: WorkerClient, token_ids: list[int], log_probs: dict[int, list[float]]
    ) -> None:
        try:
            scores = await worker.score(token_ids, self.call_timeout_s)
            exact = await worker.reports_sampled_log_probs(token_ids[0], self.call_timeout_s)
        except WorkerError as error:
            if not error.retryable:
                raise
            self._lose(worker, str(error))
            return
        if fault := disagreement(scores, log_probs, AGREEMENT.get(worker.dtype, AGREEMENT["bfloat16"])):
            advice = (
                "It serves another model: let it serve the one that is loaded here."
                if self.plain
                else "Its weights are stale, or a part of them, such as a tied output head; check its "
                f"--weight-transfer-config and that it runs our {EXTENSION}."
            )
            raise EngineError(
                f"vLLM worker {worker.url} must hold the trainer's weights of step {max(log_probs)}, but "
                f"{fault} {advice}"
            )
        if self.reports_log_probs and not exact:
            raise EngineError(
                f"vLLM worker {worker.url} must report log-probs at the sampling temperature, but reports "
                "raw ones. Start it with --logprobs-mode processed_logprobs, or set the engine's log_probs "
                "to trainer."
            )
        worker.verified = worker.incarnation

    # Completions

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        num_completions: int,
        stop: str,
        seeds: list[int],
        limits: list[int] | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`. Completion i has its prompt's seed, cut to 62 bits, plus i."""
        limits = limits or [sampling.max_completion_length] * len(prompts)
        require_context(max(map(add, map(len, prompts), limits)), self.max_model_len)
        requests = [
            Request(
                prompt,
                num_completions,
                replace(sampling, max_completion_length=limit),
                stop,
                self.stop_ids,
                self.vocab_size,
                seed & SEED_MASK,
            )
            for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
        ]
        finished = self._run(self._complete_all(requests))
        if len(finished) < len(prompts):
            raise WorkersLost(f"No vLLM worker is left to sample: {' '.join(self.down.values())}", finished)
        return [finished[i] for i in range(len(prompts))]

    async def _complete_all(self, requests: list[Request]) -> dict[int, list[Completion]]:
        """Give each request to the worker with the fewest in work; end early when no worker is left."""
        workers = [worker for worker in self.serving if worker.weights == self.version_name]
        slots = max(1, self.max_sequences // requests[0].num_completions)
        queue, finished = deque(range(len(requests))), dict[int, list[Completion]]()
        running: dict[asyncio.Task[list[Completion]], tuple[int, WorkerClient]] = {}
        watching = {asyncio.create_task(self._watch(worker)): worker for worker in workers}

        def in_work(worker: WorkerClient) -> int:
            return sum(w is worker for _, w in running.values())

        try:
            while queue or running:
                while queue and workers and in_work(worker := min(workers, key=in_work)) < slots:
                    index = queue.popleft()
                    task = asyncio.create_task(self._complete(worker, requests[index]))
                    running[task] = (index, worker)
                if not running:
                    break
                done, _ = await asyncio.wait([*running, *watching], return_when=asyncio.FIRST_COMPLETED)
                for task in done & running.keys():
                    index, worker = running[task]
                    if task.exception() is None:
                        finished[index] = task.result()
                        del running[task]
                        for other in self.workers:
                            other.losses = 0
                for task in done & (running.keys() | watching.keys()):
                    worker = watching.pop(task) if task in watching else running[task][1]
                    error = task.exception()
                    if worker not in workers:
                        continue  # its loss is known
                    if not isinstance(error, WorkerError) or not error.retryable:
                        raise error if error is not None else AssertionError("a watch ended")
                    workers.remove(worker)
                    self._lose(worker, str(error))
                for task, (index, worker) in list(running.items()):
                    if worker not in workers:  # what it was given is sampled anew by another
                        task.cancel()
                        del running[task]
                        queue.appendleft(index)
        finally:
            for task in (*running, *watching):
                task.cancel()
        return finished

    async def _complete(self, worker: WorkerClient, request: Request) -> list[Completion]:
        """Sample one request, again if it fails at a worker that is well.

        Raises:
            WorkerError: If the worker is lost, or the request is refused for what it is, or takes too long.
        """
        deadline = time.monotonic() + self.request_timeout_s
        for attempt in itertools.count():
            try:
                completions = await worker.complete(request, max(0.0, deadline - time.monotonic()))
                await self._require_current(worker)
                break
            except WorkerError as error:
                if not error.retryable or attempt == self.max_retries:
                    raise
            await self._require_current(worker)
            if time.monotonic() >= deadline:
                raise WorkerError(
                    f"vLLM worker {worker.url} must complete a request within {self.request_timeout_s:g} s, "
                    "but did not, though it is alive. Raise the engine's request_timeout_s, or lower "
                    "sampling.max_completion_length.",
                    retryable=False,
                )
            await asyncio.sleep(self.backoff_s * 2**attempt)
        if request.sampling.truncates or self.alone or not self.reports_log_probs:
            return [replace(completion, log_probs=None) for completion in completions]
        return completions

    async def _require_current(self, worker: WorkerClient) -> None:
        """Raise WorkerError if the worker shows no sign of life, or has other weights than it was pushed."""
        if (version := await worker.probe(self.call_timeout_s)) != worker.weights:
            raise WorkerError(
                f"vLLM worker {worker.url} was restarted: it has weights '{version}' instead of "
                f"'{worker.weights}'. What it sampled is dropped and it gets the current weights.",
                retryable=True,
            )

    async def _watch(self, worker: WorkerClient) -> list[Completion]:
        """Look for signs of life while requests are in work; ends by an error alone."""
        while True:
            await asyncio.sleep(self.call_timeout_s / 4)
            await self._require_current(worker)

    @staticmethod
    def _run(work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, also where a notebook has a running loop of its own."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        return in_background(lambda: asyncio.run(work)).result()


class WaitingLine:
    """Tell how long workers have been waited for: redrawn on a terminal, now and then in a log file."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.begin = time.monotonic()
        self.next_line = 5.0  # seconds waited when the next line is due
        self.terminal = sys.stderr.isatty()
        self.shown = False

    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() - self.begin > self.deadline_s

    def show(self, down: dict[str, str]) -> None:
        """Tell who is waited for, if it is time."""
        waited = time.monotonic() - self.begin
        if not down or (waited < self.next_line and not self.terminal):
            return
        line = f"waiting for vLLM worker {', '.join(down)}: {waited:.0f} s of {self.deadline_s:.0f} s"
        print(
            f"\r{line}" if self.terminal else line,
            end="" if self.terminal else "\n",
            file=sys.stderr,
            flush=True,
        )
        self.next_line = waited + 15
        self.shown = True

    def end(self) -> None:
        """Leave the line."""
        if self.shown and self.terminal:
            print(file=sys.stderr)
