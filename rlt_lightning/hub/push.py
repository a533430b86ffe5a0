"""`rlt push` and `export.push_to_hub`: publish a model or a distillation set on the Hugging Face hub.

    what is asked of the hub                       what a failure there leaves
    make the repository, private                   nothing
    is it as private as it was asked to be?        the repository, as it was
    check the card's header                        the same
    upload large files                             the same: nothing refers to them yet
    commit                                         the repository with the files before, or with all new ones

A push reads the run and changes nothing there, so that it can be repeated after any failure.

    push.py    what of a run is pushed, and what must never be
    cards.py   the card, completed by results, licence and commands
    client.py  the repository, the commit, and why one failed
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from rlt_lightning.checkpoints.card import CARD
from rlt_lightning.checkpoints.folder import list_checkpoints
from rlt_lightning.datamodules.evaluation_sets import CHOICE_COLUMNS, PRIVATE_SOURCES
from rlt_lightning.hub.cards import (
    SETTINGS,
    complete_data_card,
    complete_model_card,
    find_evaluations,
    format_settings,
    list_source_names,
)
from rlt_lightning.hub.client import Repository, commit, open_repository, read_header_on_hub
from rlt_lightning.run.data_card import TABLE
from rlt_lightning.run.folder import read_settings
from rlt_lightning.types import InputError, as_list

# The row of a data card that names the sources of its rows.
SOURCES = re.compile(r"^\| source \| (.+) \(\d+ usable rows\) \|$", re.MULTILINE)
MODEL_FILES = ("config.json", "adapter_config.json")  # one of them makes a folder a model


def push(
    run_dir: str,
    repo_id: str | None = None,
    data: bool = False,
    private: bool = True,
    evaluations: list[str] | str | None = None,
) -> None:
    """Publish the model of a run, or its distillation set, on the Hugging Face hub.

    The token is read from the environment variable HF_TOKEN, the address of the hub from HF_ENDPOINT.

    Args:
        run_dir: The run's folder, or a model folder.
        repo_id: The repository, USER/NAME, made if there is none; None: the run's export.push_to_hub.
        data: Push the distillation set instead of the model.
        private: Only you see the repository. False makes a new repository public, and is needed to push to a
            public one.
        evaluations: Folders of `rlt test` whose results the card shows; None: those beside the run that are
            of this model.

    Raises:
        InputError: If there is nothing to push, no token, or rows that must not be published.
        PushError: If the hub refuses or cannot be reached.
    """
    folder = Path(run_dir).expanduser()
    repository = (push_data if data else push_model)(folder, repo_id, private, as_list(evaluations))
    print(f"Done: {repository.url} ({'private' if repository.private else 'public'}), from {folder}")


def push_model(folder: Path, repo_id: str | None, private: bool, evaluations: list[str]) -> Repository:
    """Push the model of a run with its card and the run's settings; arguments as `push`."""
    model, run = find_model(folder)
    paths = [find_evaluation(name) for name in evaluations] or find_evaluations(run, model)
    if repo_id is None and run is not None:
        repo_id = (read_settings(run).get("export") or {}).get("push_to_hub")
    repository = open_repository(require_id(repo_id, f"rlt push {folder}"), "model", private)
    card = complete_model_card(model, run, repository.id, paths, partial(read_header_on_hub, repository))
    names = [path.relative_to(model) for path in sorted(model.rglob("*")) if path.is_file()]
    # The card is pushed as a text. Hidden files are not the model's.
    files = {str(name): model / name for name in names if str(name) != CARD and is_visible(name)}
    commit(repository, files, {CARD: card} | name_settings(run))
    print(f"Evaluations on the card: {', '.join(str(path.parent) for path in paths) or 'none'}")
    return repository


def push_data(folder: Path, repo_id: str | None, private: bool, evaluations: list[str]) -> Repository:
    """Push the distillation set of a run with its card and the run's settings; arguments as `push`."""
    if evaluations:
        raise InputError("--evaluations are of a model, but --data pushes a data set. Drop one of them.")
    require_data(folder)
    repository = open_repository(require_id(repo_id, f"rlt push {folder} --data"), "dataset", private)
    card = complete_data_card(folder, repository.id, partial(read_header_on_hub, repository))
    commit(repository, {TABLE: folder / TABLE}, {CARD: card} | name_settings(folder))
    return repository


# What is pushed, and what is not


def find_model(folder: Path) -> tuple[Path, Path | None]:
    """Return the model folder that a name stands for, and its run folder if it has one.

    Raises:
        InputError: If there is no model; the message says what makes one.
    """
    run: Path | None = folder
    model = folder / "model"
    if not is_model(model) and is_model(folder):
        model, parent = folder, folder.resolve().parent
        is_of_run = folder.resolve().name == "model" and (parent / "config.yaml").exists()
        run = parent if is_of_run else None
    if is_model(model):
        if not (model / CARD).is_file():
            raise InputError(f"A model needs a card to be pushed, but {model / CARD} is missing. Write it.")
        return model, run
    if list_checkpoints(folder / "checkpoints"):
        raise InputError(
            f"{folder} must have a model/ to be pushed, but has only checkpoints. Make it: rlt export "
            f"--ckpt_path {folder} --output_dir {folder / 'model'}"
        )
    if (folder / TABLE).exists():
        raise InputError(
            f"{folder} has no model, but a distillation set. To push it: rlt push {folder} --data"
        )
    raise InputError(
        f"rlt push needs the folder of a finished rlt fit, or a model folder, but {folder} is neither. Train "
        "first: rlt fit --config quickstart"
    )


def is_model(folder: Path) -> bool:
    """Return whether a folder holds a model or an adapter."""
    return any((folder / name).is_file() for name in MODEL_FILES)


def name_settings(run: Path | None) -> dict[str, str]:
    """Return the text of a run's settings by its name in a repository; nothing if they are not known."""
    return {} if run is None or not (run / "config.yaml").exists() else {SETTINGS: format_settings(run)}


def require_data(folder: Path) -> None:
    """Check that a folder holds a distillation set which may be published.

    Raises:
        InputError: If there is none, or its rows are of a set whose text must not be published.
    """
    missing = [name for name in (TABLE, CARD) if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} must hold a distillation set to be pushed, but has no {missing[0]}. Make one: "
            "rlt predict --config generate --model.teacher FOLDER"
        )
    require_public(folder)


def require_public(folder: Path) -> None:
    """Check that a distillation set holds no text of GPQA, whose authors ask not to publish it.

    Its rows are known by the names of their sources and by their columns, which a set keeps.

    Raises:
        InputError: If it does.
    """
    import pyarrow.parquet  # type: ignore[import-untyped]

    private = [name.rpartition("/")[2].lower() for name in PRIVATE_SOURCES]
    sources = list_origins(folder)
    named = [s for s in sources if any(name in s.rpartition("/")[2].lower() for name in private)]
    columns = set(pyarrow.parquet.read_schema(folder / TABLE).names)
    if named or columns >= set(CHOICE_COLUMNS):
        why = f"its source is {named[0]}" if named else "its rows have GPQA's columns"
        raise InputError(
            f"GPQA's rows must not be published, as their authors ask, but {folder} seems to hold some: "
            f"{why}. Make a set of other rows."
        )


def list_origins(folder: Path) -> list[str]:
    """Return the names of a set's sources; of one that another run here has made, its sources too.

    A script writes no config.yaml, but the data card of its set names the sources too.
    """
    found: list[str] = []
    folders = [folder.resolve()]
    for place in folders:  # which grows
        names = list_source_names(read_settings(place))
        if (place / CARD).is_file():
            recipe = SOURCES.findall((place / CARD).read_text(encoding="utf-8", errors="replace"))
            names += [name for line in recipe for name in line.split(", ")]
        found += names
        paths = (Path(name).expanduser().resolve() for name in names)
        beside = (path if path.is_dir() else path.parent for path in paths if path.exists())
        folders += [path for path in dict.fromkeys(beside) if (path / TABLE).exists() and path not in folders]
    return found


def find_evaluation(name: str) -> Path:
    """Return the results in a folder of `rlt test`.

    Raises:
        InputError: If it has none.
    """
    path = Path(name).expanduser() / "evaluation.json"
    if not path.is_file():
        raise InputError(
            f"--evaluations must name folders of rlt test, but {name} has no evaluation.json. Evaluate "
            "first: rlt test --config evaluate --model.pretrained FOLDER"
        )
    return path


def is_visible(name: Path) -> bool:
    """Return whether neither a file nor a folder that it lies in is hidden."""
    return not any(part.startswith(".") for part in name.parts)


def require_id(repo_id: str | None, command: str) -> str:
    """Return the repository that was named.

    Raises:
        InputError: If none was.
    """
    if repo_id is None:
        raise InputError(f"A push needs a repository: {command} --repo_id USER/NAME")
    return repo_id
