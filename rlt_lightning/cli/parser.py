"""Parse the command line; say what is wrong with it in one line."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.help import HELPS, print_settings
from rlt_lightning.cli.mistakes import explain_mistake
from rlt_lightning.engines import Engine
from rlt_lightning.run import ranks
from rlt_lightning.run.folder import remove_empty_folders
from rlt_lightning.run.shipped import find_config

# What may be meant as a config's name or file; anything else is YAML itself.
NAME = re.compile(r"[\w~./][\w./+-]*")
# The parser says this much and not why.
CLASS_FAULTS = re.compile("does not implement protocol|is abstract")


def condense_message(message: str) -> str:
    """Return a message as one line, with the reason in place of a parser's dump of nested alternatives."""
    # Each reason comes with the deeper lines that continue it.
    reasons = re.findall(
        r"^\s*- (?!Expected a <class 'NoneType'>|Does not validate)(.+(?:\n {8,}(?!- )\S.*)*)$",
        message,
        re.MULTILINE,
    )
    if "Does not validate against any of the Union subtypes" in message and reasons:
        place = re.match(r'Parser key "[^"]+":', message)
        value = re.search(r"Given value: (.+)$", message)
        # Any other reason says itself what came.
        plain = reasons[-1].startswith(("Expected a", "Import path does"))
        got = f". Got value: {value.group(1)}" if plain and value else ""
        fault = explain_class_fault(value.group(1)) if value and CLASS_FAULTS.search(reasons[-1]) else None
        message = (f"{place.group()} " if place else "") + (fault or reasons[-1] + got)
    text = re.sub(r"\s+", " ", message).strip().removeprefix("error: ")
    text = re.sub(r" - Expected a path but \S+ either not accessible or invalid - ", " ", text)
    if text.startswith(("Problems parsing config", "Unexpected config")):
        prefix, _, fault = text.partition(": ")
        fault = fault if prefix.startswith("Problems") else "Write KEY: VALUE."
        text = (
            f"Every --config must be a YAML file of settings, but {find_unreadable_config()} is not. {fault}"
        )
    return explain_mistake(text)


def split_words(words: list[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the words that belong to no option, and the options: ("--a=b",) or ("--a", "b")."""
    bare: list[str] = []
    options: list[tuple[str, ...]] = []
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            bare.append(word)
        else:
            options.append((word, *([] if "=" in word else islice(left, 1))))
    return bare, options


def replace_config_names(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with a file in place of each config's name.

    Raises:
        InputError: If a config is neither a file nor a name.
    """
    found = list(words)
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in ("--config", "-c"):
            continue
        if equals and NAME.fullmatch(value):
            found[place] = f"{option}={find_config(value)}"
        elif not equals and place + 1 < len(words) and NAME.fullmatch(words[place + 1]):
            found[place + 1] = str(find_config(words[place + 1]))
    return found


def find_unreadable_config() -> str:
    """Return the name of the first file of the command line that is not YAML with settings."""
    words = [word for argument in sys.argv for word in argument.split("=", 1)]
    for option, name in pairwise(words):
        if option == "--config" and Path(name).is_file():
            try:
                if isinstance(yaml.safe_load(Path(name).read_text()), dict):
                    continue
            except (yaml.YAMLError, UnicodeDecodeError):
                pass
            return name
    return "one"


def explain_class_fault(value: str) -> str | None:
    """Return why a user's class cannot be used where a setting names it; None if that is not known.

    Args:
        value: The setting as a message shows it: a class path, or a mapping with one.
    """
    path = re.search(r"class_path\W+([\w.]+)", value) or re.match(r"([\w.]+)$", value)
    if path is None:
        return None
    module, _, name = path.group(1).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type):
        return None
    if abstract := getattr(found, "__abstractmethods__", None):
        return (
            f"{path.group(1)} must have its base class's method(s) {', '.join(sorted(abstract))}. Write them."
        )
    wanted = {n: list_parameters(f) for n, f in vars(Engine).items() if callable(f) and not n.startswith("_")}
    missing = [n for n in wanted if not callable(getattr(found, n, None))]
    other = [n for n in wanted if n not in missing and list_parameters(getattr(found, n)) != wanted[n]]
    parts = [f"has no {', '.join(missing)}"] if missing else []
    parts += [f"has other parameters of {', '.join(other)}"] if other else []
    if parts:
        return (
            f"{path.group(1)} must have the methods of rlt_lightning.engines.Engine, but "
            f"{' and '.join(parts)}. Derive it from that class or from rlt_lightning.engines.ServedEngine, "
            "which have most of them, and write the rest."
        )
    # The parser compares annotations. It turns None into NoneType only where annotations are postponed.
    return (
        f"{path.group(1)} must annotate its methods as rlt_lightning.engines.Engine does, but does not. "
        "Copy the annotations, and put `from __future__ import annotations` on top of its file."
    )


def list_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a method's parameters."""
    return list(inspect.signature(function).parameters)


class OneLineParser(LightningArgumentParser):
    """A parser that knows the shipped configs by name and says in one line what is wrong with an argument."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *others: Any, **options: Any
    ) -> Namespace:
        """Parse a command line; the name of a shipped config stands for its file.

        `--help` shows what most people set, `--help-all` the parser's own help.
        """
        words = replace_config_names(sys.argv[1:] if args is None else args)
        # The parser of a verb gets the --help that --help-all has become.
        if HELPS & set(words) and getattr(self, "parent_parser", None) is None:
            # `rlt fit --help` without a config has been answered by __main__.
            from rlt_lightning.cli.options import print_config

            print_config(self, sys.argv[1], [word for word in words if word not in HELPS])
            sys.exit(0)
        if any(word.endswith(".help") for word in words) and print_settings(sys.argv[1], words):
            sys.exit(0)
        words = ["--help" if word == "--help-all" else word for word in words]
        return super().parse_args(words, *others, **options)

    def error(self, message: str, *args: Any) -> NoReturn:
        """Print the innermost reason and exit with status 2."""
        sys.exit(end_with_mistake(message))


def end_with_mistake(message: str, status: int = 2) -> int:
    """Print what went wrong in one line and return the exit status; with other ranks, end here with it."""
    remove_empty_folders()
    line = condense_message(message)
    if not ranks.is_one_of_several():
        print(f"rlt: error: {line}", file=sys.stderr)
        return status
    print(f"rlt: error: rank {ranks.find_global_rank()}: {line}", file=sys.stderr)
    ranks.end_process(status)
