"""Parse the command line; say what is wrong with it in one line."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from inspect import isabstract, isclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, get_args

import jsonargparse._typehints as typehints
from jsonargparse import Namespace
from jsonargparse._link_arguments import ActionLink
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.help import suggest_option
from rlt_lightning.run import ranks
from rlt_lightning.run.folder import remove_empty_folders
from rlt_lightning.run.shipped import find_config
from rlt_lightning.types import InputError

# What may be meant as a config's name or file; anything else is YAML itself.
NAME = re.compile(r"[\w~./][\w./+-]*")
OURS = "rlt_lightning."
# How jsonargparse names an option that does not exist.
UNKNOWN = re.compile(r"(?:unrecognized arguments: --|[Oo]ption ')([\w.]+)")
# Reasons that say what any class and any optional value is.
SAYS_NOTHING = "Expected a <class 'NoneType'>|Does not validate|Not a valid subclass|a class path|a dict with"


# What is meant by "Expected a <class 'int'>".
PLAIN_TYPES = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}

# Of jsonargparse 4: it keeps what fits of the arguments of a class that another one replaces.
keep_arguments = typehints.discard_init_args_on_class_path_change


def keep_chosen_arguments(parser: Any, before: Any, value: Any) -> None:
    """When another class is named, keep only arguments that somebody set, not the old class's defaults.

    Else `--model.reward LogProbReward` would have RLTReward's `kl_weight` and `reduction`.
    """
    arguments = before.get("init_args") if isinstance(before, Namespace) else None
    if arguments and before.class_path != value["class_path"]:
        defaults = typehints.ActionTypeHint.get_class_parser(before.class_path, {}).get_defaults()
        for name, argument in [*arguments.items()]:
            if argument == defaults.get(name):
                arguments.pop(name)
    keep_arguments(parser, before, value)


typehints.discard_init_args_on_class_path_change = keep_chosen_arguments

# Of jsonargparse 4: it overwrites, in silence, what somebody has set.
set_linked = ActionLink.set_target_value


def set_linked_unless_chosen(link: Any, value: Any, settings: Namespace, logger: Any) -> None:
    """Set a setting that follows from another one, unless somebody has set it to another value.

    Raises:
        InputError: If somebody has.
    """
    target, owner = link.target[0], link.target[1].dest
    chosen, kind = settings.get(target), settings.get(owner)
    if chosen not in (None, value):
        defaults = typehints.ActionTypeHint.get_class_parser(kind.class_path, {}).get_defaults()
        if chosen != defaults.get(target.rpartition(".")[2]):
            name, sources = target.replace(".init_args", ""), ", ".join(key for key, _ in link.source)
            raise InputError(f"{name} follows from {sources}, but is set to {chosen}. Remove it.")
    set_linked(link, value, settings, logger)


ActionLink.set_target_value = set_linked_unless_chosen  # type: ignore[method-assign,assignment]


def condense_message(message: str) -> str:
    """Return a parser's message as one line, with the reason in place of its list of alternatives."""
    # Each reason comes with the deeper lines that continue it.
    reasons = re.findall(
        rf"^\s*- (?!{SAYS_NOTHING})(.+(?:\n {{8,}}(?!- )\S.*)*)$",
        message,
        re.MULTILINE,
    )
    if "Does not validate against any of the Union subtypes" in message and reasons:
        place = re.match(r'Parser key "[^"]+":', message)
        value = re.search(r"Given value: (.+)$", message)
        got = f". Got value: {value.group(1)}" if value and reasons[-1].startswith("Expected a") else ""
        message = (f"{place.group()} " if place else "") + reasons[-1] + got
    message = re.sub(r"<class '(\w+)'>", lambda match: PLAIN_TYPES.get(match[1], match[1]), message)
    return re.sub(r"\s+", " ", message).strip()


def split_words(words: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]]]:
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
        InputError: If a config is neither a file nor a name, or a file without text.
    """
    replaced = list(words)
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in ("--config", "-c"):
            continue
        if equals and NAME.fullmatch(value):
            replaced[place] = f"{option}={require_text(find_config(value))}"
        elif not equals and place + 1 < len(words) and NAME.fullmatch(words[place + 1]):
            replaced[place + 1] = str(require_text(find_config(words[place + 1])))
    return replaced


def require_text(path: Path) -> Path:
    """Return the file of a config after checking that it is a text that is not empty.

    Raises:
        InputError: If it is empty or not in UTF-8: the parser's message would not name it.
    """
    try:
        # A pipe of the shell can be read only once.
        is_empty = path.is_file() and not path.read_text("utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(
            f"A config must be in UTF-8, but {path} is not ({error}). Save it as UTF-8."
        ) from error
    if is_empty:
        raise InputError(f"A config must have settings, but {path} is empty. Write them, or leave it out.")
    return path


class OneLineParser(LightningArgumentParser):
    """A parser that knows the shipped configs by name and says in one line what is wrong with an argument."""

    class_name = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        # `--lr` would be `--lr_scheduler`.
        super().__init__(*args, **{"allow_abbrev": False} | options)

    def add_class_arguments(self, class_type: type, *others: Any, **options: Any) -> list[str]:
        """Add the options of a class; the parser of one class, which adds no others, can then name it."""
        self.class_name = class_type.__name__
        return super().add_class_arguments(class_type, *others, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *others: Any, **options: Any
    ) -> Namespace:
        """Parse a command line; a shipped config's name stands for its file, `--help-all` for `--help`."""
        words = replace_config_names(sys.argv[1:] if args is None else args)
        words = ["--help" if word == "--help-all" else word for word in words]
        return super().parse_args(words, *others, **options)

    def error(self, message: str, *args: Any) -> NoReturn:
        """Print the innermost reason and exit with status 2."""
        if unknown := UNKNOWN.search(message):
            message = f"{message.strip()}.{suggest_option(unknown[1], list_options(self))}"
        if not self.exit_on_error and self.class_name:  # what jsonargparse makes for a class
            message = f"{self.class_name}: {condense_message(message)}"
        sys.exit(end_with_mistake(message))


def list_options(parser: ArgumentParser, within: tuple[type, ...] = ()) -> Iterator[str]:
    """Yield the options of a parser, its verbs and the classes of ours that it takes, without dashes."""
    verbs = getattr(parser, "_subcommands_action", None)
    for verb in verbs.choices.values() if verbs else ():
        yield from list_options(verb)
    for action in parser._actions:
        yield from (word[2:] for word in action.option_strings if word.startswith("--"))
        hint = getattr(action, "_typehint", None)
        classes = [
            cls for cls in (get_args(hint) or (hint,)) if isclass(cls) and cls.__module__.startswith(OURS)
        ]
        for leaf in (leaf for cls in classes for leaf in list_leaves(cls) if leaf not in within):
            inner = LightningArgumentParser(exit_on_error=False)
            inner.add_class_arguments(leaf, action.dest, fail_untyped=False)
            yield from list_options(inner, (*within, leaf))


def list_leaves(cls: type) -> Iterator[type]:
    """Yield a class and its subclasses, without abstract ones."""
    if not isabstract(cls):
        yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from list_leaves(subclass)


def end_with_mistake(message: str, status: int = 2) -> int:
    """Print what went wrong in one line and return the exit status; with other ranks, end here with it."""
    remove_empty_folders()
    line = condense_message(message)
    if not ranks.is_one_of_several():
        print(f"rlt: error: {line}", file=sys.stderr)
        return status
    print(f"rlt: error: rank {ranks.find_global_rank()}: {line}", file=sys.stderr)
    ranks.end_process(status)
