"""One vLLM worker over HTTP: every call has a deadline, and every failure says where, what and what to do."""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2

from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.types import Completion, FinishReason, InputError
from rlt_lightning.version import VLLM_MINORS, get_minor

ADDRESS = r"https?://[^@/]+/?"  # of a server, without user and path: messages show it
JSON = dict[str, Any]


class WorkerError(EngineError):
    """A call to a worker failed. `retryable`: the same request may succeed later, or elsewhere."""

    def __init__(self, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(frozen=True)
class CompletionRequest:
    """One completion of a prompt."""

    prompt: list[int]
    sampling: Sampling
    stop: str
    eos_token_ids: tuple[int, ...]  # in addition to those that the server knows
    vocab_size: int
    seed: int


class WorkerClient:
    """The routes of one `vllm serve`, with token ids in and out; they tell how it was set up.

    Args:
        url: Address of the server, such as http://127.0.0.1:8000.
        model: The name that it serves; None: the first that it lists.
        api_key: Sent as a bearer token, if any.
        own_weights: Whether it may lack the routes of VLLM_SERVER_DEV_MODE, as it serves weights of its own.
    """

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, own_weights: bool = False
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.api_key = api_key
        self.own_weights = own_weights
        self.adapter: str | None = None  # name of the LoRA that it samples with, if any
        self.incarnation = 0  # counts its restarts and broken pushes: connections of an earlier one are void
        self.num_ranks = 1  # model workers behind the server
        self.version = ""  # of vLLM; known once it was described
        self.dtype = "float32"  # of its weights
        self.exact = (
            False  # whether a worker with weights of its own reports log-probs at the sampling temperature
        )

    @property
    def sampled_model(self) -> str | None:
        """Return the name that requests use: the adapter's, if there is one, or the model's."""
        return self.adapter or self.model

    async def call(
        self, method: str, path: str, body: JSON | None, deadline_s: float, in_words: bool = False
    ) -> JSON:
        """Make one call and return the decoded answer; for an empty answer, or text, an empty dictionary.

        Raises:
            WorkerError: On a refused or broken connection, a missed deadline, an error status or an answer
                that is no JSON.
        """
        place = f"vLLM worker {self.url}: {method} {path}"
        try:
            async with asyncio.timeout(deadline_s), self._http() as http:
                response = await http.request(method, self.url + path, json=body)
        except TimeoutError as error:
            raise WorkerError(
                f"{place} must be answered within {deadline_s:g} s, but was not. Look at the worker's log; "
                "raise the deadline if it is only slow.",
                retryable=True,
            ) from error
        except httpx2.HTTPError as error:
            raise WorkerError(
                f"{place} failed ({type(error).__name__}: {error}). Check that the worker runs and that its "
                "address is right.",
                retryable=True,
            ) from error
        except httpx2.InvalidURL as error:
            raise WorkerError(
                f"{place} has no valid address ({error}). Correct it.", retryable=False
            ) from error
        if response.status_code >= 400:
            raise build_refusal(place, response)
        try:
            answer = response.json() if response.content and not in_words else {}
        except ValueError as error:
            raise WorkerError(
                f"{place} must answer in JSON, but sent {response.content[:80]!r}. Is this a vLLM server?",
                retryable=True,
            ) from error
        if not isinstance(answer, dict):
            raise WorkerError(
                f"{place} must answer with a JSON object, but sent {answer!r:.80}.", retryable=True
            )
        return answer

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every call."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=self.headers, timeout=None, verify=load_certificates(), trust_env=False
        )

    async def probe(self, deadline_s: float) -> str | None:
        """Ask server, engine and model workers for a sign of life; return the version of their weights.

        A worker with weights of its own is asked only for its health. It does not tell a version, so None is
        returned.
        """
        if self.own_weights:
            await self.call("GET", "/health", None, deadline_s)
            return None
        _, _, answer = await asyncio.gather(
            self.call("GET", "/health", None, deadline_s),
            self.call("POST", "/collective_rpc", {"method": "check_health"}, deadline_s),
            self.call("GET", "/weight_info", None, deadline_s),
        )
        return str(answer.get("weight_version"))  # of the last finished push; "default" before the first

    async def require_unpaused(self, deadline_s: float) -> None:
        """Raise WorkerError if the worker holds its requests, as only a push may let it do.

        A worker may obey the pause of a push that gave up waiting after the next push has resumed it. It is
        alive then, but its requests would wait for ever. A worker with weights of its own is not asked: it is
        pushed nothing.
        """
        if self.own_weights:
            return
        answer = await self.call("GET", "/is_paused", None, deadline_s)
        with self.require_form(answer, "whether it is paused"):
            paused = bool(answer["is_paused"])
        if paused:
            raise WorkerError(
                f"vLLM worker {self.url} must sample, but is paused. It serves again after the next push. Is "
                "it paused from elsewhere, or is its push's timeout_s too short?",
                retryable=True,
            )

    async def fetch_context(self, deadline_s: float) -> int:
        """Return the tokens of prompt and completion that the model takes; remember the model's name."""
        answer = await self.call("GET", "/v1/models", None, deadline_s)
        with self.require_form(answer, "a list of models"):
            models = {entry["id"]: int(entry.get("max_model_len") or sys.maxsize) for entry in answer["data"]}
        if not models or (self.model is not None and self.model not in models):
            raise WorkerError(
                f"vLLM worker {self.url} must serve the model '{self.model}', but serves "
                f"{', '.join(models) or 'none'}. Correct the engine's served_model, or the worker's "
                "--served-model-name.",
                retryable=False,
            )
        self.model = self.model or next(iter(models))
        return models[self.model]

    async def describe(self, deadline_s: float, sleeps: bool = False) -> None:
        """Ask for the number of model workers (tensor, pipeline and data parallel) and the data type.

        A worker with weights of its own does not tell; it is asked what its log-probs are.

        Raises:
            WorkerError: Also if the worker is to sleep, but would keep its memory.
        """
        if self.own_weights:
            self.dtype = "unknown"
            self.exact = await self.reports_sampled_log_probs(0, deadline_s)
            return
        answer = await self.call("GET", "/version", None, deadline_s)
        with self.require_form(answer, "its version", retryable=False):
            self.version = str(answer["version"])
        if get_minor(self.version) not in VLLM_MINORS:
            raise WorkerError(
                f"vLLM worker {self.url} must be vLLM {' or '.join(VLLM_MINORS)}, but is {self.version}: our "
                "extension uses parts of vLLM that change. Install one of these.",
                retryable=False,
            )
        answer = await self.call("GET", "/get_world_size", None, deadline_s)
        with self.require_form(answer, "its world_size"):
            self.num_ranks = int(answer["world_size"])
        answer = await self.call("GET", "/server_info?config_format=json", None, deadline_s)
        with self.require_form(answer, "its vllm_config"):
            config = answer["vllm_config"]
            self.dtype = config["model_config"]["dtype"].removeprefix("torch.")
            frees = not sleeps or config["model_config"]["enable_sleep_mode"] or runs_on_cpu(config)
        if not frees:
            raise WorkerError(
                f"vLLM worker {self.url} must free its memory when it sleeps, but would not. Start it with "
                "--enable-sleep-mode (launch.arguments), or set the engine's sleep to false.",
                retryable=False,
            )

    async def reports_sampled_log_probs(self, token_id: int, deadline_s: float) -> bool:
        """Return whether log-probs are those of sampling (--logprobs-mode processed_logprobs).

        If only one token is allowed, it is sampled with probability 1: its processed log-prob is 0, its raw
        one is not.
        """
        body: JSON = {
            "model": self.sampled_model,
            "prompt": [token_id],
            "max_tokens": 1,
            "logprobs": 0,
        }
        body |= {"allowed_token_ids": [token_id], "temperature": 0.5, "seed": 0}
        answer = await self.call("POST", "/v1/completions", body, deadline_s)
        with self.require_form(answer, "a log-prob"):
            log_prob = float(answer["choices"][0]["logprobs"]["token_logprobs"][0])
        return log_prob == 0.0

    async def complete(self, request: CompletionRequest, deadline_s: float) -> Completion:
        """Sample a request's completion. Its log-probs are as the worker reports them."""
        sampling = request.sampling
        body = {
            "model": self.sampled_model,
            "prompt": request.prompt,
            "seed": request.seed,
            "max_tokens": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": [request.stop] if request.stop else [],
            "stop_token_ids": list(request.eos_token_ids),
            "skip_special_tokens": False,  # the end tag may be one
            "logprobs": 0,  # only of the sampled token
            "return_token_ids": True,
        }
        answer = await self.call("POST", "/v1/completions", body, deadline_s)
        with self.require_form(answer, "a completion with token ids and log-probs"):
            completion = parse_completion(answer, request, self.url)
        return completion

    async def score(self, token_ids: list[int], deadline_s: float) -> list[float]:
        """Return log-probs of all tokens but the first, by the worker's weights at temperature 1, nats."""
        body = {
            "model": self.sampled_model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        answer = await self.call("POST", "/v1/completions", body, deadline_s)
        with self.require_form(answer, "a log-prob of every token"):
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(entries, token_ids[1:], strict=True)
            scores = [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        return scores

    @contextmanager
    def require_form(self, answer: JSON, expected: str, retryable: bool = True) -> Iterator[None]:
        """Turn what goes wrong in reading an answer into a WorkerError that shows it."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise WorkerError(
                f"vLLM worker {self.url} must send {expected}, but sent {json.dumps(answer):.200} "
                f"({type(error).__name__}: {error}). Check that it is vLLM {' or '.join(VLLM_MINORS)}.",
                retryable=retryable,
            ) from error


def runs_on_cpu(config: JSON) -> bool:
    """Return whether a vLLM runs on a CPU, where it has no --enable-sleep-mode and sleep frees nothing."""
    return "cpu" in str(config["device_config"])


def parse_completion(answer: JSON, request: CompletionRequest, url: str) -> Completion:
    """Read the only choice of an answer.

    Raises:
        ValueError: If it is not what was asked for; KeyError and TypeError where parts are missing.
    """
    [choice] = answer["choices"]
    token_ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    limit = request.sampling.max_completion_length
    if not 1 <= len(token_ids) <= limit or len(log_probs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} token ids and {len(log_probs)} log-probs")
    if not all(isinstance(token, int) and 0 <= token < request.vocab_size for token in token_ids):
        raise ValueError("token ids that are not in the vocabulary")
    if not all(math.isfinite(value) and value <= 1e-3 for value in log_probs):
        raise ValueError("log-probs that are none")
    return Completion(
        token_ids, log_probs, parse_finish_reason(choice, request), seed=request.seed, worker=url
    )


def parse_finish_reason(choice: JSON, request: CompletionRequest) -> FinishReason:
    """Tell end tag, end-of-sequence token and token limit apart."""
    reason, detail = choice["finish_reason"], choice.get("stop_reason")
    if reason == "length":
        return "length"
    if reason == "stop" and request.stop and detail == request.stop:
        return "stop"
    if reason == "stop" and (detail is None or isinstance(detail, int)):  # one of ours, or the server's own
        return "eos"
    raise ValueError(f"finish_reason {reason!r}, stop_reason {detail!r}")  # an aborted request, for one


def build_refusal(place: str, response: httpx2.Response) -> WorkerError:
    """Return the error of a status: 5xx and overload may pass, anything else is the request's fault."""
    status, reason = response.status_code, response.text.strip().replace("\n", " ")[:300]
    advice = "Correct the request's settings."
    if status in (401, 403):
        advice = "Put the server's key into the environment variable that the engine's api_key_env names."
    elif status == 404:
        minors = " or ".join(VLLM_MINORS)
        advice = f"The worker must be vLLM {minors}, started with VLLM_SERVER_DEV_MODE=1 in its environment."
    elif status >= 500:
        advice = "Look at the worker's log."
    return WorkerError(
        f"{place} was refused with status {status} ({reason}). {advice}",
        retryable=status >= 500 or status in (408, 429),
    )


def read_api_key(variable: str) -> str:
    """Return the API key in an environment variable; empty if there is none.

    Raises:
        InputError: If no header can carry it.
    """
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable():
        raise InputError(f"The key in {variable} must be printable ASCII, but is not. Correct it.")
    return key


@cache
def load_certificates() -> ssl.SSLContext:
    """Read the system's certificates once: it takes longer than most calls."""
    return ssl.create_default_context()
