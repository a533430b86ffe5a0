"""The key of a tokenised source: a hash of all that decides its items, so that a change makes another key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.retelling import RetellingFormat

PACKAGE = Path(__file__).parents[1]
# The code that makes items; an entry of another version of it is not used.
CODE = ("datamodules/*.py", "tasks/*.py", "judging/*.py", "models/format.py", "tags.py", "types.py")
LIBRARIES = ("transformers", "tokenizers", "jinja2", "math-verify")
QUESTION = "What is 1 + 1?"


def hash_of(value: Any) -> str:
    """Return a hash of plain values; dictionaries count in any order."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@cache
def code_hash() -> str:
    """Return a hash of the code and the libraries that make items."""
    files = [path for pattern in CODE for path in sorted(PACKAGE.glob(pattern))]
    return hash_of([[path.read_text(encoding="utf-8") for path in files], list(map(version, LIBRARIES))])


def format_settings(chat_format: ChatFormat) -> dict[str, Any]:
    """Return what decides the tokens of a text, as plain values.

    Two rendered conversations are among them: a template may write today's date into them.
    """
    tokenizer = chat_format.tokenizer
    return {
        "tokenizer": hash_of(tokenizer.backend_tokenizer.to_str()),
        "special_tokens": [tokenizer.eos_token_id, getattr(tokenizer, "split_special_tokens", None)],
        "template": tokenizer.chat_template,
        "conversations": [chat_format.teacher_chat(QUESTION), chat_format.student_chat(QUESTION)],
        "tags": asdict(chat_format.tags),
        "student_tags": asdict(chat_format.student_tags),
        "prompts": [chat_format.teacher_system_prompt, chat_format.student_system_prompt],
        "student": format_settings(chat_format.student) if isinstance(chat_format, RetellingFormat) else None,
    }
