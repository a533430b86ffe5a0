"""Sample with `vllm serve` workers over HTTP. What happens to a step's requests:

    sample       requests ──▶ queue ──▶ a worker with room ──▶ the completion is yielded
                 a worker is lost (dead, hung, late, garbage): WorkersLost; what was yielded stays valid, and
                 the caller pushes the weights and asks for the rest

A request to a worker is for one completion: when it is finished it is scored, and another follows, while the
rest of its group is sampled. Greedy completions of a prompt are all alike, so one request brings them all.

fleet.py draws the states of the workers, client.py makes the calls, launch.py starts workers.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Container, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch

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
from rlt_lightning.engines.push import GlooPush, IPCPush, WeightPush
from rlt_lightning.engines.threads import iterate
from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.template import find_eos_token_ids
from rlt_lightning.models.weights import gather_in_groups
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion, InputError
from rlt_lightning.worker.gloo import LOOPBACK

# A model's vocabulary exceeds its tokenizer's by less: it is rounded up to a size that suits the hardware.
# vLLM takes a bias for so many words of a request.
MOST_SPARE_TOKENS = 1024


class VLLMEngine(Engine):
    """Sample with vLLM workers that hold copies of the teacher, and keep those copies up to date.

    The seed of a request decides what it samples, whichever worker gets it. A worker that dies, hangs or
    sends garbage ends the sampling of all. It is restarted if it was launched, else waited for; all workers
    get the current weights again, and sample what is missing. A second loss meanwhile ends the run.

    Args:
        urls: Workers that run already, such as [http://127.0.0.1:8000]. Name these or `launch`.
        launch: Workers to start and to stop.
        push: How weights travel; None: IPCPush() to launched workers on a machine with GPUs, else GlooPush().
            A running worker must name its `backend` in --weight-transfer-config. NoPush: they do not travel,
            and any vLLM server will do.
        log_probs: worker: use the workers' log-probs, which must be those of sampling (--logprobs-mode
            processed_logprobs, checked at the start; a worker of NoPush without a trainer may report others,
            which are not used). trainer: use only log-probs that the trainer computes.
        api_key_env: Environment variable that holds the workers' API key, if they ask for one.
        max_sequences: Completions in flight at one worker, at most.
        request_timeout_s: Deadline of a request, from sending to its last token.
        call_timeout_s: Deadline of every other call; a worker that takes longer to show a sign of life is
            lost.
        recovery_timeout_s: How long to wait for workers that run already.
        sleep: Let workers share the GPUs that train: they sleep, without weights, from a step's last
            completion to the next push. They need --enable-sleep-mode, and must fit into the GPU memory that
            training leaves free between two steps (--gpu-memory-utilization).
    """

    def __init__(
        self,
        urls: list[str] | None = None,
        launch: Launch | None = None,
        push: WeightPush | None = None,
        log_probs: Literal["worker", "trainer"] = "worker",
        api_key_env: str = "VLLM_API_KEY",
        max_sequences: int = 256,
        request_timeout_s: float = 3600.0,
        call_timeout_s: float = 60.0,
        recovery_timeout_s: float = 600.0,
        sleep: bool = False,
    ) -> None:
        on_gpus = launch is not None and torch.cuda.is_available()
        self.push = push or (IPCPush() if on_gpus else GlooPush())
        self.keeps_weights = self.push.backend is None  # workers keep the weights they loaded
        if self.keeps_weights and sleep:
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
        run_id, served_model = uuid4().hex[:8], None  # None: the first that a running worker lists
        if launch is not None:
            urls = [f"http://{LOOPBACK}:{find_free_port()}" for _ in range(launch.num_workers)]
            # A name of this run, so that no other server on the port is taken for ours.
            served_model = f"teacher-{run_id}"
        api_key = read_api_key(api_key_env)
        workers = [Worker(url, served_model, api_key, self.keeps_weights) for url in urls or []]
        self.fleet = Fleet(workers, self.push, run_id, launch, sleep, call_timeout_s, recovery_timeout_s)
        self.takes_turns = sleep
        self.reports_log_probs = log_probs == "worker"
        self.max_sequences = max_sequences
        self.request_timeout_s = request_timeout_s
        self.tokenizer: Any = None
        self.eos_token_ids: set[int] = set()  # which the workers are told
        self.end_token_ids: Container[int] = set()  # with which they may end a completion
        self.spare: dict[str, float] = {}  # bias against the rows that no token has

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Return the optimizer steps of the weights of all workers; -1 if they need a push."""
        return self.fleet.policy_version

    @property
    def unverified(self) -> bool:  # type: ignore[override]
        """Tell whether a worker has come, or come back, since the last verification."""
        return not self.fleet.verified

    @property
    def max_model_len(self) -> int:  # type: ignore[override]
        """Return the tokens of prompt and completion that every worker takes."""
        return min(worker.max_model_len for worker in self.fleet.workers)

    # Start and stop

    def load_own_model(self, name: str) -> bool:
        """Let launched workers load the model `name`, unless the launch names one; with NoPush only."""
        launch = self.fleet.launch
        if self.keeps_weights and launch is not None and launch.model is None:
            self.fleet.launch = replace(launch, model=resolve(name))
        return self.keeps_weights

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Start the workers that are to be launched, and wait until every worker answers.

        With NoPush, `model` may be None. Completions then end where the worker's model ends them, and
        carry log-probs only from a worker that reports those of sampling.
        """
        if self.fleet.started:
            return
        self.tokenizer = tokenizer
        if model is None:
            self._serve_without_trainer()
        else:
            self.end_token_ids = self.eos_token_ids = find_eos_token_ids(model, tokenizer)
            num_rows = int(model.config.get_text_config().vocab_size)
            self.num_ids = self.num_ids or num_rows
            self.spare = {str(number): -100.0 for number in range(self.num_ids, num_rows)}
            if len(self.spare) > MOST_SPARE_TOKENS:
                raise InputError(
                    f"At most {MOST_SPARE_TOKENS} rows of a model that vLLM serves may have no token, but "
                    f"{len(self.spare)} have none. Cut them off with resize_token_embeddings."
                )
            dtypes = {parameter.dtype for parameter in model.parameters()}
            self.fleet.trainer_dtypes = {str(dtype).removeprefix("torch.") for dtype in dtypes}
        name = "" if model is None else model.name_or_path
        try:
            self.fleet.start(name, folder / "workers")
        except BaseException:
            self.close()
            raise

    def _serve_without_trainer(self) -> None:
        """Get ready to take the workers' weights as they are."""
        assert self.keeps_weights
        self.fleet.without_trainer = True
        # The worker's model may end with another special token than the tokenizer's, and its vocabulary be
        # rounded up.
        self.end_token_ids = {self.tokenizer.eos_token_id, *self.tokenizer.added_tokens_decoder}
        self.num_ids = len(self.tokenizer) + MOST_SPARE_TOKENS

    def close(self) -> None:
        """Leave the workers' groups and stop the workers that were launched."""
        self.push.close()
        self.fleet.close()

    # Workers and their weights

    def health(self) -> None:
        """Look after every worker; bring back what was lost."""
        self.fleet.health()

    def put_to_sleep(self) -> None:
        """Put all workers to sleep, if they share the GPUs that train."""
        self.fleet.put_to_sleep()

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Wake all workers and push to them. If one fails, all need another push when it is back."""
        self.fleet.push(named_tensors, policy_version)

    def gather_weights(self, named_tensors: list[NamedTensor]) -> None:
        """Gather in step with rank 0, if it gathers anything."""
        if self.keeps_weights:
            return
        for _ in gather_in_groups(named_tensors, self.push.bucket_bytes):
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
        assert self.num_ids is not None
        brings: list[range] = []  # indices of the completions that each call brings
        first = 0
        for request in requests:
            limit = request.limit(sampling)
            require_context(len(request.prompt) + limit, self.max_model_len)
            limited = replace(sampling, max_completion_length=limit)
            group = range(first, first + request.num_completions)
            first = group.stop
            # Greedy completions are all alike, and vLLM refuses several.
            drawn: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
            parts = [range(i, i + 1) for i in group] if sampling.temperature > 0 else [group]
            for part, seed in zip(parts, request.seeds, strict=False):
                calls.append(
                    CompletionRequest(
                        prompt=request.prompt,
                        sampling=limited,
                        watcher=watcher,
                        end_token_ids=self.end_token_ids,
                        num_ids=self.num_ids,
                        logit_bias=self.spare,
                        seed=seed,
                        group_size=request.num_completions,
                        drawn=drawn,
                    )
                )
                brings.append(part)
        if self.policy_version < 0:
            raise WorkersLost("The vLLM workers need a push before they sample.")
        try:
            for call, completion in iterate(self._complete_all(calls)):
                for index in brings[call]:
                    yield index, completion
        except WorkerError as error:
            self.fleet.lose(error)
            raise WorkersLost(str(error)) from error
        self.fleet.losses = 0

    async def _complete_all(self, requests: list[CompletionRequest]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield each request's number and completion as it is finished; raise the first error.

        A worker samples `max_sequences` at a time, and gets the next request when one is finished.
        """
        waiting = deque(enumerate(requests))
        arrived: asyncio.Queue[tuple[int, Completion] | Exception] = asyncio.Queue()

        async def serve(worker: Worker) -> None:
            while waiting:
                number, request = waiting.popleft()
                arrived.put_nowait((number, await self._complete(worker, request)))

        async def report(work: Coroutine[Any, Any, None]) -> None:
            try:
                await work
            except Exception as error:  # raised below
                arrived.put_nowait(error)

        workers = self.fleet.workers
        num_calls = min(self.max_sequences, -(-len(requests) // len(workers)))
        works = [serve(worker) for _ in range(num_calls) for worker in workers]  # they take requests in turn
        tasks = [asyncio.create_task(report(work)) for work in (*works, self.fleet.watch())]
        try:
            for _ in requests:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, worker: Worker, request: CompletionRequest) -> Completion:
        """Sample one request.

        Raises:
            WorkerError: If the worker is lost or late, ignores the seed, or refuses the request.
        """
        completion = await worker.complete(request, self.request_timeout_s)
        await self.fleet.require_current(worker)
        known = self.reports_log_probs and (worker.exact or not self.fleet.without_trainer)
        if known:
            request.require_own_draw(completion)
        if request.sampling.truncates or not known:
            return replace(completion, log_probs=None)
        return completion
