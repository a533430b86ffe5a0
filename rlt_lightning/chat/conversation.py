"""`rlt chat`: talk to a trained student in the terminal, its thought dimmed and its solution highlighted.

chat                 the model, its format and its speaker: a model in this process, or a server
  converse           question after question
    Conversation     the turns so far; asks the speaker
      Screen         shows the answer as it arrives, by parts that TagSplitter finds
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import httpx2
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from rlt_lightning.console import has_styles, waiting_for
from rlt_lightning.datamodules.format_choice import FormatOptions, choose_format
from rlt_lightning.datamodules.formats import ChatFormat, encode
from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.engines.client import ADDRESS, WorkerClient, build_refusal, load_certificates, read_api_key
from rlt_lightning.engines.slots import find_device
from rlt_lightning.pretrained import Dtype, load_model, load_tokenizer, read_context_length
from rlt_lightning.tags import (
    CONTROL_CODES,
    TagStyle,
    TextStream,
    find_eos_token_ids,
    holds_half_pair,
    require_fast,
)
from rlt_lightning.types import FinishReason, InputError

COMMANDS = "/reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
Part = Literal["plain", "thought", "solution", "tag"]
# Dim; bold and green.
STYLES: dict[Part, str] = {"thought": "\x1b[2m", "solution": "\x1b[1;32m"}
RESET = "\x1b[0m"
# Replaces control characters, which would change the terminal; line ends and tabs stay. Marks of direction
# stay too: an answer in Arabic or Hebrew needs them. commands/explain.py replaces them, since they
# would reorder its tokens.
WITHOUT_CONTROLS = {code: "\ufffd" for code in CONTROL_CODES if chr(code) not in "\n\t"}
# A server's deadlines: to respond at all, and between two tokens.
ANSWER_S, SILENCE_S = 10.0, 300.0
# Gets the text of an answer, piece by piece.
Show = Callable[[str], None]


def chat(
    model: ChatModel,
    tags: str | TagStyle | None = None,
    student_system_prompt: str | None = None,
    format_from: str | None = None,
    force_format: bool = False,
    temperature: float = 0.7,
    top_p: float = 1.0,
    max_tokens: int = 4096,
    seed: int = 0,
) -> None:
    """Ask a model in the format that students are trained in. Piped input is one question.

    Args:
        model: The model or the server that answers.
        tags: "stratos", "r1" or a TagStyle; None: as the model was trained, else stratos.
        student_system_prompt: None: as the model was trained, else our own; '' for none, @FILE for the text
            of a file.
        format_from: Rows off which tags and system prompt of a model from outside are read: a file, folder or
            hub id.
        force_format: Use these settings although the model records that it was trained in others.
        temperature: Divides the logits; 0 is greedy.
        top_p: Nucleus mass kept; 1 keeps all.
        max_tokens: Most tokens of one answer.
        seed: With the same seed, the same questions get the same answers.

    Raises:
        InputError: If the model cannot be loaded, or standard input is empty.
        EngineError: If the server cannot be reached, or fails.
    """
    sampling = Sampling(temperature, top_p, max_completion_length=max_tokens)
    options = FormatOptions(tags, None, student_system_prompt, format_from, force_format, group="--")
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    question = read_piped_question()
    chosen = choose_format(options, None, model.path)
    chat_format = chosen.build_format(tokenizer)
    conversation = Conversation(chat_format, choose_speaker(model, chat_format.tokenizer), sampling, seed)
    chosen.warn_of_guesses()
    if question is not None:
        conversation.ask(question, Screen(chat_format.tags))
    else:
        converse(conversation)


def read_piped_question() -> str | None:
    """Return the text of standard input; None at a terminal.

    Raises:
        InputError: If it is empty, or not in the encoding of standard input.
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
    """Print a line that is not part of an answer."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """The questions and answers so far, and what the next answer needs."""

    chat_format: ChatFormat
    speaker: Speaker
    sampling: Sampling
    seed: int
    # Questions with their answers, tags included.
    turns: list[tuple[str, str]] = field(default_factory=list)

    def ask(self, question: str, screen: Screen) -> None:
        """Show the answer as it arrives. An interrupted answer is remembered as far as it came.

        Raises:
            InputError: If the question is no text, or the conversation leaves no room for an answer.
        """
        # Python turns bytes that are no text into halves of surrogate pairs.
        if holds_half_pair(question):
            raise InputError("A question must be text in UTF-8, but holds other bytes. Convert it.")
        text = self.chat_format.render_student_chat(question, earlier=self.turns)
        prompt = encode(self.chat_format.tokenizer, text)
        room = self.speaker.context - len(prompt)
        if room < 1:
            raise InputError(
                f"The conversation must leave room for an answer, but its {len(prompt)} tokens fill the "
                f"model's context of {self.speaker.context}. Start over with /reset."
            )
        limit = min(room, self.sampling.max_completion_length)
        sampling = replace(self.sampling, max_completion_length=limit)
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            screen.show(piece)

        try:
            reason = self.speaker.answer(prompt, sampling, self.seed + len(self.turns), show)
        finally:
            screen.end()
            if answer := "".join(pieces):
                self.turns.append((question, answer))
        if reason == "length":
            setting = "the model's context" if limit == room else "--max_tokens"
            tell(f"cut after {limit} tokens: {setting}")


class Screen:
    """One answer on standard output: on a terminal with styles in place of the tags, elsewhere unchanged."""

    def __init__(self, tags: TagStyle) -> None:
        self.splitter = TagSplitter(tags)
        self.terminal = sys.stdout.isatty()
        self.styled = has_styles()

    def show(self, piece: str) -> None:
        """Write a piece, except for an end that may be the beginning of a tag."""
        if not self.styled:
            write(piece, self.terminal)
            return
        for part, text in self.splitter.feed(piece):
            self._write_styled(part, text)

    def end(self) -> None:
        """Write what was held back, and end the line."""
        if self.styled:
            self._write_styled(*self.splitter.flush())
        write("\n", self.terminal)

    def _write_styled(self, part: Part, text: str) -> None:
        if part != "tag" and text:
            write(text, self.terminal, STYLES.get(part, ""))


def write(text: str, terminal: bool, style: str = "") -> None:
    """Write to standard output; a terminal gets no control characters, which a model may write."""
    text = text.translate(WITHOUT_CONTROLS) if terminal else text
    sys.stdout.write(f"{style}{text}{RESET}" if style else text)
    sys.stdout.flush()


class TagSplitter:
    """Split a text into thought, solution and other parts, although its tags may arrive in pieces.

    With the tags of "r1", the pieces "<thi" and "nk>Add" give ("tag", "<think>"), ("thought", "Add") and
    empty texts.
    """

    def __init__(self, tags: TagStyle) -> None:
        # The part that follows each tag.
        self.begins: dict[str, Part] = {
            tags.thought_open: "thought",
            tags.thought_close: "plain",
            tags.solution_open: "solution",
            tags.solution_close: "plain",
        }
        self.part: Part = "plain"
        self.pending = ""  # may be the beginning of a tag

    def feed(self, piece: str) -> Iterator[tuple[Part, str]]:
        """Yield the texts that are certain with this piece; each tag is yielded separately."""
        self.pending += piece
        while found := [tag for tag in self.begins if tag in self.pending]:
            tag = min(found, key=self.pending.index)
            before, _, self.pending = self.pending.partition(tag)
            yield self.part, before
            yield "tag", tag
            self.part = self.begins[tag]
        certain = len(self.pending) - max(map(self._num_begun, self.begins))
        yield self.part, self.pending[:certain]
        self.pending = self.pending[certain:]

    def flush(self) -> tuple[Part, str]:
        """Return the text that is still pending when the answer has ended."""
        text, self.pending = self.pending, ""
        return self.part, text

    def _num_begun(self, tag: str) -> int:
        """Return the number of characters at the end that may begin this tag."""
        return next(n for n in range(len(tag) - 1, -1, -1) if self.pending.endswith(tag[:n]))


@dataclass(frozen=True)
class ChatModel:
    """The model that answers.

    Args:
        path: Local folder, hub id, or a name such as miniature. With a url, only its tokenizer and chat
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
        self.context = read_context_length(loaded.config)
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
                        reason_text = next(events.response.iter_raw(2000), b"")
                        raise build_refusal(place, events.response.status_code, reason_text)
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
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise EngineError(
            f"{place} must stream pieces of text, but sent {data:.200}. Is this a vLLM server?"
        ) from error
    return choice
