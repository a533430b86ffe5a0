"""Data sets of the Hugging Face hub, copies of them in folders, and folders of `save_to_disk`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlt_lightning.models.announce import announce
from rlt_lightning.models.waiting import without_hub_retries
from rlt_lightning.types import InputError

SOURCE_CHOICES = (
    "'arithmetic' (the default), 'arithmetic:KIND' such as 'arithmetic:addition', 'chains', 'word_sums' or "
    "'countdown' (embedded), a .jsonl, .json, .parquet or .csv file, a folder of such files, or a Hugging "
    "Face data set id such as 'bespokelabs/Bespoke-Stratos-17k' or, with a configuration, 'openai/gsm8k:main'"
)

README, INFOS = "README.md", "dataset_infos.json"
POINTER = b"version https://git-lfs"  # begins the file that git keeps in place of a large one


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` has written a folder."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder is a data set as the hub keeps it: its card says which files are which."""
    if (folder / INFOS).is_file():
        return True
    readme = folder / README
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8", errors="replace")
    header = text.partition("\n---")[0] if text.startswith("---\n") else ""
    return any(line.startswith(("configs:", "dataset_info:")) for line in header.splitlines())


def load_hub(name: str, configuration: str, split: str, streaming: bool) -> Any:
    """Load a data set from the hub, or from a copy in a folder.

    Args:
        name: Hub id, or path of the copy.
        configuration: Which of its parts; '' if it has only one.
        split: Which of its splits.
        streaming: Read rows as they are asked for, rather than all of them before the first.

    Raises:
        InputError: If it cannot be loaded, with the library's reason.
    """
    import datasets

    from_where = "" if Path(name).is_dir() else " from the Hugging Face hub or its cache"
    announce(f"loading the data set {name}{configuration and f':{configuration}'}{from_where}")
    with loadable(name + (configuration and f":{configuration}"), split):
        require_no_pointers(Path(name))
        return datasets.load_dataset(name, configuration or None, split=split, streaming=streaming)


def rows_of(dataset: Any, name: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a data set, numbered from 1."""
    with loadable(name, split):
        yield from enumerate(dataset, start=1)


def version_of(name: str, configuration: str, split: str) -> str:
    """Return what a streamed data set of the hub is read from: the addresses of its files, with the commit.

    Raises:
        InputError: If it cannot be found.
    """
    import datasets

    with loadable(name, split):
        builder = datasets.load_dataset_builder(name, configuration or None)
        return f"{builder.hash} {builder.config.data_files}"


@contextlib.contextmanager
def loadable(name: str, split: str) -> Iterator[None]:
    """Turn a failure to load or read a data set into one line."""
    import datasets

    try:
        with without_hub_retries():
            yield
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"The data set '{name}', split '{split}', could not be loaded ({one_line(error)}). Check "
            f"data.split and the network, or use {SOURCE_CHOICES}."
        ) from error


def require_no_pointers(folder: Path) -> None:
    """Check that a folder that git has copied holds the files themselves.

    Raises:
        InputError: If it holds what git keeps in place of a large file.
    """
    for path in sorted(folder.rglob("*.parquet")):
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise InputError(
                    f"The file {path} must be a table, but is what git keeps in place of it. Run `git lfs "
                    f"pull` in {folder}, or copy the data set with `hf download`."
                )


def load_saved(folder: Path, split: str) -> Any:
    """Load what `save_to_disk` has written; an empty list for a set that was saved without rows.

    Raises:
        InputError: If it cannot be loaded, or lacks the split.
    """
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
    except IndexError:
        # The library fails on a set that was saved without rows.
        return []
    except (OSError, ValueError) as error:
        raise InputError(
            f"The saved data set {folder} must be loadable, but is not ({one_line(error)}). Save it again, "
            "or name another source."
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        raise InputError(
            f"The saved data set {folder} must have the split '{split}', but has {', '.join(dataset)}. "
            "Set data.split, or the split of an evaluation set."
        )
    return dataset[split]


def one_line(error: Exception) -> str:
    """Return the beginning of an error's text without its line ends."""
    return " ".join(str(error).split())[:200] or type(error).__name__
