"""Read what an offline W&B run has written, to resume it."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ITERATION = "iteration"  # the x axis of everything: optimizer steps taken, `step` in metrics.csv
BLOCK = 32768  # bytes, of a .wandb file


def read_run(path: Path) -> Iterator[Any]:
    """Yield the complete records of a .wandb file.

    The file has blocks of 32 KiB. A block has chunks, each after its checksum, length and kind.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

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


def iterations_in(path: Path) -> set[int]:
    """Return the iterations whose metrics a .wandb file holds."""
    found: set[int] = set()
    for record in read_run(path):
        values = {".".join(item.nested_key): item.value_json for item in record.history.item}
        if ITERATION in values and "perf/tokens_per_s" in values:  # only training logs both
            found.add(int(values[ITERATION]))
    return found


def kept_id(path: Path) -> str:
    """Return the run id in a file; if there is none, write a new id to it."""
    if not path.exists() or not path.read_text().strip():
        scratch = path.with_suffix(".tmp")
        scratch.write_text(secrets.token_hex(4) + "\n")
        scratch.replace(path)
    return path.read_text().strip()
