"""`rlt chat`: talk to a trained student in the terminal, its thought dimmed and its solution highlighted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import httpx
import torch

from rlt_lightning.datamodules.formats import ChatFormat, encode
from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.engines.client import ADDRESS, WorkerClient, key_from, refusal, trusted_certificates
from rlt_lightning.engines.hf import device_of, draw, eos_token_ids, row_uniforms
from rlt_lightning.pretrained import Dtype, load_model, load_tokenizer
from rlt_lightning.tags import TagStyle, decode
from rlt_lightning.types import FinishReason, InputError

Kind = Literal["plain", "thought", "solution", "tag"]
STYLES: dict[Kind, str] = {"thought": "\x1b[2m", "solution": "\x1b[1;32m"}  # dim; bold and green
RESET = "\x1b[0m"
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
COMMANDS = "/reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
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


def chat(
    model: ChatModel,
    tags: str | TagStyle = "stratos",
    student_system_prompt: str | None = None,
    temperature: float = 0.7,
    top_p: float = 1.0,
    max_tokens: int = 4096,
    seed: int = 0,
) -> None:
    """Ask a model in the format that students are trained in; what is piped in is one question.

    Args:
        model: Who answers.
        tags: "stratos", "r1" or a TagStyle: the one of the training.
        student_system_prompt: None for our own; the empty string for none. The one of the training.
        temperature: Of the softmax; 0 is greedy.
        top_p: Nucleus mass kept; 1 keeps all.
        max_tokens: Most tokens of one answer.
        seed: The same questions get the same answers.

    Raises:
        InputError: If the model cannot be loaded, or no question came.
        EngineError: If the server cannot be reached, or fails.
    """
    sampling = Sampling(temperature, top_p, max_completion_length=max_tokens)
    question = piped_question()
    chat_format = ChatFormat(
        load_tokenizer(model.path, model.trust_remote_code), tags, student_system_prompt=student_system_prompt
    )
    conversation = Conversation(chat_format, speaker_of(model, chat_format.tokenizer), sampling, seed)
    if question is not None:
        conversation.ask(question, Screen(chat_format.tags))
    else:
        converse(conversation)


def piped_question() -> str | None:
    """What is piped in; None at a terminal.

    Raises:
        InputError: If that is nothing, or not in the encoding of standard input.
    """
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    try:
        question = "" if sys.stdin is None else sys.stdin.read().strip()
    except UnicodeError as error:
        raise InputError(f"A question must be text in UTF-8, but is not ({error}). Convert it.") from error
    if not question:
        raise InputError("rlt chat needs a question, but standard input is empty. Pipe one in, or type it.")
    return question


def converse(conversation: Conversation) -> None:
    """Answer question after question until the user leaves."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its arrow keys)
    tell(COMMANDS)
    while True:
        try:
            question = input("> ").strip()
        except KeyboardInterrupt:
            tell(f"\n{COMMANDS}")
            continue
        except EOFError:
            print()
            return
        if question == "/exit":
            return
        if question == "/reset":
            conversation.turns.clear()
        elif question.startswith("/"):
            tell(COMMANDS)
        elif question:
            try:
                conversation.ask(question, Screen(conversation.chat_format.tags))
            except KeyboardInterrupt:
                tell("stopped")
            except (InputError, EngineError) as error:  # the next question may fare better
                tell(str(error))


def tell(line: str) -> None:
    """Say something that is no answer."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """What was said, in the student's format."""

    chat_format: ChatFormat
    speaker: Speaker
    sampling: Sampling
    seed: int
    turns: list[tuple[str, str]] = field(default_factory=list)  # questions with their answers, tags included

    def ask(self, question: str, screen: Screen) -> None:
        """Show the answer as it comes; what has come of it is remembered, however it ends.

        Raises:
            InputError: If the question is no text, or the conversation leaves no room for an answer.
        """
        if any(
            "\ud800" <= character <= "\udfff" for character in question
        ):  # what Python makes of such bytes
            raise InputError("A question must be text in UTF-8, but holds other bytes. Convert it.")
        text = self.chat_format.student_chat(question, earlier=self.turns)
        prompt = encode(self.chat_format.tokenizer, text)
        room = self.speaker.context - len(prompt)
        if room < 1:
            raise InputError(
                f"The conversation must leave room for an answer, but its {len(prompt)} tokens fill the "
                f"model's context of {self.speaker.context}. Begin anew with /reset."
            )
        limit = min(room, self.sampling.max_completion_length)
        sampling = replace(self.sampling, max_completion_length=limit)
        said = ""
        try:
            for piece in self.speaker.stream(prompt, sampling, self.seed + len(self.turns)):
                said += piece
                screen.show(piece)
        finally:
            screen.end()
            if said:
                self.turns.append((question, said))
        if self.speaker.finish_reason == "length":
            setting = "the model's context" if limit == room else "--max_tokens"
            tell(f"cut after {limit} tokens: {setting}")


# Who answers


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


# What is seen


class Screen:
    """One answer on standard output: as it is, or on a terminal with styles in place of the tags."""

    def __init__(self, tags: TagStyle) -> None:
        self.splitter = TagSplitter(tags)
        self.terminal = sys.stdout.isatty()
        self.styled = self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def show(self, piece: str) -> None:
        """Write a piece at once, but for what may be the beginning of a tag."""
        if not self.styled:
            write(piece, self.terminal)
            return
        for kind, text in self.splitter.feed(piece):
            self._write_styled(kind, text)

    def end(self) -> None:
        """Write what was held back, and end the line."""
        if self.styled:
            self._write_styled(*self.splitter.rest())
        write("\n", self.terminal)

    def _write_styled(self, kind: Kind, text: str) -> None:
        if kind != "tag" and text:
            write(text, self.terminal, STYLES.get(kind, ""))


def write(text: str, terminal: bool, style: str = "") -> None:
    """Write to standard output; a terminal is spared the control characters that a model may write."""
    text = text.translate(CONTROLS) if terminal else text
    sys.stdout.write(f"{style}{text}{RESET}" if style else text)
    sys.stdout.flush()


class TagSplitter:
    """Tell thought, solution and the rest apart in a text whose tags may arrive in pieces."""

    def __init__(self, tags: TagStyle) -> None:
        self.begins: dict[str, Kind] = {  # what follows each tag
            tags.thought_open: "thought",
            tags.thought_close: "plain",
            tags.solution_open: "solution",
            tags.solution_close: "plain",
        }
        self.kind: Kind = "plain"
        self.pending = ""  # may be the beginning of a tag

    def feed(self, piece: str) -> Iterator[tuple[Kind, str]]:
        """Yield what is certain with this piece, tags as pieces of their own."""
        self.pending += piece
        while found := [tag for tag in self.begins if tag in self.pending]:
            tag = min(found, key=self.pending.index)
            before, _, self.pending = self.pending.partition(tag)
            yield self.kind, before
            yield "tag", tag
            self.kind = self.begins[tag]
        certain = len(self.pending) - max(map(self._num_begun, self.begins))
        yield self.kind, self.pending[:certain]
        self.pending = self.pending[certain:]

    def rest(self) -> tuple[Kind, str]:
        """What was held back, at the end of the text."""
        text, self.pending = self.pending, ""
        return self.kind, text

    def _num_begun(self, tag: str) -> int:
        """Number of characters at the end that are a beginning of this tag."""
        return next(n for n in range(len(tag) - 1, -1, -1) if self.pending.endswith(tag[:n]))
