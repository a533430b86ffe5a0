"""The command line, `rlt`."""

from rlt_lightning.cli.main import run

__all__ = ["run"]
