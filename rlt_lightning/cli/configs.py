"""`rlt configs`: list the configs that come with the package, show one, or copy it.

This file imports nothing heavy, so the verb answers at once.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rlt_lightning.cli.help import VERBS
from rlt_lightning.run.shipped import FOLDERS, find_config, list_shipped_configs, read_launch_line
from rlt_lightning.types import InputError


def run_configs(words: Sequence[str]) -> None:
    """Run `rlt configs [NAME] [--copy DIR]`: list the shipped configs, show one, or copy it.

    Raises:
        InputError: If there is no config of that name, or a copy would replace a file.
    """
    options = build_configs_parser().parse_args(words)
    if options.name is None and options.copy is not None:
        raise InputError("--copy needs the name of a config: rlt configs NAME --copy DIR.")
    if options.name is None:
        print(list_configs())
    elif options.copy is None:
        print(find_config(options.name).read_text(), end="")
    else:
        print(copy_config(options.name, Path(options.copy)))


def build_configs_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlt configs`."""
    parser = argparse.ArgumentParser(prog="rlt configs", description=VERBS["configs"][1])
    parser.add_argument("name", metavar="NAME", nargs="?", help="such as laptop/rlt or add/lora")
    parser.add_argument("--copy", metavar="DIR", help="copy it there, with the configs of its launch line")
    return parser


def list_configs() -> str:
    """Return a table of the shipped configs by folder: verb, name, and the first line of each."""
    tables = {folder: [title] for folder, title in FOLDERS.items()}
    width = max(80, shutil.get_terminal_size((110, 24)).columns)
    for name, path in list_shipped_configs().items():
        text = path.read_text()
        first_line = text.partition("\n")[0].removeprefix("# ")
        folder = name.partition("/")[0]
        tables[folder].append(
            textwrap.fill(
                f"  {read_launch_line(text)[1]:8} {name:30} {first_line}", width, subsequent_indent=" " * 42
            )
        )
    end = "rlt configs NAME shows one; rlt configs NAME --copy DIR copies it, to change it."
    return "\n\n".join([*("\n".join(lines) for lines in tables.values()), end])


def copy_config(name: str, folder: Path) -> str:
    """Copy a shipped config, with the other configs of its launch line, and return what to do with them.

    Args:
        name: Name of a config.
        folder: Where the copies go, each into a folder such as laptop/. It is made.

    Raises:
        InputError: If there is no config of that name, a file is in the way, or the folder cannot be written.
    """
    files = list_shipped_configs()
    if name not in files:
        find_config(name)
        raise InputError(f"--copy takes the name of a config of the package, but {name} is a file. Copy it.")
    words = read_launch_line(files[name].read_text())
    copies = {word: folder / f"{word}.yaml" for word in words if word in files}
    if taken := [path for path in copies.values() if path.exists()]:
        raise InputError(f"A copy must not replace a file, but {taken[0]} is there. Choose another folder.")
    try:
        for word, path in copies.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files[word], path)
    except OSError as error:
        raise InputError(
            f"--copy must name a folder that can be written, but {folder} is none ({error.strerror}). Choose "
            "another."
        ) from error
    lines = [f"  {path}" for path in copies.values()]
    command = shlex.join([str(copies.get(word, word)) for word in words])
    return "\n".join(["Copied:", *lines, f"Run: {command}"])
