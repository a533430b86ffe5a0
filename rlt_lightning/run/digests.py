"""Digests of the files of a checkpoint or model folder: written with them, and checked before they are used.

    step=000006.ckpt/
      rank0.xxh128      of the files that rank 0 wrote, in the format of `xxh128sum`: digest, two spaces, path
      rank1.xxh128      of those that rank 1 wrote

XXH3 takes 0.16 s for a GiB on one core, SHA-256 1 s and BLAKE2b 2.3 s. It finds damage and mixed-up files. It
does not stop somebody who can write the folder: nothing in the folder could.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from rlt_lightning.types import InputError

SUFFIX = ".xxh128"


def write_digests(folder: Path, files: Iterable[Path], rank: int = 0) -> None:
    """Write the digests of files that this process has just written into a folder or below it."""
    lines = [f"{compute_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    with (folder / f"rank{rank}{SUFFIX}").open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def read_digests(folder: Path) -> dict[str, str]:
    """Return the digests of a folder's files by their names; empty if the folder has none."""
    lines = [
        line
        for path in sorted(folder.glob(f"*{SUFFIX}"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def require_digests(folder: Path, remedy: str, names: list[str] | None = None) -> None:
    """Check that the files of a folder are as they were written.

    Args:
        folder: The folder, with its digests.
        remedy: The end of the message.
        names: The files to check; None: all, and that there are no others.

    Raises:
        InputError: Naming the first file that is not.
    """
    digests = read_digests(folder)
    if names is None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        files = [path for path in files if path.suffix != SUFFIX and path.name[0] != "."]
        names = sorted({*digests, *(path.relative_to(folder).as_posix() for path in files)}) or ["any file"]
    for name in names:
        path = folder / name
        if not path.is_file():
            fault = "is missing"
        elif name not in digests:
            fault = f"has no digest in {folder}/*{SUFFIX}"
        elif compute_digest(path) != digests[name]:
            fault = "has another digest"
        else:
            continue
        raise InputError(f"Every file of {folder} must be as it was written, but {path} {fault}. {remedy}")


def compute_digest(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
