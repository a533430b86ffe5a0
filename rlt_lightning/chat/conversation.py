"""`rlt chat`: talk to a trained student in the terminal, its thought dimmed and its solution highlighted."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rlt_lightning.chat.screen import Screen
from rlt_lightning.chat.speakers import ChatModel, Speaker, speaker_of
from rlt_lightning.datamodules.format_choice import FormatOptions, choose_format
from rlt_lightning.datamodules.formats import ChatFormat, encode
from rlt_lightning.engines.base import EngineError, Sampling
from rlt_lightning.pretrained import load_tokenizer
from rlt_lightning.tags import TagStyle, holds_half_pair
from rlt_lightning.types import InputError

COMMANDS = "/reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


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
    question = piped_question()
    options = FormatOptions(tags, None, student_system_prompt, format_from, force_format, group="--")
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    chosen = choose_format(options, None, model.path)
    chat_format = chosen.chat_format(tokenizer)
    conversation = Conversation(chat_format, speaker_of(model, chat_format.tokenizer), sampling, seed)
    chosen.warn_of_guesses()
    if question is not None:
        conversation.ask(question, Screen(chat_format.tags))
    else:
        converse(conversation)


def piped_question() -> str | None:
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
        text = self.chat_format.student_chat(question, earlier=self.turns)
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
            if said := "".join(pieces):
                self.turns.append((question, said))
        if reason == "length":
            setting = "the model's context" if limit == room else "--max_tokens"
            tell(f"cut after {limit} tokens: {setting}")
