"""Find out, by rendering it, what a chat template writes around an assistant's text; fix the date it prints.

generation prompt   …<|im_start|>assistant\\n
written turn        …<|im_start|>assistant\\nTEXT<|im_end|>\\n              <|im_end|> ends a turn

generation prompt   …[|assistant|]<thought>\\n                            opens <thought>, for us to drop
written turn        …[|assistant|]TEXT[|endofturn|]\\n

generation prompt   …<|start|>assistant
written turn        …<|start|>assistant<|channel|>final<|message|>TEXT   begins with a channel
"""

from __future__ import annotations

import re
from datetime import date
from itertools import takewhile
from typing import Any

from rlt_lightning.models.format import jinja_string
from rlt_lightning.types import InputError

NO_SYSTEM_ROLE = (
    "Use another model, or set data.teacher_system_prompt and data.student_system_prompt to '' if it knows "
    "no system role."
)
QUESTION = {"role": "user", "content": "What is 1 + 1?"}
ANSWER = {"role": "assistant", "content": "It makes two."}
THOUGHT = "I count both."
DATE_CALL = re.compile(r"""\bstrftime_now\s*\(\s*('[^'\\]*'|"[^"\\]*")\s*\)""")
ASKS_NO_DATE = re.compile(r"{#.*?#}|\bstrftime_now\s+is\b", re.DOTALL)
# What a template prints as today's date: the same prompts on every day, in every stage.
DATE = date(2026, 1, 1)


def render_chat(tokenizer: Any, messages: list[dict[str, str]], opens_turn: bool = True) -> str:
    """Render messages with the tokenizer's chat template; with `opens_turn` the generation prompt, too.

    Raises:
        InputError: If the template refuses the messages.
    """
    import jinja2

    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opens_turn, enable_thinking=True
        )
    except jinja2.TemplateError as error:
        roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
        raise InputError(
            f"The chat template must accept {roles} messages, but it refused them ({error}). {NO_SYSTEM_ROLE}"
        ) from error
    return text


def split_written_turn(tokenizer: Any, *messages: dict[str, str]) -> tuple[str, str]:
    """Render messages with `ANSWER` among them, and return what stands before and behind its text.

    Raises:
        InputError: If the template refuses the messages, or leaves the answer out.
    """
    before, answer, behind = render_chat(tokenizer, list(messages), opens_turn=False).rpartition(
        ANSWER["content"]
    )
    if not answer:
        raise InputError(
            "The chat template must render an assistant's message, but it leaves it out. Use another model."
        )
    return before, behind


def find_turn_opening(tokenizer: Any) -> tuple[str, str]:
    """Compare a generation prompt with a written turn.

    The turn is one before the last question: behind that, some templates write an empty thought into each.

    Returns:
        The end of the generation prompt that a written turn lacks, such as an opened thought, and what a
        written turn has in its place before its text, such as a channel; its header, too, where the template
        knows no generation prompt.

    Raises:
        InputError: See `split_written_turn`.
    """
    prompt = render_chat(tokenizer, [QUESTION])
    written, _ = split_written_turn(tokenizer, QUESTION, ANSWER, QUESTION)
    header = count_shared(prompt, written)
    encoding = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
    for start, end in encoding["offset_mapping"]:
        if start < header < end:  # they differ within a token
            header = start
    without = render_chat(tokenizer, [QUESTION], opens_turn=False)
    if header < len(prompt) and header <= count_shared(prompt, without):
        # The two name the assistant in different words. Servers send the generation prompt.
        return "", ""
    opened, opening = prompt[header:], written[header:]
    if not (opened + opening).strip():
        return "", ""
    thinks = render_chat(tokenizer, [QUESTION, ANSWER | {"reasoning_content": THOUGHT}], opens_turn=False)
    before = thinks.rpartition(THOUGHT)[0]
    # An empty thought is what a turn with a thought lacks. A channel follows a thought, too.
    is_empty_thought = opened + opening not in thinks[header:].partition(ANSWER["content"])[0]
    return opened, "" if is_empty_thought and before[header:].strip() else opening


def count_shared(first: str, second: str) -> int:
    """Return with how many characters both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def find_turn_end(tokenizer: Any) -> int:
    """Return the token that the template writes behind an assistant's text; the eos where it writes nothing.

    Raises:
        InputError: If it writes a text there that begins with no added token, or see `split_written_turn`.
    """
    eos: int = tokenizer.eos_token_id
    if not getattr(tokenizer, "chat_template", None):
        return eos
    behind = split_written_turn(tokenizer, QUESTION, ANSWER)[1].lstrip()
    added = tokenizer.added_tokens_decoder.items()
    ends = {token.content: number for number, token in added if behind.startswith(token.content)}
    if behind and not ends:
        raise InputError(
            "The chat template must end an assistant's turn with an added token of the tokenizer, but writes "
            f"{behind[:80]!r} behind the text. Add it to the tokenizer, or use another model."
        )
    return ends[max(ends, key=len)] if ends else eos


def find_eos_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Collect the tokens that end a turn, from generation config, tokenizer and chat template."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ids, tokenizer.eos_token_id, find_turn_end(tokenizer)] if token is not None}


def fix_date(template: Any, name: str) -> Any:
    """Return a chat template, or several by name, that prints `DATE` for today's date.

    Servers get the date with the exported template.

    Args:
        template: The template.
        name: Of the model, for messages.

    Raises:
        InputError: If the template computes the format of the date, or hands `strftime_now` on.
    """
    if isinstance(template, dict):
        return {key: fix_date(text, name) for key, text in template.items()}
    if not isinstance(template, str) or "strftime_now" not in template:
        return template
    if "strftime_now" in ASKS_NO_DATE.sub("", DATE_CALL.sub("", template)):
        raise InputError(
            f"The chat template of '{name}' must write out the format of the date that it prints, as in "
            "strftime_now('%Y'), but does not, so that the date cannot be fixed. Put the date "
            "into the template."
        )
    return DATE_CALL.sub(lambda call: jinja_string(DATE.strftime(call[1][1:-1])), template)
