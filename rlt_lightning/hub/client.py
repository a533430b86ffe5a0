"""Talk to the Hugging Face hub: open a repository, commit to it, and say in one line what went wrong.

The token comes from HF_TOKEN only. It is handed to the hub's client and never printed or written.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlt_lightning.checkpoints.card import CARD, Kind
from rlt_lightning.console import size_text, waiting_for
from rlt_lightning.types import InputError
from rlt_lightning.version import __version__

TOKEN = "HF_TOKEN"
# Files of an earlier model that transformers or peft would load in place of the new ones.
REPLACED = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")


class PushError(RuntimeError):
    """The hub refused a push or could not be reached. What was to be pushed is still there."""


@dataclass(frozen=True)
class Repository:
    """A repository of the hub that one may write to.

    Attributes:
        api: The hub's client, with the token.
        id: USER/NAME.
        kind: Whether it holds a model or a data set.
        private: Whether only its owner sees it.
    """

    api: Any
    id: str
    kind: Kind
    private: bool = True

    @property
    def url(self) -> str:
        """Return the address of its page."""
        return f"{self.api.endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.id}"


def open_repository(repo_id: str, kind: Kind, private: bool) -> Repository:
    """Make a repository if there is none, and check that one may write to it and who sees it.

    Raises:
        InputError: If the id or the environment cannot be, or a push that is meant to be private is not.
        PushError: If the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id):
        raise InputError(f"A repository of the hub must be USER/NAME, but is '{repo_id}'. Correct it.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(f"A repository must have a name that the hub takes: {error} Correct it.") from error
    if is_offline_mode():
        raise InputError(
            "A push needs the hub, but HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE keeps this process from it. "
            "Unset it, and repeat the push."
        )
    token = read_token()
    api = HfApi(token=token, library_name="rlt_lightning", library_version=__version__)
    repository = Repository(api, repo_id, kind)
    with explain_failures(repository):
        make_repository(repository, private)
        is_private = bool(api.repo_info(repo_id, repo_type=kind).private)
    if private and not is_private:
        raise InputError(
            f"{repository.url} is public, but a push is private unless you say otherwise. Name another "
            "repository, or let everybody see what is pushed: --private false (in a run: export.private)."
        )
    return replace(repository, private=is_private)


def read_token() -> str:
    """Return the token of the environment, which may write.

    Raises:
        InputError: If there is none, or it cannot be one.
    """
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise InputError(
            f"A push needs a token that may write, in the environment variable {TOKEN}, which is not set. "
            "Make one under Access Tokens in your settings on the hub, and export it."
        )
    if not re.fullmatch(r"[!-~]+", token):
        # The hub's client would name it in its error, line ends escaped, so that nothing could hide it.
        raise InputError(
            f"The environment variable {TOKEN} must hold one token, but has spaces, line ends or letters "
            "that no token has. Correct it."
        )
    return token


def make_repository(repository: Repository, private: bool) -> None:
    """Make a repository; one that exists must be one's own, or be open to this token."""
    from huggingface_hub.errors import HfHubHTTPError

    api = repository.api
    try:
        api.create_repo(repository.id, repo_type=repository.kind, private=private)
    except HfHubHTTPError as error:
        status = find_status(error)
        if status == 409:  # it exists, in a namespace where this token may make one
            return
        if status not in (401, 402, 403):
            raise
        # A token for one repository may write there, and yet make none.
        try:
            api.auth_check(repository.id, repo_type=repository.kind, write=True)
        except HfHubHTTPError:
            raise error from None


def commit(repository: Repository, files: dict[str, Path], texts: dict[str, str]) -> None:
    """Upload files and texts under their names, and delete what an earlier model left, all in one commit.

    Raises:
        PushError: If the hub refuses or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api, kind = repository.api, repository.kind
    size = size_text(sum(path.stat().st_size for path in files.values()))
    what = f"{repository.url} to take {size}"
    with explain_failures(repository), show_bars_on_terminals(), waiting_for(what, on_terminal=False):
        operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        operations += [CommitOperationAdd(name, text.encode()) for name, text in texts.items()]
        if kind == "model":
            old = set(api.list_repo_files(repository.id, repo_type=kind)) - files.keys()
            operations += [CommitOperationDelete(name) for name in sorted(old) if is_replaced(name)]
        message = f"Push with rlt_lightning {__version__}"
        api.create_commit(repository.id, operations, commit_message=message, repo_type=kind)


@contextmanager
def show_bars_on_terminals() -> Iterator[None]:
    """Show the hub's bars of uploads only on a terminal: a log gets the lines of `waiting_for`."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def is_replaced(name: str) -> bool:
    """Return whether a push of a model replaces this file, or deletes it where the model has none."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in REPLACED)


def read_header_on_hub(repository: Repository, name: str) -> dict[str, Any]:
    """Return the header of a card on the hub, of the same kind as the repository; empty if it has none.

    It only adds to a card: what could not be read is said by who needs it, and no reason to fail a push.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        data = repository.api.repo_info(name, repo_type=repository.kind).card_data
    except (HTTPError, HFValidationError, OSError):
        return {}
    return data.to_dict() if data is not None else {}


@contextmanager
def explain_failures(repository: Repository) -> Iterator[None]:
    """Turn a failure of the block into one line that says what to do; the token is never part of it."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    # Uploads wrap a failure in a RuntimeError, and a refused header comes as a ValueError.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise PushError(
            f"{explain_failure(error, repository)} Then push again: nothing here has changed."
        ) from error


def explain_failure(error: BaseException, repository: Repository) -> str:
    """Return why the hub did not take a push, and what to do."""
    cause: BaseException = error
    while find_status(cause) is None and cause.__cause__ is not None:
        cause = cause.__cause__
    hub, status = repository.api.endpoint, find_status(cause)
    text = " ".join(str(cause if status else error).split()).partition(" For more information")[0]
    text = text.replace(repository.api.token, "***")[:300]
    if status == 401:
        return f"{hub} must accept the token in {TOKEN}, but does not (401). Make a new one that may write."
    if status in (403, 404):
        return (
            f"The token in {TOKEN} must be allowed to write to {repository.url}, but is not ({status}). Name "
            "a repository of your own, or use a token that may write there."
        )
    if "Invalid metadata" in str(error):
        return (
            f"The header of the card must be as the hub wants it, but is not ({text}). Correct it in {CARD}."
        )
    if status is not None:
        return f"{hub} must take {repository.id}, but refuses it ({text})."
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} must be readable, but is not ({error.strerror}). Correct that."
    return f"The hub {hub} must be within reach, but is not ({text or type(error).__name__})."


def find_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error is about; None if no answer came."""
    return getattr(getattr(error, "response", None), "status_code", None)
