"""Sample with `vllm serve` workers over HTTP. What happens to a step's requests:

    sample       requests ──▶ queue ──▶ the worker with the fewest, if it has a free slot
                                ▲         │
                                │         ├── the completion came ──▶ yielded
                                │         ├── failed, worker alive: sent again, max_retries times
                                └─────────┴── worker lost (dead, hung, late, garbage): back to the queue
                 no worker left: WorkersLost; the caller then asks for what was not yielded

A request to a worker is for one completion: when it is finished it is scored, and its slot reused, while the
rest of its group is sampled. Greedy completions of a prompt are all alike, so one request brings them all.

fleet.py draws the states of a worker, client.py makes the calls, launch.py starts workers.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from rlt_lightning.engines.base import (
    Engine,
    NamedTensor,
    SampleRequest,
    Sampling,
    WorkersLost,
    require_context,
)
from rlt_lightning.engines.client import ADDRESS, CompletionRequest, WorkerError, read_api_key
from rlt_lightning.engines.fleet import Fleet, Worker
from rlt_lightning.engines.launch import Launch, find_free_port
from rlt_lightning.engines.push import GlooPush, WeightPush
from rlt_lightning.engines.threads import iterate_in_thread
from rlt_lightning.gloo import LOOPBACK
from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.template import find_eos_token_ids
from rlt_lightning.models.weights import gather_in_groups
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion, InputError

# A model's vocabulary exceeds its tokenizer's by less: it is rounded up to a size that suits the hardware.
MOST_SPARE_TOKENS = 1024


class VLLMEngine(Engine):
    """Sample with vLLM workers that hold copies of the teacher, and keep those copies up to date.

    Prompts go to the worker with the fewest requests. The seed of a request decides what it samples,
    whichever worker gets it. The requests of a worker that dies, hangs or sends garbage go to the others. A
    launched worker is restarted; a worker given by its URL is waited for. Each gets the current weights
    before it serves again.

    Args:
        urls: Workers that run already, such as [http://127.0.0.1:8000]. Name these or `launch`.
        launch: Workers to start and to stop.
        push: How weights travel; None: GlooPush(). A running worker must name its `backend` in
            --weight-transfer-config. NoPush: they do not travel, and any vLLM server will do.
        log_probs: worker: use the workers' log-probs, which must be those of sampling (--logprobs-mode
            processed_logprobs, checked at the start; a worker of NoPush without a trainer may report others,
            which are not used). trainer: use only log-probs that the trainer computes.
        served_model: Name that running workers serve the teacher under; None: the first that they list.
        api_key_env: Environment variable that holds the workers' API key, if they ask for one.
        max_sequences: Completions in flight at one worker, at most.
        request_timeout_s: Deadline of a request, from sending to its last token.
        call_timeout_s: Deadline of every other call; a worker that takes longer to show a sign of life is
            lost.
        sleep_timeout_s: Deadline of falling asleep, and of waking.
        max_retries: How often a request that failed at a living worker is sent again.
        backoff_s: Wait before the first retry; doubles with each.
        recovery_timeout_s: How long to wait for one worker to come back when none is left.
        max_restarts: How often a worker may be lost in a row, while no prompt gets all its completions.
        sleep: Let workers share the GPUs that train: they sleep, without weights, from a step's last
            completion to the next push. They need --enable-sleep-mode, and must fit into the GPU memory that
            training leaves free between two steps (--gpu-memory-utilization). With AdapterPush the base's
            weights wait in main memory.
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
        sleep_timeout_s: float = 300.0,
        max_retries: int = 3,
        backoff_s: float = 1.0,
        recovery_timeout_s: float = 600.0,
        max_restarts: int = 5,
        sleep: bool = False,
    ) -> None:
        self.push = push or GlooPush()
        self.own_weights = self.push.backend is None  # workers serve weights of their own
        if self.own_weights and sleep:
            raise InputError(
                "The engine's sleep needs workers that are pushed weights, but its push is NoPush. Set sleep "
                "to false."
            )
        if bool(urls) == (launch is not None):
            raise InputError(
                f"VLLMEngine needs either urls or launch, but got urls={urls} and launch={launch}. Name the "
                "workers that run, or have some started."
            )
        faulty = [url for url in urls or [] if not re.fullmatch(ADDRESS, url)]
        if faulty or len({url.rstrip("/") for url in urls or []}) < len(urls or []):
            raise InputError(
                "VLLMEngine.urls must be different addresses such as http://127.0.0.1:8000, without user and "
                f"path, but one of the {len(urls or [])} is not. Correct them."
            )
        run_id = uuid4().hex[:8]
        if launch is not None:
            ports = [launch.port + i if launch.port else find_free_port() for i in range(launch.num_workers)]
            urls = [f"http://{LOOPBACK}:{port}" for port in ports]
            # A name of this run, so that no other server on the port is taken for ours.
            served_model = f"teacher-{run_id}"
        api_key = read_api_key(api_key_env)
        workers = [Worker(url, served_model, api_key, self.own_weights) for url in urls or []]
        self.takes_adapters = self.push.takes_adapters
        deadlines = (call_timeout_s, sleep_timeout_s, recovery_timeout_s)
        self.fleet = Fleet(workers, run_id, launch, sleep, self.takes_adapters, *deadlines, max_restarts)
        self.takes_turns = sleep
        self.reports_log_probs = log_probs == "worker"
        self.max_sequences = max_sequences
        self.request_timeout_s = request_timeout_s
        self.max_retries = max_retries
        self.backoff_s = backoff_s
        self.tokenizer: Any = None
        self.eos_token_ids: set[int] = set()  # which the workers are told
        self.end_token_ids: Container[int] = set()  # with which they may end a completion
        self.vocab_size = 0

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Return the optimizer steps of the weights of all serving workers; -1 if one needs a push."""
        return self.fleet.policy_version

    @property
    def unverified(self) -> bool:  # type: ignore[override]
        """Tell whether a worker has come, or come back, since the last verification."""
        return self.fleet.unverified

    @property
    def max_model_len(self) -> int:  # type: ignore[override]
        """Return the tokens of prompt and completion that every worker takes."""
        return self.fleet.max_model_len

    # Start and stop

    def load_own_model(self, name: str) -> bool:
        """Let launched workers load the model `name`, unless the launch names one; with NoPush only."""
        launch = self.fleet.launch
        if self.own_weights and launch is not None and launch.model is None:
            self.fleet.launch = replace(launch, model=resolve(name))
        return self.own_weights

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Start the workers that are to be launched, and wait until every worker answers.

        With NoPush, `model` may be None. Completions then end where the worker's own model ends them, and
        carry log-probs only from a worker that reports those of sampling.
        """
        if self.fleet.started:
            return
        self.tokenizer = tokenizer
        if model is None:
            self._serve_without_trainer()
        else:
            self.end_token_ids = self.eos_token_ids = find_eos_token_ids(model, tokenizer)
            self.vocab_size = int(model.config.get_text_config().vocab_size)
            dtypes = {self.push.dtype, *(parameter.dtype for parameter in model.parameters())} - {None}
            self.fleet.trainer_dtypes = {str(dtype).removeprefix("torch.") for dtype in dtypes}
        self.push.open(model, folder / "weights")
        name = "" if model is None else model.name_or_path
        try:
            self.fleet.start(name, self.push, folder / "workers")
        except BaseException:
            self.close()
            raise

    def _serve_without_trainer(self) -> None:
        """Get ready to take the workers' own weights as they are."""
        if not self.own_weights:
            raise InputError(
                f"Without a model, workers must serve weights of their own, but push is "
                f"{type(self.push).__name__}. Set it to rlt_lightning.engines.NoPush."
            )
        if self.fleet.launch is not None and self.fleet.launch.model is None:
            raise InputError(
                "Without a model, launch.model must name what the workers load, but is not set. Set it."
            )
        self.fleet.without_trainer = True
        self.fleet.pushed = 0
        # The worker's model may end with another special token than the tokenizer's, and its vocabulary be
        # rounded up.
        self.end_token_ids = {self.tokenizer.eos_token_id, *self.tokenizer.added_tokens_decoder}
        self.vocab_size = len(self.tokenizer) + MOST_SPARE_TOKENS

    def close(self) -> None:
        """Leave the workers' groups and stop the workers that were launched."""
        self.push.close()
        self.fleet.close()

    # Workers and their weights

    def health(self) -> None:
        """Look after every worker, and wake it; wait for one if none is left."""
        self.fleet.health()

    def put_to_sleep(self) -> None:
        """Put all workers to sleep, if they share the GPUs that train."""
        self.fleet.put_to_sleep()

    def prepare_push(self) -> None:
        """Let all serving workers get ready for a push. One that fails is lost."""
        self.fleet.prepare_push(self.push)

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Push to all serving workers. One that fails is lost, and needs another push when it is back."""
        self.fleet.push(self.push, named_tensors, policy_version)

    def gather_weights(self, named_tensors: list[NamedTensor]) -> None:
        """Gather in step with rank 0, if it gathers anything."""
        if self.own_weights:
            return
        for _ in gather_in_groups(named_tensors, self.push.gather_bytes):
            pass

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Compare every worker's log-probs of a text with the trainer's."""
        self.fleet.verify(token_ids, log_probs, self.reports_log_probs)

    # Completions

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample` and, for the seeds, `SampleRequest.seeds`."""
        watcher = StopWatcher(self.tokenizer, stop, self.eos_token_ids)
        calls: list[CompletionRequest] = []
        brings: list[range] = []  # indices of the completions that each call brings
        rest: list[set[int]] = []  # indices of each call's group; those that have come are taken out
        first = 0
        for request in requests:
            limit = request.limit(sampling)
            require_context(len(request.prompt) + limit, self.max_model_len)
            one = replace(sampling, max_completion_length=limit)
            group = range(first, first + request.num_completions)
            first = group.stop
            # Greedy completions are all alike, and vLLM refuses several.
            parts = [range(i, i + 1) for i in group] if sampling.temperature > 0 else [group]
            missing = set(group)
            drawn: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
            for part, seed in zip(parts, request.seeds, strict=False):
                calls.append(
                    CompletionRequest(
                        prompt=request.prompt,
                        sampling=one,
                        watcher=watcher,
                        end_token_ids=self.end_token_ids,
                        vocab_size=self.vocab_size,
                        seed=seed,
                        group_size=request.num_completions,
                        drawn=drawn,
                    )
                )
                brings.append(part)
                rest.append(missing)

        def note_finished(call: int) -> None:
            rest[call].difference_update(brings[call])
            if not rest[call]:  # who asks again for what is missing asks for whole groups
                self.fleet.forgive_losses()

        finished = 0
        for call, completion in iterate_in_thread(self._complete_all(calls, note_finished)):
            finished += 1
            for index in brings[call]:
                yield index, completion
        if finished < len(calls):
            raise WorkersLost(f"No vLLM worker is left to sample: {' '.join(self.fleet.down.values())}")

    async def _complete_all(
        self, requests: list[CompletionRequest], note_finished: Callable[[int], None]
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Yield each request's number and completion as it is finished; end early when no worker is left.

        Each request goes to the worker with the fewest running ones. `note_finished` is called here with its
        number, before the next loss is counted: who reads the completions does so later, in another thread.
        """
        workers = [worker for worker in self.fleet.serving if worker.current]
        queue = deque(range(len(requests)))
        running: dict[asyncio.Task[Completion], tuple[int, Worker]] = {}
        watching = {asyncio.create_task(self.fleet.watch(worker)): worker for worker in workers}

        def free_worker() -> Worker | None:
            in_work = Counter(worker for _, worker in running.values())
            fewest = min(workers, key=in_work.__getitem__, default=None)
            return fewest if fewest is not None and in_work[fewest] < self.max_sequences else None

        try:
            while queue or running:
                while queue and (worker := free_worker()) is not None:
                    index = queue.popleft()
                    call = asyncio.create_task(self._complete(worker, requests[index]))
                    running[call] = (index, worker)
                if not running:
                    break
                tasks: list[asyncio.Task[Any]] = [*running, *watching]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done & running.keys():
                    if task.exception() is None:
                        index, _ = running.pop(task)
                        note_finished(index)
                        yield index, task.result()
                for task in done & (running.keys() | watching.keys()):
                    worker = watching.pop(task) if task in watching else running[task][1]
                    error = task.exception()
                    if worker not in workers:
                        continue  # its loss is known
                    if not isinstance(error, WorkerError) or not error.retryable:
                        raise error if error is not None else AssertionError("a watch ended")
                    workers.remove(worker)
                    self.fleet.lose(worker, str(error))
                for task, (index, worker) in list(running.items()):
                    if worker not in workers:  # another worker samples its requests
                        task.cancel()
                        del running[task]
                        queue.appendleft(index)
        finally:
            for task in (*running, *watching):
                task.cancel()

    async def _complete(self, worker: Worker, request: CompletionRequest) -> Completion:
        """Sample one request; send it again if it fails at a worker that is well.

        Raises:
            WorkerError: If the worker is lost, late or ignores the seed, or refuses the request.
        """
        deadline = time.monotonic() + self.request_timeout_s
        for attempt in itertools.count():
            try:
                completion = await worker.complete(request, max(0.0, deadline - time.monotonic()))
                await self.fleet.require_current(worker)
                break
            except WorkerError as error:
                if not error.retryable or attempt == self.max_retries:
                    raise
            await self.fleet.require_current(worker)
            if time.monotonic() >= deadline:
                raise WorkerError(
                    f"vLLM worker {worker.url} must complete a request within {self.request_timeout_s:g} s, "
                    "but did not, though it is alive. Raise the engine's request_timeout_s, or lower "
                    "rollouts.sampling.max_completion_length.",
                    retryable=True,
                )
            await asyncio.sleep(self.backoff_s * 2**attempt)
        known = self.reports_log_probs and (worker.exact or not self.fleet.without_trainer)
        if known:
            request.require_own_draw(completion)
        if request.sampling.truncates or not known:
            return replace(completion, log_probs=None)
        return completion
