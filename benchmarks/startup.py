"""How long the command line takes to answer, against importing Lightning, which it cannot do without.

.venv/bin/python benchmarks/startup.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from side_by_side import alternate, bars, write

GOAL = 1.25
COMMANDS = {
    "import\nlightning": ["-c", "import lightning.pytorch, lightning.pytorch.cli"],
    "rlt fit\n--help": ["-m", "rlt_lightning", "fit", "--help"],
    "rlt --help": ["-m", "rlt_lightning", "--help"],
}


def side(arguments: list[str]) -> Any:
    def run() -> dict[str, float]:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return {"seconds": time.perf_counter() - start}

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/startup.json"))
    options = parser.parse_args()
    results = alternate({name: side(command) for name, command in COMMANDS.items()}, options.rounds)
    alternative, command, _ = (result["seconds"] for result in results.values())
    write(options.output, {name.replace("\n", " "): result for name, result in results.items()})
    bars(options.output, "start-up", {"seconds": {name: r["seconds"] for name, r in results.items()}})
    print(f"startup ratio={command / alternative:.3f} goal={GOAL}")


if __name__ == "__main__":
    main()
