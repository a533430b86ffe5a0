"""Read what a run has sent to W&B from the files of offline runs.

wandb has no public reader of these files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768  # bytes


def read_run(path: Path) -> Iterator[Any]:
    """Yield the complete records of a .wandb file.

    The file has blocks of 32 KiB. A block has chunks, each after its checksum, length and kind.
    """
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if at % BLOCK > BLOCK - 7:  # no room for another chunk
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if not length or at + 7 + length > len(data):
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(record)
            record = b""


def nested(items: Any) -> dict[str, Any]:
    """Values of a history or configuration record by name."""
    found: dict[str, Any] = {}
    for item in items:
        *path, last = list(item.nested_key) or [item.key]
        place = found
        for name in path:
            place = place.setdefault(name, {})
        place[last] = json.loads(item.value_json)
    return found


class Run:
    """All that one process gave to W&B."""

    def __init__(self, folder: Path) -> None:
        [path] = folder.glob("*.wandb")
        records = list(read_run(path))
        self.config: dict[str, Any] = {}
        for record in records:
            if record.HasField("config"):
                self.config |= nested(record.config.update)
        self.history = [nested(r.history.item) for r in records if r.HasField("history")]
        self.alerts = [record.alert for record in records if record.HasField("alert")]
        self.folder = folder
        [run] = [record.run for record in records if record.HasField("run")][:1]
        self.id, self.name, self.group = run.run_id, run.display_name, run.run_group

    def scalars(self) -> dict[int, dict[str, float]]:
        """By iteration."""
        found: dict[int, dict[str, float]] = {}
        for row in self.history:
            numbers = {n: v for n, v in row.items() if not isinstance(v, dict) and n[0] != "_"}
            found.setdefault(numbers.pop("trainer/global_step"), {}).update(numbers)
        return found

    def table(self) -> list[dict[str, Any]]:
        """The last that was sent, which replaces those before it."""
        entry = [row["completions"] for row in self.history if "completions" in row][-1]
        table = json.loads((self.folder / "files" / entry["path"]).read_text())
        assert entry["nrows"] == len(table["data"])
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def runs_in(folder: Path) -> list[Run]:
    return [Run(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]
