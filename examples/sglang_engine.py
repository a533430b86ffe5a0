"""Sample with a running SGLang server over HTTP; weights go through a folder that the server must see too.

    start, health    GET /v1/models, /health, /model_info: whether it serves, and which weights
    update_weights   safetensors files ─▶ POST /update_weights_from_disk
    sample, verify   POST /generate: token ids in and out, one request for each completion

The routes were read in the source of SGLang 0.5: tests use a pretended server, no real one was tried. A
failure ends the run with one line; a server restarted between two steps gets the weights again. Leave
SGLANG_RETURN_ORIGINAL_LOGPROB unset. Seeds need --enable-deterministic-inference.
Run: PYTHONPATH=examples rlt fit --config laptop/rlt --config sglang.yaml, a file with the line
rollouts: {engine: {class_path: sglang_engine.SGLangEngine, init_args: {url: "http://127.0.0.1:30000"}}}
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from rlt_lightning.engines import Engine, EngineError, SampleRequest, Sampling
from rlt_lightning.engines.base import AGREEMENT, find_disagreement
from rlt_lightning.engines.client import load_certificates
from rlt_lightning.engines.threads import iterate, run_coroutine
from rlt_lightning.models.template import find_eos_token_ids
from rlt_lightning.models.weights import NamedTensor, gather_in_groups, write_weights
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion


class SGLangEngine(Engine):
    """Sample with one SGLang server.

    Args:
        url: Its address.
        request_timeout_s: Deadline of a completion, with its time in the server's queue.
        call_timeout_s: Deadline of every other call.
    """

    reports_log_probs = True

    def __init__(self, url: str, request_timeout_s: float = 3600.0, call_timeout_s: float = 300.0) -> None:
        self.url, self.request_timeout_s, self.call_timeout_s = url, request_timeout_s, call_timeout_s

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Ask for the context length."""
        self.model, self.tokenizer, self.folder = model, tokenizer, (folder / "weights").resolve()
        self.end_token_ids = find_eos_token_ids(model, tokenizer)
        self.max_model_len = self.ask("/v1/models", None, lambda r: int(r.json()["data"][0]["max_model_len"]))

    def health(self) -> None:
        """Find out whether the server samples, and has the weights still."""
        self.ask("/health", None, lambda r: r)
        version = self.ask("/model_info", None, lambda r: r.json()["weight_version"])
        if version != str(self.policy_version):
            self.policy_version, self.unverified = -1, True

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Write a folder, let the server load it, and delete it."""
        target = self.folder / f"step={policy_version}"
        target.mkdir(parents=True, exist_ok=True)
        write_weights(named_tensors, target)
        self.model.config.save_pretrained(target)
        body = {"model_path": str(target), "weight_version": str(policy_version), "abort_all_requests": True}
        self.ask("/update_weights_from_disk", body, lambda r: r)
        self.policy_version = policy_version
        shutil.rmtree(target)

    def gather_weights(self, named_tensors: list[NamedTensor]) -> None:
        """Gather tensor by tensor, as `write_weights` does."""
        list(gather_in_groups(named_tensors, group_bytes=1))  # emptied as they come

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Compare the server's log-probs of a text with the trainer's."""
        body = {"input_ids": token_ids, "return_logprob": True, "logprob_start_len": 0}
        body["sampling_params"] = {"max_new_tokens": 1, "temperature": 1.0}

        def compare(response: httpx2.Response) -> str | None:
            entries = response.json()["meta_info"]["input_token_logprobs"][1:]
            return find_disagreement([float(e[0]) for e in entries], log_probs, AGREEMENT["bfloat16"])

        if problem := self.ask("/generate", body, compare):
            raise EngineError(f"SGLang at {self.url} must have the trainer's weights, but {problem}")
        self.unverified = False

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """Send all requests at once: the server queues them."""
        watcher = StopWatcher(self.tokenizer, stop, self.end_token_ids)
        calls = [(request, seed) for request in requests for seed in request.seeds]
        work = [self.complete(i, *call, sampling, watcher) for i, call in enumerate(calls)]
        yield from iterate(run_together(work))

    async def complete(
        self, index: int, request: SampleRequest, seed: int, sampling: Sampling, watcher: StopWatcher
    ) -> tuple[int, Completion]:
        """Return a completion with its index."""
        limit, params = request.limit(sampling), dict(vars(sampling))
        del params["max_completion_length"]
        params |= {"top_k": sampling.top_k or -1, "max_new_tokens": limit, "sampling_seed": seed}
        num_rows = self.model.config.get_text_config().vocab_size
        spare = range(self.num_ids or num_rows, num_rows)  # rows without a token
        params |= {"logit_bias": {str(number): -100.0 for number in spare}}
        params |= {"stop": watcher.stop or None, "stop_token_ids": sorted(self.end_token_ids)}

        def read(response: httpx2.Response) -> tuple[int, Completion]:
            meta = response.json()["meta_info"]
            token_ids = [entry[1] for entry in meta["output_token_logprobs"]]
            log_probs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
            if not all(-9999.0 < value <= 1e-4 for value in log_probs):
                raise ValueError("log-probs that no sampled token has")
            reason = watcher.finish_reason(token_ids)
            if meta["weight_version"] != str(self.policy_version):
                raise ValueError("a completion of other weights")
            if meta["finish_reason"]["type"] == "abort" or (reason == "length" and len(token_ids) != limit):
                raise ValueError("a completion without its end")
            return index, Completion(token_ids, log_probs, reason, seed, self.url)

        body = {"input_ids": request.prompt, "sampling_params": params, "return_logprob": True}
        return await self.call("/generate", body, read, self.request_timeout_s)

    def ask(self, path: str, body: Any, read: Callable[..., Any]) -> Any:
        """Make a call from code that is no coroutine."""
        return run_coroutine(self.call(path, body, read, self.call_timeout_s))

    async def call(self, path: str, body: Any, read: Callable[..., Any], deadline_s: float) -> Any:
        """Return what `read` makes of the answer."""
        try:
            client = httpx2.AsyncClient(timeout=None, trust_env=False, verify=load_certificates())
            async with asyncio.timeout(deadline_s), client:
                response = await client.request("POST" if body else "GET", self.url + path, json=body)
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {response.text[:300]}")
            return read(response)
        except (TimeoutError, httpx2.HTTPError, LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"SGLang at {self.url} must answer {path} within {deadline_s:g} s as version 0.5 does, but "
                f"there was {error!r:.400}. Look at its log."
            ) from error


async def run_together(work: Sequence[Coroutine[Any, Any, Any]]) -> AsyncIterator[Any]:
    """Yield results as they come; the first failure cancels all others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for waiting in tasks:
            waiting.cancel()
