"""A folder of tokenised sources: written once by one process, then mapped into memory by all.

    KEY          a hash of rows, tokenizer, format, settings, and of the code that made the items
    KEY/         items.arrow, the items; report.json, the rows that are not used, and the system prompts
    KEY.tmp/     is being written; a killed process leaves it behind, and the next writer deletes it
    KEY.lock     held by the process that writes; the operating system frees it however the process ends

An entry gets its name only when all of it is on the disk. So there are no half entries.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from filelock import FileLock

from rlt_lightning.datamodules.bad_rows import BadRowReport
from rlt_lightning.datamodules.stored import ItemTable, StoredItems
from rlt_lightning.models.announce import announce
from rlt_lightning.models.embedded import cache_folder
from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.types import InputError

ITEMS, REPORT = "items.arrow", "report.json"
UNUSED_DAYS = 60  # after which an entry is deleted


@dataclass
class Tokenised:
    """What became of the rows of one source.

    Attributes:
        report: The rows that are not used.
        table: The items.
        prompts: The system prompts under which the student sees rows, with their numbers in the table.
        last_row: Number of the source's last row.
    """

    report: BadRowReport
    table: ItemTable = field(default_factory=lambda: ItemTable([]))
    prompts: dict[str, int] = field(default_factory=dict)
    last_row: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return all but the table, for JSON."""
        return {"prompts": list(self.prompts), "last_row": self.last_row, "report": self.report.as_dict()}


# Yields record batches of the items; it fills in what it is given, which is complete after the last batch.
Make = Callable[[Tokenised], Iterator[Any]]


class TokenCache:
    """Tokenised sources by key.

    Args:
        folder: Where they lie; None: nowhere, and every process keeps its own in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, key: str, source: str, make: Make) -> Tokenised:
        """Return the entry of a key, and make it if there is none.

        What fits into one record batch is made within a second or two, and not written.

        Args:
            key: See `rlt_lightning.datamodules.keys`.
            source: Name of the source, for messages.
            make: Makes the items.

        Raises:
            InputError: If the folder cannot be written, or an entry was damaged from outside.
        """
        made = Tokenised(BadRowReport(source, 0))
        if self.folder is None:
            made.table = ItemTable(list(make(made)))
            return made
        entry = self.folder / key
        if not entry.is_dir():
            batches = make(made)
            first = list(islice(batches, 2))
            if len(first) < 2:
                made.table = ItemTable(first)
                return made
            with writable(self.folder), contextlib.ExitStack() as stack:
                self.folder.mkdir(parents=True, exist_ok=True)
                with waiting_for(f"another process to tokenise {source} into {self.folder}"):
                    stack.enter_context(FileLock(f"{entry}.lock"))
                # Another process may have made it while this one waited for the lock.
                if not entry.is_dir():
                    write_entry(entry, made, chain(first, batches))
                    delete_unused(self.folder)
        with contextlib.suppress(OSError):  # a cache of another user, which this one only reads
            os.utime(entry)
        return read_entry(entry, source)


def write_entry(entry: Path, made: Tokenised, batches: Iterator[Any]) -> None:
    """Write an entry under another name, and rename it.

    Args:
        entry: The folder.
        made: What the last batch completes.
        batches: Record batches.
    """
    scratch = entry.with_name(f"{entry.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    first = next(batches)
    try:
        with (scratch / ITEMS).open("wb") as file:
            with pa.ipc.new_file(file, first.schema) as writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)
            flush(file)
        with (scratch / REPORT).open("w", encoding="utf-8") as file:
            json.dump(made.as_dict(), file)
            flush(file)
        scratch.rename(entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if (size := (entry / ITEMS).stat().st_size) > 10**8:
        announce(f"tokenised {made.report.source} into {entry} ({size / 1e9:.1f} GB), for later starts too")


def flush(file: Any) -> None:
    """Wait until a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def read_entry(entry: Path, source: str) -> Tokenised:
    """Map an entry into memory; token ids are read from the disk when they are needed.

    Raises:
        InputError: If it is not as it was written.
    """
    try:
        found = json.loads((entry / REPORT).read_text(encoding="utf-8"))
        reader = pa.ipc.open_file(pa.memory_map(str(entry / ITEMS)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        report = BadRowReport.of_dict({**found["report"], "source": source})
        prompts = {prompt: number for number, prompt in enumerate(found["prompts"])}
        return Tokenised(report, ItemTable(batches), prompts, found["last_row"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"The tokenised rows in {entry} must be as they were written, but are not "
            f"({' '.join(str(error).split())[:200]}). Delete this folder: the run then makes it again."
        ) from error


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Name the settings that choose the folder if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"The folder of tokenised rows, {folder}, must be writable and have room, but is not ({error}). "
            "Set data.token_cache to another folder, or to false: each process then keeps its own."
        ) from error


def delete_unused(folder: Path) -> None:
    """Delete what was not used for `UNUSED_DAYS`: entries, and what killed processes left behind."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process deletes it too, or it is another user's
            # A user's folder may hold other files, which are not ours to delete.
            if re.match(r"[0-9a-f]{32}(\W|$)", path.name) and path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def token_folder(setting: bool | str) -> Path | None:
    """Return the folder that `data.token_cache` chooses; None for none."""
    if isinstance(setting, bool):
        return cache_folder() / "tokens" if setting else None
    return Path(setting).expanduser()


def items_of(parts: list[Tokenised]) -> StoredItems:
    """Return the items of all sources."""
    return StoredItems([part.table for part in parts], [part.report.first_row for part in parts])


def system_prompts_of(items: StoredItems, parts: list[Tokenised]) -> Counter[str]:
    """Return the system prompts under which the student sees items of these sources, counted."""
    prompts = [list(part.prompts) for part in parts]
    places = zip(items.sources.tolist(), items.numbers("prompt").tolist(), strict=True)
    return Counter(prompts[source][number] for source, number in places)
