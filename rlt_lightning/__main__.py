"""Entry point of `rlt`. It answers --version and --help at once, before anything heavy is imported."""

from __future__ import annotations

import os
import signal
import sys

from rlt_lightning.cli.configs import run_configs
from rlt_lightning.cli.help import build_parser
from rlt_lightning.commands.demo import run_demo
from rlt_lightning.run.allocator import grow_segments
from rlt_lightning.types import InputError

# Verbs that import nothing heavy; they return the exit status.
LIGHT = {"demo": run_demo, "configs": run_configs}
# Verb -> the config that the message about a missing one proposes.
FIRST_CONFIGS = dict.fromkeys(("fit", "validate", "plan", "check"), "laptop/rlt") | {
    "predict": "laptop/generate",
    "test": "laptop/evaluate",
}


def main() -> None:
    """Run the command line and exit with its status."""
    parser = build_parser()
    arguments = sys.argv[1:]
    if not arguments:
        parser.print_help()
        return
    verb = parser.parse_known_args(arguments)[0].verb  # exits after a help text, or without a verb
    if verb in FIRST_CONFIGS and len(arguments) == 1:
        parser.error(f"--config is missing; try --config {FIRST_CONFIGS[verb]}. See rlt configs.")
    # A class_path may name a module in this folder, as with `python -m`. Last, so that it hides no other one.
    sys.path.append(os.getcwd())
    # Before the imports below, since torch is among them.
    grow_segments(os.environ)
    try:
        if verb in LIGHT:
            sys.exit(LIGHT[verb](arguments[1:]))
        from rlt_lightning.cli.main import run

        sys.exit(run())
    except InputError as error:  # of a light verb
        parser.error(str(error))
    except KeyboardInterrupt:  # during imports, or in a verb without a trainer
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
