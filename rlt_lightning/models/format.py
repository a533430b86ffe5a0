"""The format that a model was trained in, which travels with its folder.

`rlt_format.json` says what the model reads and writes. The folder's chat template has the same system prompt
as its default, so that a server and `apply_chat_template` give the trained format to a question without one:

    [user]          → [system: the trained prompt, user] → the model's template
    [system, user]  ─────────────────────────────────────→ the model's template
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rlt_lightning.tags import TagStyle
from rlt_lightning.types import InputError

FORMAT_FILE = "rlt_format.json"
Role = Literal["teacher", "student"]
# Our addition to a template stands between these comments, so that it can be found and removed.
BEGIN, END = "{#- rlt_lightning: default system message #}", "{#- rlt_lightning: end #}"
ADDED = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)


@dataclass(frozen=True)
class ModelFormat:
    """What a model was trained to read and write.

    Attributes:
        role: "teacher" for a model that explains given solutions, "student" for one that answers questions.
        tags: The tags around its thoughts, solutions and explanations, and their separator.
        system_prompt: The system message of its training, or the commonest one; '' for none.
        share: Part of the training rows that had this system message.
    """

    role: Role
    tags: TagStyle
    system_prompt: str
    share: float = 1.0

    @staticmethod
    def from_rows(role: Role, tags: TagStyle, system_prompts: Counter[str]) -> ModelFormat:
        """Return the format of a training whose rows had these system prompts, counted."""
        [(commonest, count)] = system_prompts.most_common(1)
        return ModelFormat(role, tags, commonest, count / system_prompts.total())

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, as `rlt_format.json` holds them."""
        return {
            "role": self.role,
            "tags": self.tags.tags(),
            "separator": self.tags.separator,
            "system_prompt": self.system_prompt,
            "system_prompt_share": self.share,
        }

    @staticmethod
    def from_plain(plain: Any, source: str) -> ModelFormat:
        """Return the format that `to_plain` has written; it may be the text of `rlt_format.json`.

        Raises:
            InputError: If the values are others; it names their source.
        """
        try:
            plain = json.loads(plain) if isinstance(plain, bytes) else plain
            if plain["role"] not in get_args(Role) or not isinstance(plain["system_prompt"], str):
                raise ValueError(f"{plain['role']}, {plain['system_prompt']}")
            tags = TagStyle(**plain["tags"], separator=plain["separator"])
            share = float(plain["system_prompt_share"])
            return ModelFormat(plain["role"], tags, plain["system_prompt"], share)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{source} must hold role, tags, separator, system_prompt and system_prompt_share, but does "
                f"not ({error!r}). Restore it, or delete it: the model's format is then unknown."
            ) from error


def write_format(model_format: ModelFormat, folder: Path) -> None:
    """Write `rlt_format.json` into a model folder."""
    text = json.dumps(model_format.to_plain(), indent=1, ensure_ascii=False)
    (folder / FORMAT_FILE).write_text(text + "\n", encoding="utf-8")


def with_default_system(template: Any, system_prompt: str) -> Any:
    """Return a chat template that puts this system message before messages without one.

    Args:
        template: The template, or several by name.
        system_prompt: The message. With the empty string the template stays as the model brought it.
    """
    if isinstance(template, dict):
        return {name: with_default_system(text, system_prompt) for name, text in template.items()}
    template = without_default_system(template)
    if not system_prompt:
        return template
    message = f"[{{'role': 'system', 'content': {jinja_string(system_prompt)}}}]"
    added = (
        f"{BEGIN}{{%- if not messages or messages[0]['role'] != 'system' -%}}"
        f"{{%- set messages = {message} + messages -%}}{{%- endif -%}}{END}"
    )
    return added + template


def without_default_system(template: Any) -> Any:
    """Return a chat template as the model brought it, without the default that we have added."""
    if isinstance(template, dict):
        return {name: without_default_system(text) for name, text in template.items()}
    return ADDED.sub("", template) if isinstance(template, str) else template


def jinja_string(text: str) -> str:
    """Return a text as a string literal of a Jinja template."""
    special = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r"}
    literal = "'" + "".join(special.get(character, character) for character in text) + "'"
    # A text may hold the comments that end our addition.
    return literal.replace("{#", "{' ~ '#")
