"""The base class of user-written engines whose servers have weights of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlt_lightning.engines.base import (
    AGREEMENT,
    Engine,
    EngineError,
    NamedTensor,
    SampleRequest,
    Sampling,
    find_disagreement,
    require_context,
)
from rlt_lightning.models.template import find_eos_token_ids
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion, InputError


class ServedEngine(Engine):
    """An `Engine` whose server has weights of its own: for `rlt predict` and `rlt test` with a trained model.

    A subclass writes `complete`, which is called from several threads, and `score`; it may learn
    `max_model_len` in `start`. The server's log-probs are not used: the trainer computes its own.

    Args:
        url: Address of the server, for messages and records.
        max_requests: Completions in flight at a time.
    """

    def __init__(self, url: str, max_requests: int = 8) -> None:
        self.url = url.rstrip("/")
        self.max_requests = max_requests
        self.tokenizer: Any = None
        self.eos_ids: set[int] = set()
        self.vocab_size = 0

    @abstractmethod
    def complete(self, prompt: list[int], sampling: Sampling, stop: str, seed: int) -> Completion:
        """Sample one completion, and return or raise an EngineError within a deadline.

        Args:
            prompt: Token ids.
            sampling: Settings with the token limit of this completion.
            stop: The end tag. Send it only to a server that returns the tag's tokens: `sample` cuts.
            seed: A number that a signed 64-bit integer holds, at least 0.

        Returns:
            The token ids as they were sampled, and the finish reason: `length`, or `eos` where the server has
            ended the completion, with or without its end-of-sequence token.
        """

    @abstractmethod
    def score(self, token_ids: list[int]) -> list[float]:
        """Return log-probs of all tokens of a text but the first at temperature 1, nats, for `verify`."""

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Keep the tokenizer and the teacher's vocabulary, by which answers are checked."""
        self.tokenizer = tokenizer
        self.eos_ids = find_eos_token_ids(model, tokenizer)
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample` and, for the seeds, `SampleRequest.seeds`."""
        calls = []
        for request in requests:
            limit = request.limit(sampling)
            require_context(len(request.prompt) + limit, self.max_model_len)
            one = replace(sampling, max_completion_length=limit)
            calls += [(request.prompt, one, stop, seed) for seed in request.seeds]
        watcher = StopWatcher(self.tokenizer, stop, self.eos_ids)

        def complete(call: tuple[list[int], Sampling, str, int]) -> Completion:
            return replace(
                self.cut_at_end(self.complete(*call), call[1], watcher), seed=call[3], worker=self.url
            )

        with ThreadPoolExecutor(self.max_requests) as threads:
            futures = {threads.submit(complete, call): index for index, call in enumerate(calls)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:  # the first error drops the calls that have not begun
                for future in futures:
                    future.cancel()

    def cut_at_end(self, completion: Completion, sampling: Sampling, watcher: StopWatcher) -> Completion:
        """Cut a completion behind the token that ends it, and say which kind of end that is.

        Raises:
            EngineError: If its tokens cannot be those that were sampled.
        """
        ids, limit = list(completion.token_ids), sampling.max_completion_length
        if not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in ids):
            raise self.error("token ids of the teacher's vocabulary", f"{ids[:20]}")
        if len(ids) > limit:
            raise self.error(f"{limit} tokens at most", f"{len(ids)}")
        for end in range(1, len(ids) + 1):
            reason = watcher.finish_reason(ids[max(0, end - watcher.window) : end])
            if reason != "length":
                return Completion(ids[:end], None, reason)
        # The server has sampled an end-of-sequence token and left it out of its answer.
        if completion.finish_reason == "eos":
            if len(self.eos_ids) != 1:
                raise self.error(
                    "the end-of-sequence token of a completion that it has ended",
                    f"none, and the teacher has {len(self.eos_ids)}",
                )
            ids += self.eos_ids
        if not ids:
            raise self.error("a token", "none")
        return Completion(ids, None, completion.finish_reason)

    def error(self, expected: str, found: str) -> EngineError:
        """Return the error for an answer of the server that is not what it must be."""
        return EngineError(
            f"{type(self).__name__}: {self.url} must send {expected}, but sent {found}. Let it serve the "
            "teacher with its own tokenizer, and look at its log."
        )

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Refuse weights that have changed since the first call; none are sent."""
        if self.policy_version not in (-1, policy_version):
            raise InputError(
                f"{type(self).__name__} leaves the server the weights that it serves, but the trainer's have "
                "changed. Train with rlt_lightning.engines.HFEngine or VLLMEngine."
            )
        self.policy_version = policy_version

    def gather_weights(self, named_tensors: list[NamedTensor]) -> None:
        """Gather nothing, since `update_weights` sends nothing."""

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Compare the server's log-probs of a text with the trainer's: it may serve another model."""
        scores = self.score(token_ids)
        if len(scores) != len(token_ids) - 1 or not all(isinstance(score, float) for score in scores):
            raise self.error(f"log-probs of {len(token_ids) - 1} tokens", f"{scores!r:.200}")
        if fault := find_disagreement(scores, log_probs, AGREEMENT["bfloat16"]):
            raise EngineError(
                f"{type(self).__name__}: {self.url} must serve the teacher that is loaded here, but {fault} "
                "Let it serve that one, or set model.teacher to what it serves."
            )

    def close(self) -> None:
        """Accept whatever weights the next trainer has."""
        self.policy_version = -1
