"""Say what is wrong with a command line: the option as typed, or its file, and the remedy.

A parser says "Option 'group_sise' is not accepted": neither where it stands nor what was meant.
Nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml

from rlt_lightning.cli.help import VERBS, Option, list_options, read_table, suggest_option
from rlt_lightning.run.shipped import list_shipped_configs, read_launch_line, suggest_names

UNKNOWN = (
    re.compile(r"Option '(?P<name>[^']+)' is not accepted"),
    re.compile(r"Subcommand '[^']+' does not accept option '(?P<name>[^']+)'"),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<name>[^']+)'"),
    re.compile(r"Key '(?P<name>[^']+)' is not expected"),
)
UNRECOGNISED = re.compile(r"unrecognized arguments: (?P<words>.*)")
VALUE = re.compile(
    r'(?:Parser key|argument) "(?P<name>[^"]+)": Expected an? (?P<type>.*?)\. Got value: (?P<value>.*)'
)
RESTRICTED = re.compile(r'(?:Parser key|argument) "(?P<name>[^"]+)": Not of type (?P<type>\w+): ')
NO_VALUE = re.compile(r"argument (?P<name>[^:]+): expected (?:one|at least one) argument")
NO_CLASS = re.compile(
    r'Parser key "(?P<name>[^"]+)": .*?(?:dot import path string: (?P<path>\S+?)(?:\.? Got value.*)?$'
    r"|given class_path '(?P<other>[^']+)':(?P<reason>.*))"
)
NESTED = re.compile(r'Parser key "(?P<name>[^"]+)":.*NestedArg\(key=\'(?P<key>[^\']+)\'')
OTHER_CLASS = re.compile(
    r'Parser key "model": Import path (?P<path>\S+) does not correspond to a subclass of'
)
REQUIRED = re.compile(r"the following arguments are required: (?P<names>.*?)\.?$")
MOST_NAMES = 20  # of a section, in a line
WORDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "STR": "a text",
    "LIST": "a list such as [a, b]",
    "MAP": "a mapping such as {a: b}",
    "true": "true or false",
}
TYPES = {"int": "INT", "float": "FLOAT", "bool": "true|false", "str": "STR"}


@dataclass(frozen=True)
class Place:
    """Where a user has written a setting.

    Attributes:
        name: Its full name, such as `model.group_sise`.
        file: The config that has it; empty: the command line.
    """

    name: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.name} in {self.file}" if self.file else f"--{self.name}"


class OneLineArguments(argparse.ArgumentParser):
    """The parser of a verb that imports nothing heavy; it says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Print the reason and exit with status 2."""
        print(f"rlt: error: {explain_mistake(message)}", file=sys.stderr)
        sys.exit(2)


def explain_mistake(text: str) -> str:
    """Return what is wrong with the command line, from the text of a parser in one line."""
    verb, words = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if verb not in VERBS:
        return text
    for pattern in UNKNOWN:
        if found := pattern.match(text):
            group = found.groupdict().get("group")
            return explain_unknown(
                verb, find_place(f"{group}.{found['name']}" if group else found["name"], words)
            )
    if found := UNRECOGNISED.match(text):
        return explain_unrecognised(verb, found["words"], words)
    if found := NESTED.match(text):
        return explain_nested(verb, f"{found['name']}.{found['key']}", words)
    if found := NO_CLASS.match(text):
        path, reason = found["path"] or found["other"], (found["reason"] or "").strip()
        return explain_class(verb, find_place(found["name"], words), path, reason)
    if found := VALUE.match(text):
        return explain_value(
            verb, find_place(found["name"], words, found["value"]), found["type"], found["value"]
        )
    if found := RESTRICTED.match(text):
        place = find_place(found["name"], words)
        return explain_value(verb, place, found["type"], find_value(place, words))
    if found := NO_VALUE.match(text):
        names = [name.strip().lstrip("-") for name in found["name"].split(",")]
        alone = [w for w, after in pairwise([*words, "--"]) if w.startswith("--") and after.startswith("--")]
        typed = [w for w in alone if w.lstrip("-").startswith(tuple(names)) and "=" not in w]
        return (
            f"{(typed or [f'--{names[-1]}'])[-1]} needs a value, but none follows.{hint_value(verb, typed)}"
        )
    if found := OTHER_CLASS.match(text):
        return explain_other_verb(verb, found["path"], words)
    if found := REQUIRED.match(text):
        return explain_required(verb, found["names"])
    return text


# Names


def explain_unknown(verb: str, place: Place) -> str:
    """Return that a setting does not exist, and which one may be meant."""
    known = [option.name for option, _ in list_options(verb)]
    name, dashes = place.name.removesuffix(".class_path"), "" if place.file else "--"
    near = suggest_option(name, known)
    section = name.rpartition(".")[0]
    beside = [
        option.rpartition(".")[2] for option in known if section and option.rpartition(".")[0] == section
    ]
    meant = f" Did you mean {' or '.join(dashes + option for option in near)}?" if near else ""
    if not near and 0 < len(beside) <= MOST_NAMES:
        meant = f" {section} has {', '.join(dict.fromkeys(beside))}."
    return f"rlt {verb} has no option {place}.{meant} {name_helps(verb)}"


def name_helps(verb: str) -> str:
    """Return where the options of a verb are listed."""
    return f"`rlt {verb} --help` shows the common options, --help-all all."


def explain_unrecognised(verb: str, rest: str, words: Sequence[str]) -> str:
    """Return what is wrong with words that the parser knows nothing of."""
    names = [word.partition("=")[0].lstrip("-") for word in rest.split() if word.startswith("-")]
    if names:
        return explain_unknown(verb, find_place(names[0], words))
    word = rest.split()[0]
    first = re.search(r"--[\w.]+", VERBS[verb].usage)
    if first and first.group() == "--config":
        files = list_shipped_configs()
        meant = (
            f" Did you mean --config {word}?"
            if word in files or Path(word).exists()
            else suggest_names(word, files)
        )
    else:
        meant = f" Did you mean {first.group()} {word}?" if first else ""
    return (
        f"Every option of rlt {verb} begins with --, but got {word}.{meant} Put a text with spaces between "
        "quotes."
    )


def explain_nested(verb: str, key: str, words: Sequence[str]) -> str:
    """Return that a setting of a class comes before the class, or that no class has it."""
    place = find_place(key, words)
    section, _, name = place.name.rpartition(".")
    takes = [option for option, _ in list_options(verb) if option.name == section]
    owners = [path for option in takes for path in option.classes if name in list_arguments(path)]
    if not owners:
        return explain_unknown(verb, place)
    return f"{place} needs the class that has it. Name it before: --{section} {owners[0]}"


def list_arguments(path: str) -> list[str]:
    """Return the names of a class's arguments."""
    return [row["name"].partition(".")[0] for row in read_table()["classes"].get(path, [])]


def explain_class(verb: str, place: Place, path: str, reason: str) -> str:
    """Return that there is no such class, why its import failed, and which may be meant."""
    takes = [option for option, _ in list_options(verb) if option.name == place.name]
    known = [path for option in takes for path in option.classes] or [*read_table()["classes"]]
    ends = {one.rpartition(".")[2]: one for one in known}
    near = get_close_matches(path.rpartition(".")[2], ends, n=2, cutoff=0.6)
    meant = f"Did you mean {' or '.join(ends[name] for name in near)}?" if near else f"Such as {known[0]}."
    why = f": {reason.rstrip('.')}" if reason else ""
    return f"{place} must name a class, such as package.module.Class, but {path} is none{why}. {meant}"


def explain_other_verb(verb: str, path: str, words: Sequence[str]) -> str:
    """Return that a config is for another verb."""
    name = next(
        (value for option, value in pairwise(split_equals(words)) if option in ("-c", "--config")), ""
    )
    shipped = list_shipped_configs()
    files = {str(file): key for key, file in shipped.items()}
    name = files.get(name, name)
    own = read_launch_line(shipped[name].read_text())[1] if name in shipped else ""
    other = own or ("test" if path.endswith("EvaluationModule") else "fit")
    return (
        f"The model of rlt {verb} cannot be {path}, which is for rlt {other}. Did you mean rlt {other} "
        f"--config {name}?"
    )


def explain_required(verb: str, names: str) -> str:
    """Return what a verb needs, and how it is written."""
    usage = f"rlt {verb} {VERBS[verb].usage}"
    configs = [name for option, name in pairwise(split_equals(sys.argv)) if option in ("-c", "--config")]
    if configs and all(name.startswith("overlays/") for name in configs):
        return (
            f"rlt {verb} needs an experiment below its overlays, but got {', '.join(configs)}: rlt {verb} "
            f"--config NAME --config {configs[0]}, with a name that `rlt configs` lists."
        )
    if "data" in names or "model" in names.split(", "):
        return (
            f"rlt {verb} needs an experiment, but got none: rlt {verb} --config NAME, with a name that "
            "`rlt configs` lists, or with a file of your own."
        )
    if verb == "report":
        return f"rlt report needs a run, the folder that --output_dir was: {usage}"
    missing = ", ".join(f"--{name.strip()}" for name in names.split(","))
    return f"rlt {verb} needs {missing}: {usage}"


# Values


def explain_value(verb: str, place: Place, expected: str, value: str) -> str:
    """Return what a setting takes, and what came."""
    options = [option for option, _ in list_options(verb) if option.name == place.name]
    kind = options[0].kind if options else read_kind(expected)
    choices = [word for word in kind.split("|") if not word[:1].isupper()]
    near = get_close_matches(value, choices, n=1, cutoff=0.5)
    meant = f" Did you mean {near[0]}?" if near else ""
    [default, *others] = {option.default for option in options} or {None}  # classes may differ in it
    known = f" The default is {default}." if default and not others else ""
    least = " of at least 0" if expected.startswith("NonNegative") else ""
    return f"{place} must be {describe_kind(kind)}{least}, but got {value!r}.{meant or known}"


def read_kind(expected: str) -> str:
    """Return what a parser's text of a type stands for."""
    if found := re.match(r"<class '(\w+)'>", expected):
        return TYPES.get(found[1], found[1])
    if found := re.search(r"Literal\[(.*)\]", expected):
        return "|".join(word.strip(" '\"") for word in found[1].split(","))
    return expected


def describe_kind(kind: str) -> str:
    """Return what an option takes, in words."""
    words = kind.split("|")
    if {"true", "false"} <= {*words}:
        words = ["true", *(word for word in words if word not in ("true", "false"))]
    choices = [word for word in words if word not in WORDS and not word[:1].isupper()]
    parts = [f"one of {', '.join(choices)}" if len(choices) > 1 else choice for choice in choices[:1]]
    parts += [WORDS.get(word, f"a class ({word})") for word in words if word not in choices]
    return " or ".join(dict.fromkeys(parts))


def hint_value(verb: str, typed: Sequence[str]) -> str:
    """Return what would follow an option that came without a value."""
    options = {option.name: option for option, _ in list_options(verb)}
    option = options.get(typed[-1].lstrip("-")) if typed else None
    return f" Give {describe_kind(option.kind)}: {typed[-1]} {sample_value(option)}" if option else ""


def sample_value(option: Option) -> str:
    """Return a value that an option takes."""
    return "true" if "true|false" in option.kind else option.default or option.kind.split("|")[0]


# Where it was written


def find_place(name: str, words: Sequence[str], value: str | None = None) -> Place:
    """Return where a setting is written of which a parser names the end, such as `optimizer.lr`.

    Args:
        name: The end of its name.
        words: The command line after the verb.
        value: Its value, if that is known.
    """
    for word in reversed(words):
        option = word.partition("=")[0].lstrip("-").replace(".init_args", "")
        if word.startswith("--") and (option == name or option.endswith(f".{name}")):
            return Place(option)
    for option, file in reversed([*pairwise(split_equals(words))]):
        if option in ("-c", "--config"):
            for key, found in list_settings(list_shipped_configs().get(file, Path(file))):
                fits = key == name or key.endswith(f".{name}")
                if fits and (value is None or str(found) == value):
                    return Place(key, file)
    return Place(name)


def find_value(place: Place, words: Sequence[str]) -> str:
    """Return the value that a user has written there."""
    if not place.file:
        return dict(pairwise(split_equals(words))).get(f"--{place.name}", "")
    return str(dict(list_settings(list_shipped_configs().get(place.file, Path(place.file)))).get(place.name))


def split_equals(words: Sequence[str]) -> list[str]:
    """Return words with `--a=b` as two."""
    return [part for word in words for part in word.split("=", 1)]


def list_settings(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the full name and value of each setting of a config; none of what is no file of settings."""
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # the parser has a message of its own for it
    if isinstance(settings, dict):
        yield from flatten(settings, "")


def flatten(settings: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a mapping; `init_args` is no part of a name."""
    for key, value in settings.items():
        name = prefix if key == "init_args" else f"{prefix}{'.' if prefix else ''}{str(key).rstrip('+')}"
        if key != "init_args":
            yield name, value
        if isinstance(value, dict):
            yield from flatten(value, name)
