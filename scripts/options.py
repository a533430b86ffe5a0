"""Write rlt_lightning/cli/options.json, which help, tab completion and suggestions read."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from jsonargparse import capture_parser

from rlt_lightning.cli.configs import build_configs_parser
from rlt_lightning.cli.help import TABLE, VERBS
from rlt_lightning.cli.main import COMMAND_LINES, run
from rlt_lightning.cli.options import find_verb_parser, format_table, make_table
from rlt_lightning.commands.demo import build_demo_parser

LIGHT = {
    "configs": build_configs_parser,
    "demo": build_demo_parser,
    "completion": ArgumentParser,
}


def make_parser(verb: str) -> ArgumentParser:
    """Return the parser of a verb."""
    if verb in LIGHT:
        return LIGHT[verb]()
    before, sys.argv = sys.argv, ["rlt", verb, *(["miniature"] if verb in ("teach", "push") else [])]
    try:
        parser = capture_parser(run)
    finally:
        sys.argv = before
    shared = COMMAND_LINES.get(verb)
    return find_verb_parser(parser, shared.settings_verb if shared else verb)


def write_table() -> str:
    """Return the table of today's parsers as JSON."""
    return format_table(make_table({verb: make_parser(verb) for verb in VERBS}))


if __name__ == "__main__":
    TABLE.write_text(write_table())
    print(TABLE)
