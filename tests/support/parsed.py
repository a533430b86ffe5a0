"""Commands of pages and configs, read by the verbs' parsers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from commands import ROOT
from jsonargparse import ArgumentParser, capture_parser

from rlt_lightning.cli import main as cli
from rlt_lightning.cli import shared_settings, stages
from rlt_lightning.commands.demo import build_demo_parser
from rlt_lightning.run.shipped import find_config

VERBS = [*stages.TRAINER_VERBS, *shared_settings.COMMANDS, *cli.COMMANDS]


STANDS_FOR = dict.fromkeys(("RUN/config.yaml", "NAME"), "laptop/rlt")
# Files of the checkout that commands name.
STANDS_FOR |= {str(path.relative_to(ROOT)): str(path) for path in (ROOT / "research/configs").glob("*.yaml")}


@cache
def parser_of(verb: str) -> ArgumentParser:
    arguments, sys.argv = sys.argv, ["rlt", verb]
    try:
        return capture_parser(cli.run)
    finally:
        sys.argv = arguments


def check_rlt(arguments: list[str], files: Path) -> None:
    """Let the real parser read a command line."""
    verb, *options = arguments
    if verb == "configs":  # run by tests/docs/test_install.py
        find_config(STANDS_FOR.get(options[0], options[0]) if options else "laptop/rlt")
        return
    if verb == "report":  # names folders that must exist: run by the test of the first page
        return
    if verb == "demo":  # run by tests/docs/test_install.py
        build_demo_parser().parse_args(options)
        return
    options = [str(files / option) if (files / option).is_file() else option for option in options]
    assert verb in VERBS, f"rlt has no verb {verb}"
    options = [STANDS_FOR.get(option, option) for option in options]
    if verb in cli.POSITIONAL and not options[0].startswith("-"):
        options[0] = f"--{cli.POSITIONAL[verb]}={options[0]}"
    settings_verb = "fit" if verb in shared_settings.COMMANDS else verb
    words = options if verb in cli.COMMANDS else [settings_verb, *options]
    before, sys.argv = sys.argv, ["rlt", verb]
    sys.path.insert(0, str(files))
    try:
        parser_of(verb).parse_args(words)
    except SystemExit as end:
        if end.code:  # 0: a help has been printed
            pytest.fail(f"rlt {' '.join(arguments)} is refused")
    finally:
        sys.path.remove(str(files))
        sys.argv = before
