"""The two speakers that answer in a chat: a model in this process, or a server."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from rlt_lightning.console import waiting_for
from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.engines.client import ADDRESS, WorkerClient, build_refusal, load_certificates, read_api_key
from rlt_lightning.engines.hf import find_eos_token_ids
from rlt_lightning.engines.slots import find_device
from rlt_lightning.pretrained import Dtype, load_model
from rlt_lightning.tags import TextStream, require_fast
from rlt_lightning.types import FinishReason, InputError

# A server's deadlines: to respond at all, and between two tokens.
ANSWER_S, SILENCE_S = 10.0, 300.0
# Gets the text of an answer, piece by piece.
Show = Callable[[str], None]


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

    def answer(self, prompt: list[int], sampling: Sampling, seed: int, show: Show) -> FinishReason:
        """Show the answer as it is made, without its end-of-sequence token; return why it ended."""


def choose_speaker(model: ChatModel, tokenizer: Any) -> Speaker:
    """Return a speaker for the server at the url, or for the model itself."""
    return LocalSpeaker(model, tokenizer) if model.url is None else RemoteSpeaker(model, model.url)


class LocalSpeaker:
    """A model in this process, on a GPU if there is one, sampled by transformers' `generate`."""

    def __init__(self, model: ChatModel, tokenizer: Any) -> None:
        require_fast(tokenizer)
        loaded = load_model(model.path, model.dtype, trust_remote_code=model.trust_remote_code)
        self.model = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = tokenizer
        self.context: int = getattr(loaded.config.get_text_config(), "max_position_embeddings", sys.maxsize)
        self.ends = find_eos_token_ids(loaded, tokenizer)
        # `generate` would fill in what we leave unset from the model's own defaults.
        loaded.generation_config = GenerationConfig()

    def answer(self, prompt: list[int], sampling: Sampling, seed: int, show: Show) -> FinishReason:
        """See `Speaker.answer`."""
        token_ids = torch.tensor([prompt], device=find_device(self.model))  # (1, L)
        torch.manual_seed(seed)
        output = self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            generation_config=self._settings(sampling),
            streamer=AnswerStreamer(self.tokenizer, self.ends, show),
        )  # (1, L + T)
        return "eos" if int(output[0, -1]) in self.ends else "length"

    def _settings(self, sampling: Sampling) -> GenerationConfig:
        """Return the sampling settings in transformers' words."""
        settings = GenerationConfig(
            max_new_tokens=sampling.max_completion_length,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=sorted(self.ends) or None,
            pad_token_id=0,  # one row has no padding
        )
        if sampling.temperature > 0:
            settings.update(do_sample=True, temperature=float(sampling.temperature), top_k=sampling.top_k)
            settings.update(top_p=sampling.top_p, min_p=sampling.min_p)
        return settings


class AnswerStreamer(BaseStreamer):
    """Shows the text of each token that `generate` draws; transformers' own streamers show whole words."""

    def __init__(self, tokenizer: Any, ends: set[int], show: Show) -> None:
        self.text, self.ends, self.show = TextStream(tokenizer), ends, show

    def put(self, value: Tensor) -> None:
        """Take the prompt, (1, L), or the next token, (1,)."""
        if value.ndim == 1 and int(value) not in self.ends:
            self.show(self.text.step(int(value)))

    def end(self) -> None:
        """Show the beginning of a character that the answer did not finish."""
        self.show(self.text.end())


class RemoteSpeaker:
    """A vLLM server, which gets the same token ids as a local model."""

    def __init__(self, model: ChatModel, url: str) -> None:
        self.client = WorkerClient(url, model.served_model, read_api_key(model.api_key_env), own_weights=True)
        self.context = asyncio.run(self.client.fetch_context(ANSWER_S))

    def answer(self, prompt: list[int], sampling: Sampling, seed: int, show: Show) -> FinishReason:
        """See `Speaker.answer`."""
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
        server = f"vLLM server {self.client.url}"
        place = f"{server}: POST /v1/completions"
        url, headers = f"{self.client.url}/v1/completions", self.client.headers
        timeout = httpx2.Timeout(SILENCE_S, connect=ANSWER_S)
        reason: FinishReason = "eos"
        try:
            with (
                ExitStack() as silence,
                httpx2.Client(timeout=timeout, verify=load_certificates(), trust_env=False) as http,
            ):
                silence.enter_context(waiting_for(f"{server} to begin its answer", SILENCE_S))
                with http.sse(url, method="POST", json=body, headers=headers) as events:
                    if events.response.is_error:
                        events.response.read()
                        raise build_refusal(place, events.response)
                    for event in events:
                        silence.close()
                        if event.data == "[DONE]":
                            return reason
                        if not event.data:  # a sign of life
                            continue
                        choice = read_choice(event.data, place)
                        show(choice["text"])
                        reason = "length" if choice.get("finish_reason") == "length" else "eos"
        except httpx2.HTTPError as error:
            raise EngineError(
                f"{place} failed ({type(error).__name__}: {error}). Check that the server runs."
            ) from error
        raise EngineError(f"{place} broke off in the middle of an answer. Look at the server's log.")


def read_choice(data: str, place: str) -> dict[str, Any]:
    """Return the piece of an answer that an event of the server holds.

    Raises:
        EngineError: If it holds something else.
    """
    try:
        choice: dict[str, Any] = json.loads(data)["choices"][0]
        choice["text"] += ""
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(
            f"{place} must stream pieces of text, but sent {data:.200}. Is this a vLLM server?"
        ) from error
    return choice
