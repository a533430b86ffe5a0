"""Entry point of `rlt`. It answers --version and --help at once, before anything heavy is imported."""

from __future__ import annotations

import io
import os
import signal
import sys

from rlt_lightning.allocator import grow_segments
from rlt_lightning.cli.configs import run_configs
from rlt_lightning.cli.help import (
    FIRST_RUN,
    HELPS,
    VERBS,
    print_main_help,
    print_verb_help,
    print_verbs,
    require_config,
    suggest_verb,
)
from rlt_lightning.commands.demo import run_demo
from rlt_lightning.types import InputError
from rlt_lightning.version import __version__

# Verbs with a parser of their own, which imports nothing heavy; they return the exit status.
LIGHT = {"demo": run_demo}


def main() -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a terminal's encoding cannot show must not end a run whose work is done.
        sys.stdout.reconfigure(errors="replace")
    if not arguments:
        print(FIRST_RUN, end="")
        print_verbs()
        return
    verb, words = arguments[0], arguments[1:]
    if verb in ("-h", "--help", "--help-all"):
        print_main_help()
        return
    if verb == "--version":
        print(f"rlt {__version__}")
        return
    if verb not in VERBS:
        print(f"rlt: error: {suggest_verb(verb)}", file=sys.stderr)
        sys.exit(2)
    asks_help = HELPS & set(words)
    if verb in LIGHT and not asks_help:
        sys.exit(LIGHT[verb](words))
    try:
        if asks_help:
            print_verb_help(verb)
        elif verb == "configs":
            run_configs(words)
        else:
            require_config(verb, words)
        sys.stdout.flush()
    except InputError as error:
        print(f"rlt: error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Its reader, such as `head`, has closed the pipe; Python must not try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    if asks_help or verb == "configs":
        return
    # A class_path may name a module in this folder, as with `python -m`. Last, so that it hides no other one.
    sys.path.append(os.getcwd())
    # Before the imports below, since torch is among them.
    grow_segments(os.environ)
    if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
        print("importing PyTorch and rlt_lightning, which takes some seconds", file=sys.stderr)
    try:
        from rlt_lightning.cli.main import run

        status = run()
    except KeyboardInterrupt:
        # During imports, or in a verb without a trainer. A trainer says how to resume.
        status = 128 + signal.SIGINT
    sys.exit(status)


if __name__ == "__main__":
    main()
