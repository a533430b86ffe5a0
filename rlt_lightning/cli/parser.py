"""The parser of the verbs: Lightning's, in which a shipped config's name stands for its file."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any, NoReturn

import jsonargparse
import jsonargparse._typehints as typehints
import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.run.shipped import list_shipped_configs

# Lines of jsonargparse's messages that say nothing of a setting.
NOISE = re.compile(r"\n\s*(Does not validate|Subtypes:|Errors:|Given value|- Expected a .*NoneType).*")
# It keeps what fits of the arguments of a class that another one replaces, also its defaults, which nobody
# set (https://github.com/mauvilsa/jsonargparse/issues/460, open). No setting of jsonargparse changes that.
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
# Defaults of Lightning's callbacks: Timer's interval, a device of StochasticWeightAveraging.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))
register_type(torch.device)
load_yaml = jsonargparse.get_loader("yaml")


def load_value(text: str) -> Any:
    """Load YAML, in which a path such as `runs/a: b/model` is text and no mapping."""
    value = load_yaml(text)
    is_one_line = isinstance(value, dict) and "\n" not in text and not text.lstrip().startswith("{")
    return text if is_one_line and "/" in str(next(iter(value), "")) else value


jsonargparse.set_loader("yaml", load_value, (yaml.YAMLError,))


def replace_names(words: Sequence[str]) -> list[str]:
    """Return a command line with files for shipped configs' names, and PyTorch's optimizers for theirs.

    bitsandbytes has optimizers of the same names, so that jsonargparse would ask which is meant.
    """
    files: dict[str, Any] = list_shipped_configs()
    optimizers = {name: f"torch.optim.{name}" for name in dir(torch.optim)}
    names, replaced = {"--config": files, "-c": files, "--optimizer": optimizers}, list(words)
    for index, word in enumerate(words):
        option, _, value = word.rpartition("=")
        before = words[index - 1] if index and not option else option
        if found := names.get(before, {}).get(value):
            replaced[index] = f"{option}={found}" if option else str(found)
    return replaced


class ConfigParser(LightningArgumentParser):
    """Lightning's parser, which also takes the names of shipped configs and `--help-all`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # `--lr` would be `--lr_scheduler`.
        super().__init__(*args, **{"allow_abbrev": False} | options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *others: Any, **options: Any
    ) -> Namespace:
        """Parse a command line."""
        words = replace_names(sys.argv[1:] if args is None else args)
        words = ["--help" if word == "--help-all" else word for word in words]
        return super().parse_args(words, *others, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with one line; the usage of some hundred options would hide it."""
        if not self.exit_on_error:
            super().error(message, ex)
        line = " ".join(NOISE.sub("", message).split())
        print(f"rlt: error: {line} (options: --help-all; configs: rlt configs)", file=sys.stderr)
        sys.exit(2)
