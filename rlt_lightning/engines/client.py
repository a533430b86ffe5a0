"""Call one vLLM worker over HTTP: with deadlines, and errors that say where, what and what to do."""

from __future__ import annotations

import asyncio
import math
import os
import reprlib
import ssl
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2

from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion, FinishReason, InputError
from rlt_lightning.worker import VLLM_MINORS

ADDRESS = r"https?://[^@/]+/?"  # of a server, without user and path: messages show it
JSON = dict[str, Any]
# Log-probability, nats, of equal completions below which they are no chance: 4e-18.
SMALLEST_CHANCE = -40.0
LARGEST_LOG_PROB = 1e-4  # float32 rounds 0 up to 1e-6
# vLLM writes this for minus infinity, which JSON does not know.
INFINITE_LOG_PROB = -9999.0


class WorkerError(EngineError):
    """A call to a worker failed.

    Args:
        message: What failed.
        retryable: Whether the same request may succeed later, or elsewhere.
        refused: Whether the worker answered with an error status.
    """

    def __init__(self, message: str, retryable: bool, refused: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.refused = refused


@dataclass(frozen=True)
class CompletionRequest:
    """One completion of a prompt.

    `drawn` has the tokens of the prompt's completions with the seeds that drew them; its requests share it.
    """

    prompt: list[int]
    sampling: Sampling
    watcher: StopWatcher  # of the end tag, and of end tokens in addition to those that the server knows
    end_token_ids: Container[int]  # all tokens with which the server may end it
    num_ids: int
    logit_bias: JSON  # keeps it from words beyond these, by number
    seed: int
    group_size: int
    drawn: defaultdict[tuple[int, ...], set[int]]

    def require_own_draw(self, completion: Completion) -> None:
        """Raise WorkerError if more seeds draw the same tokens than chance explains.

        That k certain ones of G completions are alike has probability exp((k - 1) sum_t l_t), with the
        log-probs l_t of their tokens; that any k are, C(G, k) times that at most. A certain text has 1.

        Args:
            completion: With the log-probs of sampling.
        """
        seeds = self.drawn[tuple(completion.token_ids)]
        seeds.add(self.seed)
        chance = math.log(math.comb(self.group_size, len(seeds)))
        chance += (len(seeds) - 1) * sum(completion.log_probs or [])
        if len(seeds) > 1 and chance < SMALLEST_CHANCE:
            raise WorkerError(
                f"vLLM worker {completion.worker} must sample by the seed, but drew the same "
                f"{len(completion.token_ids)} tokens for {len(seeds)} seeds, which chance does once in "
                f"1e{-chance / math.log(10):.0f} times. Is a cache between trainer and worker?",
                retryable=False,
            )


class WorkerClient:
    """The routes of one `vllm serve`, with token ids in and out; they tell how it was set up.

    Args:
        url: Address of the server, such as http://127.0.0.1:8000.
        model: The name that it serves; None: the first that it lists.
        api_key: Sent as a bearer token, if any.
        keeps_weights: Whether nobody pushes to it, and it may lack the routes of VLLM_SERVER_DEV_MODE.
    """

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, keeps_weights: bool = False
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.api_key = api_key
        self.keeps_weights = keeps_weights
        self.num_ranks = 1  # model workers behind the server
        self.dtype = "float32"  # of its weights
        # Whether a worker that nobody pushes to reports log-probs at the sampling temperature.
        self.exact = False

    async def call(self, method: str, path: str, body: JSON | None, deadline_s: float) -> JSON:
        """Make one call and return the decoded answer; for an empty answer, an empty dictionary.

        Args:
            method: GET or POST.
            path: The route.
            body: Sent as JSON; None: nothing.
            deadline_s: Time until the whole answer must be here.

        Raises:
            WorkerError: On a refused or broken connection, a missed deadline, an error status, or an answer
                that is no JSON object.
        """
        name = f"vLLM worker {self.url}: {method} {path}"
        try:
            async with asyncio.timeout(deadline_s), self._http() as http:
                response = await http.request(method, self.url + path, json=body)
        except TimeoutError as error:
            raise WorkerError(
                f"{name} must be answered within {deadline_s:g} s, but was not. Look at the worker's log; "
                "raise the deadline if it is only slow.",
                retryable=True,
            ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise WorkerError(
                f"{name} failed ({type(error).__name__}: {error}). Check that the worker runs and that its "
                "address is right.",
                retryable=True,
            ) from error
        if response.status_code >= 400:
            raise build_refusal(name, response.status_code, response.text)
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = response.text
        if not isinstance(answer, dict):
            raise WorkerError(
                f"{name} must answer with a JSON object, but sent {reprlib.repr(answer)}.", retryable=True
            )
        return answer

    def _http(self) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx2.AsyncClient(headers=headers, timeout=None, verify=load_certificates(), trust_env=False)

    async def probe(self, deadline_s: float) -> str | None:
        """Ask server, engine and model workers for a sign of life; return the version of their weights.

        A worker that nobody pushes to is asked only for its health. It does not tell a version, so None is
        returned.
        """
        if self.keeps_weights:
            await self.call("GET", "/health", None, deadline_s)
            return None
        _, _, answer = await asyncio.gather(
            self.call("GET", "/health", None, deadline_s),
            self.call("POST", "/collective_rpc", {"method": "check_health"}, deadline_s),
            self.call("GET", "/weight_info", None, deadline_s),
        )
        return str(answer.get("weight_version"))  # of the last finished push; "default" before the first

    async def fetch_context(self, deadline_s: float) -> int:
        """Return the tokens of prompt and completion that the model takes; remember the model's name."""
        answer = await self.call("GET", "/v1/models", None, deadline_s)
        with self.require_form(answer, "a list of models"):
            models = {
                str(entry["id"]): int(entry.get("max_model_len") or sys.maxsize) for entry in answer["data"]
            }
        if not models or (self.model is not None and self.model not in models):
            raise WorkerError(
                f"vLLM worker {self.url} must serve the model '{self.model}', but serves "
                f"{', '.join(models) or 'none'}: it is another run's. Start again.",
                retryable=False,
            )
        self.model = self.model or next(iter(models))
        return models[self.model]

    async def describe(self, deadline_s: float, sleeps: bool = False) -> None:
        """Ask for the number of model workers (tensor, pipeline and data parallel) and the data type.

        A worker that nobody pushes to does not tell; it is asked what its log-probs are.

        Raises:
            WorkerError: Also if the worker is to sleep, but would keep its memory.
        """
        if self.keeps_weights:
            self.dtype = "unknown"
            self.exact = await self.reports_sampled_log_probs(0, deadline_s)
            return
        answer = await self.call("GET", "/get_world_size", None, deadline_s)
        with self.require_form(answer, "its world_size"):
            self.num_ranks = int(answer["world_size"])
        # Not /server_info: it runs nvidia-smi and `pip list`, and fails without pip.
        answer = await self.call("POST", "/collective_rpc", {"method": "describe_worker"}, deadline_s)
        with self.require_form(answer, "its data type and whether it can sleep"):
            described = answer["results"][0]
            self.dtype = described["dtype"].removeprefix("torch.")
            can_sleep = bool(described["can_sleep"])
        if sleeps and not can_sleep:
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
            "model": self.model,
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
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt,
            "seed": request.seed,
            "max_tokens": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": [request.watcher.stop] if request.watcher.stop else [],
            "stop_token_ids": sorted(request.watcher.eos_token_ids),
            "skip_special_tokens": False,  # the end tag may be one
            "logprobs": 0,  # only of the sampled token
            "return_token_ids": True,
        }
        if request.logit_bias:
            body["logit_bias"] = request.logit_bias
        answer = await self.call("POST", "/v1/completions", body, deadline_s)
        with self.require_form(answer, "a completion with token ids and log-probs, whole to its end"):
            completion = parse_completion(answer, request, self.url)
        return completion

    async def score(self, token_ids: list[int], deadline_s: float) -> list[float]:
        """Return log-probs of all tokens but the first, by the worker's weights at temperature 1, nats."""
        body = {
            "model": self.model,
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
    def require_form(self, answer: JSON, expected: str) -> Iterator[None]:
        """Turn an error in reading an answer into a WorkerError that shows it."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            minors = " or ".join(VLLM_MINORS)
            raise WorkerError(
                f"vLLM worker {self.url} must send {expected}, but sent {reprlib.repr(answer)} "
                f"({type(error).__name__}: {error!s:.200}). Check that it is vLLM {minors}.",
                retryable=True,
            ) from error


def parse_completion(answer: JSON, request: CompletionRequest, url: str) -> Completion:
    """Read the only choice of an answer.

    Raises:
        ValueError: If it is not what was asked for; KeyError and TypeError where parts are missing.
    """
    [choice] = answer["choices"]
    token_ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    limit = request.sampling.max_completion_length
    require(type(token_ids) is type(log_probs) is list, "no lists")
    counts = f"{len(token_ids)} token ids and {len(log_probs)} log-probs"
    require(1 <= len(token_ids) <= limit and len(log_probs) == len(token_ids), counts)
    in_vocabulary = all(type(token) is int and 0 <= token < request.num_ids for token in token_ids)
    require(in_vocabulary, "token ids that are not in the vocabulary")
    faulty = [value for value in log_probs if not INFINITE_LOG_PROB < value <= LARGEST_LOG_PROB]
    require(not faulty, f"log-probs that no sampled token has, such as {faulty[:1]}")
    reason = parse_finish_reason(choice, request)
    return Completion(token_ids, log_probs, reason, seed=request.seed, worker=url)


def parse_finish_reason(choice: JSON, request: CompletionRequest) -> FinishReason:
    """Tell end tag, end-of-sequence token and token limit apart; the tokens must show which it is."""
    reason, token_ids = choice["finish_reason"], choice["token_ids"]
    end = request.watcher.finish_reason(token_ids)
    if end == "length" and reason == "stop" and token_ids[-1] in request.end_token_ids:
        end = "eos"
    is_full = len(token_ids) == request.sampling.max_completion_length
    # An aborted request has another reason.
    holds = reason == "length" and is_full if end == "length" else reason == "stop"
    require(holds, f"finish_reason {reason!r:.40}, but {len(token_ids)} tokens, the last {token_ids[-1]}")
    return end


def require(condition: bool, what_came: str) -> None:
    """Raise ValueError, which `WorkerClient.require_form` turns into a WorkerError, unless it holds."""
    if not condition:
        raise ValueError(what_came)


def build_refusal(name: str, status: int, reason: str) -> WorkerError:
    """Return the error of a status: 5xx and overload may pass, anything else is the request's fault."""
    minors = " or ".join(VLLM_MINORS)
    advice = f" Start vLLM {minors} with VLLM_SERVER_DEV_MODE=1 in its environment." if status == 404 else ""
    return WorkerError(
        f"{name} was refused with status {status} ({reason.strip()[:300]}).{advice}",
        retryable=status >= 500 or status in (408, 429),
        refused=True,
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
