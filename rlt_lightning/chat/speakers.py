"""Who answers in a chat: a model in this process, or a server."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import torch

from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.engines.client import ADDRESS, WorkerClient, key_from, refusal, trusted_certificates
from rlt_lightning.engines.hf import device_of, draw, eos_token_ids, row_uniforms
from rlt_lightning.pretrained import Dtype, load_model
from rlt_lightning.tags import decode
from rlt_lightning.types import FinishReason, InputError

ANSWER_S, SILENCE_S = 10.0, 300.0  # deadlines of a server: to answer at all, and between two tokens


@dataclass(frozen=True)
class ChatModel:
    """Who answers.

    Args:
        path: Embedded default, local folder or hub id. With a url, its tokenizer and chat template alone are
            loaded.
        url: A vLLM server that answers, such as http://127.0.0.1:8000; None: this process.
        served_model: Name that the server serves the model under; None: the first that it lists.
        api_key_env: Environment variable that holds the server's API key, if it asks for one.
        dtype: "float32", "bfloat16", "float16", or "auto" for what the files hold; in this process.
        trust_remote_code: Run code that comes with the model. Off unless you trust its author.
    """

    path: str
    url: str | None = None
    served_model: str | None = None
    api_key_env: str = "VLLM_API_KEY"
    dtype: Dtype = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.url is not None and not re.fullmatch(ADDRESS, self.url):
            raise InputError(
                "--model.url must be an address such as http://127.0.0.1:8000, without user and path, but is "
                "none. Correct it; a key goes into the environment variable that api_key_env names."
            )


class Speaker(Protocol):
    """Who writes an answer."""

    context: int  # tokens of conversation and answer that it takes
    finish_reason: FinishReason  # of the last answer

    def stream(self, prompt: list[int], sampling: Sampling, seed: int) -> Iterator[str]:
        """Yield the answer's text piece by piece. Its end-of-sequence token is no text."""


def speaker_of(model: ChatModel, tokenizer: Any) -> Speaker:
    """The server at the url, or the model itself."""
    return LocalSpeaker(model, tokenizer) if model.url is None else RemoteSpeaker(model, model.url)


class LocalSpeaker:
    """A model in this process, on a GPU if there is one; says what HFEngine samples with the same seed."""

    finish_reason: FinishReason = "eos"

    def __init__(self, model: ChatModel, tokenizer: Any) -> None:
        loaded = load_model(model.path, model.dtype, trust_remote_code=model.trust_remote_code)
        self.model = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = tokenizer
        self.context: int = getattr(loaded.config.get_text_config(), "max_position_embeddings", sys.maxsize)

    @torch.no_grad()
    def stream(self, prompt: list[int], sampling: Sampling, seed: int) -> Iterator[str]:
        """See `Speaker.stream`."""
        ends = eos_token_ids(self.model, self.tokenizer)
        tokens = history = torch.tensor([prompt], device=device_of(self.model))  # (1, L)
        text, cache = TextOfTokens(self.tokenizer), None
        self.finish_reason = "length"
        for uniform in row_uniforms(seed, 1, sampling.max_completion_length)[0]:
            output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            uniforms = uniform[None].to(history.device)
            token, _ = draw(output.logits[:, -1].float(), history, uniforms, sampling)  # (1,)
            if int(token) in ends:
                self.finish_reason = "eos"
                break
            if piece := text.add(int(token)):
                yield piece
            tokens = token[None]
            history = torch.cat([history, tokens], dim=1)
        yield text.rest


class TextOfTokens:
    """The text of tokens as they come; a character that several tokens share comes with the last."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []  # the last ones
        self.num_told = 0  # of these, whose text was returned: kept, since they decide on white space

    def add(self, token: int) -> str:
        """The text that is known with this token."""
        self.token_ids.append(token)
        if (rest := self.rest).endswith("\ufffd"):
            return ""
        self.token_ids = self.token_ids[self.num_told :]
        self.num_told = len(self.token_ids)
        return rest

    @property
    def rest(self) -> str:
        """The text that was not returned yet."""
        told = decode(self.tokenizer, self.token_ids[: self.num_told])
        return decode(self.tokenizer, self.token_ids)[len(told) :]


class RemoteSpeaker:
    """A vLLM server, given the token ids that a local model would be given."""

    finish_reason: FinishReason = "eos"

    def __init__(self, model: ChatModel, url: str) -> None:
        self.client = WorkerClient(url, model.served_model, key_from(model.api_key_env), plain=True)
        self.context = asyncio.run(self.client.context(ANSWER_S))

    def stream(self, prompt: list[int], sampling: Sampling, seed: int) -> Iterator[str]:
        """See `Speaker.stream`."""
        body = {
            "model": self.client.model,
            "prompt": prompt,
            "max_tokens": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "skip_special_tokens": False,  # a tag may be one
            "stream": True,
        }
        url = f"{self.client.url}/v1/completions"
        place = f"vLLM server {self.client.url}: POST /v1/completions"
        timeout = httpx.Timeout(SILENCE_S, connect=ANSWER_S)
        try:
            with (
                httpx.Client(timeout=timeout, verify=trusted_certificates(), trust_env=False) as http,
                http.stream("POST", url, json=body, headers=self.client.headers) as response,
            ):
                if response.status_code >= 400:
                    response.read()
                    raise refusal(place, response)
                for choice in choices(response.iter_lines(), place):
                    yield str(choice["text"])
                    self.finish_reason = "length" if choice.get("finish_reason") == "length" else "eos"
        except httpx.HTTPError as error:
            raise EngineError(
                f"{place} failed ({type(error).__name__}: {error}). Check that the server runs."
            ) from error


def choices(lines: Iterator[str], place: str) -> Iterator[dict[str, Any]]:
    """Yield the pieces of an answer from a stream of server-sent events.

    Raises:
        EngineError: If it breaks off, or holds something else.
    """
    for line in lines:
        content = line.removeprefix("data:").strip()
        if content == "[DONE]":
            return
        if not line.startswith("data:"):
            continue
        try:
            choice = json.loads(content)["choices"][0]
            choice["text"] += ""
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(
                f"{place} must stream pieces of text, but sent {content:.200}. Is this a vLLM server?"
            ) from error
        yield choice
    raise EngineError(f"{place} broke off in the middle of an answer. Look at the server's log.")
