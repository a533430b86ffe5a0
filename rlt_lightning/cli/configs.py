"""`rlt configs`: list the configs that come with the package, or show one. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rlt_lightning.run.shipped import FOLDERS, find_config, list_shipped_configs, read_launch_line
from rlt_lightning.types import InputError


def run_configs(words: Sequence[str]) -> int:
    """Run `rlt configs [NAME]`, and return 0.

    Raises:
        InputError: If there is no config of that name.
    """
    if len(words) > 1:
        raise InputError(f"rlt configs takes one name, but got {' '.join(words)}.")
    print(find_config(words[0]).read_text() if words else list_configs(), end="")
    return 0


def list_configs() -> str:
    """Return the shipped configs by folder: verb, name, and the first line of each."""
    lines = []
    for folder, title in FOLDERS.items():
        lines += ["", *wrap(title, 80)]
        for name, path in list_shipped_configs().items():
            if name.startswith(f"{folder}/"):
                text = path.read_text()
                first_line = text.partition("\n")[0].removeprefix("# ")
                lines.append(f"  {read_launch_line(text)[1]:8} {name}")
                lines += wrap(first_line, 80, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, "\nrlt configs NAME shows one; rlt configs NAME > my.yaml copies it.\n"])
