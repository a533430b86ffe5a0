"""Read every option off the parsers: for the table options.json, and for `rlt VERB --config NAME --help`.

make_table      the options of all verbs, and the arguments of the classes that they take
print_config    what `--config NAME --help` prints: the settings of the config's classes with their values
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import types
from argparse import Action, ArgumentParser
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.help import (
    MOST_LINES,
    VERBS,
    Option,
    name_group,
    print_groups,
    wrap_names,
    write_rows,
)

OWN = "rlt_lightning."
# Linked to other options, or the config itself.
NOT_SET = ("config", "data.tokenizer", "data.student_tokenizer", "data.num_samples")
KINDS: dict[Any, str] = {bool: "true|false", int: "INT", float: "FLOAT", str: "STR", Path: "STR"}
# What a parser has beside the options: helps, and files for a group of options.
OTHER_ACTIONS = ("_HelpAction", "_ActionHelpClassPath", "_ActionConfigLoad", "_ActionPrintConfig")


def make_table(parsers: dict[str, ArgumentParser]) -> dict[str, Any]:
    """Return the content of options.json: the options of every verb, and of the classes that they take.

    Args:
        parsers: The parser of each verb.
    """
    verbs = {verb: read_options(parser) for verb, parser in parsers.items()}
    classes: dict[str, list[Option]] = {}
    wanted = [path for options in verbs.values() for option in options for path in option.classes]
    for path in wanted:  # which grows
        if path not in classes:
            classes[path] = read_class(find_class(path))
            wanted += [other for option in classes[path] for other in option.classes]
    sections = {"verbs": verbs, "classes": dict(sorted(classes.items()))}
    return {title: write_rows(part) for title, part in sections.items()}


def format_table(table: dict[str, Any]) -> str:
    """Return the table as JSON with a line per option, so that changes are easy to read and to merge."""
    parts = []
    for title, section in table.items():
        owners = []
        for name, rows in section.items():
            lines = ",\n".join(f"   {json.dumps(row, ensure_ascii=False)}" for row in rows)
            owners.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        parts.append(f" {json.dumps(title)}: {{\n" + ",\n".join(owners) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def find_verb_parser(parser: Any, verb: str | None) -> ArgumentParser:
    """Return the parser of a verb inside that of the command line; itself if it has no verbs."""
    action = getattr(parser, "_subcommands_action", None)
    return parser if action is None else action.choices[verb]


def read_options(parser: ArgumentParser) -> list[Option]:
    """Return the options of a parser."""
    return [read_action(action) for action in parser._actions if is_option(action)]


def is_option(action: Action) -> bool:
    """Return whether this is an option and neither a help nor a file for several."""
    return bool(action.option_strings) and type(action).__name__ not in OTHER_ACTIONS


def read_action(action: Action) -> Option:
    """Return an option as its parser knows it."""
    [name, *_] = [word.lstrip("-") for word in action.option_strings if word.startswith("--")]
    if isinstance(action, ActionConfigFile):
        return Option(name, "CONFIG")
    hint = getattr(action, "_typehint", action.type or str)
    default = None if action.required else format_value(action.default)
    if action.choices is not None:
        return Option(name, "|".join(map(str, action.choices)), default, action.help or "")
    return Option(name, name_kind(hint), default, " ".join((action.help or "").split()), list_classes(hint))


@cache
def read_class(cls: type) -> list[Option]:
    """Return the arguments of a class."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, None, fail_untyped=False)
    return read_options(parser)


# Types and values in words


def split_union(hint: Any) -> list[Any]:
    """Return the types that a hint allows, without None."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [part for part in parts if part is not type(None)]


def name_kind(hint: Any) -> str:
    """Return what an option takes: INT, `true|false`, names between bars, or the name of a class."""
    words: list[str] = []
    for part in split_union(hint):
        origin = get_origin(part)
        if origin is Literal:
            words += map(str, get_args(part))
        elif part in KINDS:
            words.append(KINDS[part])
        elif isinstance(origin, type) and issubclass(origin, (list, tuple, set)):
            words.append("LIST")
        elif isinstance(origin, type) and issubclass(origin, dict):
            words.append("MAP")
        elif isinstance(part, type) and origin is None:
            number = next((base for base in (int, float, str) if issubclass(part, base)), None)
            words.append(KINDS[number] if number else part.__name__)
        else:
            words.append("LIST")
    return "|".join(dict.fromkeys(words)) or "STR"


def format_value(value: Any) -> str | None:
    """Return a value as a command line would give it; a class by its name; None for none."""
    if value is None or value == "==SUPPRESS==":
        return None
    if isinstance(value, Namespace) and "class_path" in value:
        return str(value.class_path).rpartition(".")[2]
    if isinstance(value, Namespace):
        return json.dumps(value.as_dict(), default=str, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(str(format_value(one)) for one in value)}]"
    if isinstance(value, dict):
        return json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, (int, float, str, Path)):
        return str(value) or "''"
    return type(value).__name__


@cache
def list_own_classes() -> dict[str, type]:
    """Return the classes that folders of this package export, by their paths."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parents[1])], OWN):
        if module.ispkg and hasattr(package := import_module(module.name), "__all__"):
            values = {name: getattr(package, name) for name in package.__all__}
            found |= {f"{module.name}.{n}": value for n, value in values.items() if isinstance(value, type)}
    return found


def list_classes(hint: Any) -> tuple[str, ...]:
    """Return the paths of this package's classes that a type allows."""
    found: list[str] = []
    for part in split_union(hint):
        if isinstance(part, type) and part.__module__.startswith(OWN):
            fitting = [path for path, own in list_own_classes().items() if fits(own, part)]
            found += fitting or ([f"{part.__module__}.{part.__name__}"] if is_dataclass(part) else [])
    return tuple(dict.fromkeys(found))


def fits(own: type, wanted: type) -> bool:
    """Return whether a class can be made where another is wanted, which may be a protocol."""
    if inspect.isabstract(own) or getattr(own, "_is_protocol", False):
        return False
    if getattr(wanted, "_is_protocol", False):
        names = [name for name, f in vars(wanted).items() if callable(f) and not name.startswith("_")]
        return all(callable(getattr(own, name, None)) for name in names)
    return issubclass(own, wanted)


def find_class(path: str) -> type:
    """Return the class of a path."""
    module, _, name = path.rpartition(".")
    found: type = getattr(import_module(module), name)
    return found


# The settings of a config


def print_config(parser: Any, verb: str, words: list[str]) -> None:
    """Print the settings of the classes that configs name, with their values.

    Args:
        parser: The parser of the command line.
        verb: The verb that was typed.
        words: The words that the parser reads, without --help.
    """
    values = parser.parse_args(words)
    settings_verb = values.get("subcommand")
    values = values[settings_verb] if settings_verb else values
    parser = find_verb_parser(parser, settings_verb)
    found = [*walk(read_options(parser), values)]
    given = {option.name: text for option, value, _ in found if (text := name_change(option, value))}
    common = [option.name for option, _, owner in found if owner and option.name in VERBS[verb].common]
    groups, others = group_settings(found, {*given, *common})
    lines = sum(2 + len(own) for own in groups.values()) + sum(
        wrap_names(n).count("\n") for n in others.values()
    )
    if lines > MOST_LINES - 6:
        groups, others = group_settings(found, {*given})
    print_groups(verb, [*groups.items()], given, others)


def name_change(option: Option, value: Any) -> str | None:
    """Return what a config has set an option to; None if it has its default, or is set by another one."""
    text = format_value(value)
    is_class = isinstance(value, Namespace) and option.name in ("model", "data")
    return None if is_class or option.name in NOT_SET or text == option.default else text


def group_settings(
    found: Iterable[tuple[Option, Any, str]], shown: set[str]
) -> tuple[dict[str, list[Option]], dict[str, list[str]]]:
    """Return the shown options by their headings, and the names of the others that a class has."""
    groups: dict[str, list[Option]] = {}
    others: dict[str, list[str]] = {}
    for option, _, owner in found:
        heading = name_group(option.name, [owner] if owner else [])
        if option.name in shown:
            groups.setdefault(heading, []).append(option)
        elif heading:
            others.setdefault(heading, []).append(option.name.partition(".")[2])
    return groups, others


def walk(
    options: Iterable[Option], values: Any, prefix: str = "", owner: str = ""
) -> Iterator[tuple[Option, Any, str]]:
    """Yield each option with its full name, its value and the class of model or data that has it."""
    for option in options:
        value = values.get(option.name)
        full = replace(option, name=prefix + option.name)
        if isinstance(value, Namespace) and "class_path" in value:
            cls = find_class(value.class_path)
            yield full, value, owner
            arguments = value.get("init_args", Namespace())
            yield from walk(read_class(cls), arguments, f"{full.name}.", owner or value.class_path)
        else:
            yield full, value, owner
