"""Remove secrets from settings before they leave this machine."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
SECRET_NAME = re.compile(
    r"((^|[-_.])(token|pass|passphrase|auth|authorization|credentials?|cookie)|[-_.](keys?|pwd)"
    r"|(^|[-_.])private[-_]?key|api[-_]?keys?|access[-_]?keys?|secrets?|passwd|passwords?|(?-i:[a-z](Token|Key)))$",
    re.IGNORECASE,
)
SECRET_WORD = r"(?:key|token|secret|password|passwd|pwd|signature|sig|auth)"
# No name is searched from each of its letters: a long text without a break would take quadratic time.
ASSIGNMENT = rf"({SECRET_WORD}=|(?<![\w-])\w*-[\w-]*{SECRET_WORD}\s+)[^&\s]+"
HEADER = r"(\bauthorization\s*:\s*\w+\s+|\bauthorization\s*:\s*|\w-+(?:key|token)\s*:\s*)\S+"
# A pair of JSON or of a printed dictionary in a text; its quotes may be escaped, as in JSON inside of JSON.
PAIR = re.compile(
    r"""(?P<head>(?P<quote>\\{0,15}["'])(?P<name>[\w.-]+)(?P=quote)\s*:\s*(?P=quote))"""
    r"""(?P<value>(?:(?!(?P=quote))(?:\\.|[^\\]))*)""",
    re.DOTALL,
)
PRIVATE_KEY = r"-----BEGIN ([A-Z0-9 ]*)PRIVATE KEY-----.*?(-----END \1PRIVATE KEY-----|\Z)"
KNOWN_KEY = r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|AIza|wandb_v\d_)[\w-]{12,}"
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), HIDDEN),  # user:password of a URL
    (re.compile(ASSIGNMENT, re.IGNORECASE), rf"\1{HIDDEN}"),  # in a query or a command line
    (re.compile(HEADER, re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(KNOWN_KEY), HIDDEN),
    (re.compile(PRIVATE_KEY, re.DOTALL), HIDDEN),
)
SHORTEST = 8  # characters that a secret environment variable needs to be hidden in other texts


def redact(value: Any) -> Any:
    """Return a copy of plain settings in which passwords, keys and tokens are replaced by `***`.

    This hides texts under the name of a secret, also in JSON inside of a text, all values of an
    `environment`, credentials in URLs and command lines, PEM's private keys, texts that look like a
    well-known key, and the values of secret environment variables.
    """
    return redact_known(value, list_secret_values())


def redact_known(value: Any, known: list[str]) -> Any:
    """Return a copy without secrets, see `redact`; `known` are secret texts."""
    if isinstance(value, dict):
        return {
            name: hide_values(item) if is_secret(name, item) else redact_known(item, known)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        flags = [isinstance(word, str) and word.startswith("-") and is_secret(word, "") for word in value]
        after_flag = [False, *flags]  # the word after --api-key
        words = zip(value, after_flag, strict=False)
        return [HIDDEN if secret else redact_known(item, known) for item, secret in words]
    if not isinstance(value, str):
        return value
    for text in known:
        value = value.replace(text, HIDDEN)
    for pattern, replacement in PATTERNS:
        value = pattern.sub(replacement, value)
    return PAIR.sub(hide_pair, value)


def hide_pair(pair: re.Match[str]) -> str:
    """Return a pair of JSON, whose value may hold JSON, with the values of secrets hidden."""
    is_hidden = SECRET_NAME.search(pair["name"]) is not None
    return pair["head"] + (HIDDEN if is_hidden else PAIR.sub(hide_pair, pair["value"]))


def is_secret(name: Any, value: Any) -> bool:
    """Return whether a setting is secret by its name. A number may be a password, but no token or key."""
    named = SECRET_NAME.search(str(name)) is not None
    number = isinstance(value, int) and "pass" in str(name).lower()
    named = named and (isinstance(value, (str, dict, list)) or number)
    return named or (name in ("environment", "env") and bool(value))


def hide_values(value: Any) -> Any:
    """Return a secret setting with its names but without its values."""
    return dict.fromkeys(value, HIDDEN) if isinstance(value, dict) else HIDDEN


def list_secret_values() -> list[str]:
    """Return the values of environment variables with the name of a secret, the longest first."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    return sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)
