"""Write rlt_lightning/cli/options.json, which help, tab completion and suggestions read."""

from __future__ import annotations

from rlt_lightning.cli.configs import build_configs_parser
from rlt_lightning.cli.help import TABLE
from rlt_lightning.cli.options import format_table, make_table
from rlt_lightning.demo.command import build_demo_parser


def write_table() -> str:
    """Return the table of today's parsers as JSON."""
    return format_table(make_table({"configs": build_configs_parser(), "demo": build_demo_parser()}))


if __name__ == "__main__":
    TABLE.write_text(write_table())
    print(TABLE)
