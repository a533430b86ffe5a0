"""How long the command line takes to start, against importing Lightning, which it needs.

.venv/bin/python benchmarks/startup.py [--rounds 5]
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from side_by_side import alternate, bars, benchmark_parser, finish, read_options

GOAL = 1.25
COMMANDS = {
    "import\nlightning": ["-c", "import lightning.pytorch, lightning.pytorch.cli"],
    "rlt fit\n--help-all": ["-m", "rlt_lightning", "fit", "--help-all"],
    "rlt --help": ["-m", "rlt_lightning", "--help"],
}


def side(arguments: list[str]) -> Any:
    def run() -> dict[str, float]:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return {"seconds": time.perf_counter() - start}

    return run


def main() -> None:
    options = read_options(benchmark_parser(__doc__))
    sides = {name: side(command) for name, command in COMMANDS.items()}
    results = alternate(sides, options.rounds, warm_up=0 if options.tiny else 1)
    alternative, fit_help, help_alone = (result["seconds"] for result in results.values())
    finish(
        options.output,
        {name.replace("\n", " "): result for name, result in results.items()},
        lambda: bars(options.output, "start-up", {"seconds": {n: r["seconds"] for n, r in results.items()}}),
        ratio=fit_help / alternative,
        goal=GOAL,
        help_s=help_alone,
    )


if __name__ == "__main__":
    main()
