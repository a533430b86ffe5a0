"""The two speakers that answer in a chat: a model in this process, or a server."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import httpx
import torch

from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.engines.client import ADDRESS, WorkerClient, key_from, refusal, trusted_certificates
from rlt_lightning.engines.decoders import device_of
from rlt_lightning.engines.drawing import draw, row_uniforms
from rlt_lightning.engines.hf import eos_token_ids
from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.pretrained import Dtype, load_model
from rlt_lightning.tags import decode
from rlt_lightning.types import FinishReason, InputError

# A server's deadlines: to respond at all, and between two tokens.
ANSWER_S, SILENCE_S = 10.0, 300.0


@dataclass(frozen=True)
class ChatModel:
    """The model that answers.

    Args:
        path: Local folder, hub id, miniature or smollm2-135m. With a url, only its tokenizer and chat
            template are loaded.
        url: A vLLM server that answers, such as http://127.0.0.1:8000; None: this process answers.
        served_model: Name under which the server lists the model; None: the first that it lists.
        api_key_env: Environment variable that holds the server's API key, if it asks for one.
        dtype: "float32", "bfloat16", "float16", or "auto" for the type of the files; for this process.
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
    """Writes the answers of a chat."""

    context: int  # most tokens of conversation and answer together
    finish_reason: FinishReason  # of the last answer

    def stream(self, prompt: list[int], sampling: Sampling, seed: int) -> Iterator[str]:
        """Yield the answer's text piece by piece, without its end-of-sequence token."""


def speaker_of(model: ChatModel, tokenizer: Any) -> Speaker:
    """Return a speaker for the server at the url, or for the model itself."""
    return LocalSpeaker(model, tokenizer) if model.url is None else RemoteSpeaker(model, model.url)


class LocalSpeaker:
    """A model in this process, on a GPU if there is one; it samples as HFEngine does with the same seed."""

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
        yield text.pending


class TextOfTokens:
    """Decodes tokens as they arrive; a character that several tokens share appears with the last one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # The last tokens. The text of the first `num_returned` was returned already; they are kept because
        # the white space that follows depends on them.
        self.token_ids: list[int] = []
        self.num_returned = 0

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        self.token_ids.append(token)
        if (text := self.pending).endswith("\ufffd"):
            return ""
        self.token_ids = self.token_ids[self.num_returned :]
        self.num_returned = len(self.token_ids)
        return text

    @property
    def pending(self) -> str:
        """Return the text that was not returned yet."""
        returned = decode(self.tokenizer, self.token_ids[: self.num_returned])
        return decode(self.tokenizer, self.token_ids)[len(returned) :]


class RemoteSpeaker:
    """A vLLM server, which gets the same token ids as a local model."""

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
                ExitStack() as opened,
            ):
                with waiting_for(f"vLLM server {self.client.url} to begin its answer", SILENCE_S):
                    answer = http.stream("POST", url, json=body, headers=self.client.headers)
                    response = opened.enter_context(answer)
                    if response.status_code >= 400:
                        response.read()
                        raise refusal(place, response)
                    choices = streamed_choices(response.iter_lines(), place)
                    first = list(islice(choices, 1))
                for choice in chain(first, choices):
                    yield str(choice["text"])
                    self.finish_reason = "length" if choice.get("finish_reason") == "length" else "eos"
        except httpx.HTTPError as error:
            raise EngineError(
                f"{place} failed ({type(error).__name__}: {error}). Check that the server runs."
            ) from error


def streamed_choices(lines: Iterator[str], place: str) -> Iterator[dict[str, Any]]:
    """Yield the pieces of an answer from a stream of server-sent events.

    Raises:
        EngineError: If the stream breaks off, or holds something else.
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
