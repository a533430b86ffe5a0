"""Run a benchmark before and after a change: the same sides from two checkouts, in turns, in one run.

    .venv/bin/python benchmarks/pairs.py --before REVISION --benchmark reward [--rounds 20] [--words '…']

Each checkout runs its own script with its own package, so both must do the same work; `tests/trajectories`
shows that they do for `step.py`. Of a script only the sides that are ours run, one at a time: before, after,
after, before, and so on. It prints the ratios after / before of seconds, of CPU seconds, which other work on
the machine disturbs less, and of peak memory. Each has the median over pairs with its 95 % confidence
interval, and the ratio of the two smallest values, which a busy machine disturbs least.

The revision is unpacked into a temporary folder, with this folder's side_by_side.py and, if it lacks the
script, the script. A folder in place of REVISION is used as it is.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from side_by_side import ROOT, SERVES, benchmark_parser, finish, read_options

# What runs of a benchmark: the sides that are this package.
OURS = {
    "reward": ["ours", "ours, both forwards"],
    "optimise": ["ours"],
    "memory": ["blocks"],
    "generate": ["ours"],
    "step": ["rlt_k1", "rlt_two_students", "opd_reverse"],
}
KEYS = ("seconds", "cpu_s", "peak_bytes")


class Checkout:
    """A process that runs a script of a checkout, one side at a time."""

    def __init__(self, folder: Path, script: str, words: Sequence[str]) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder), SERVES: "1"}
        command = [sys.executable, f"benchmarks/{script}.py", *words]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, side: str) -> dict[str, float]:
        """Run a side once."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(side, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(SERVES):
                result: dict[str, float] = json.loads(line.removeprefix(SERVES))
                return result
        raise SystemExit(f"The script has ended before it ran {side!r}: see its error above.")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def unpack(revision: str, script: str, folder: Path) -> Path:
    """Return the folder of a revision's files, with what the script needs here."""
    if Path(revision).is_dir():
        return Path(revision).resolve()
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    for name in ("side_by_side", script):
        path = folder / "benchmarks" / f"{name}.py"
        if name != script or not path.exists():
            shutil.copy(ROOT / "benchmarks" / path.name, path)
    return folder


def divide(after: float, before: float) -> float:
    """Return the ratio; memory of a tiny size may not rise at all."""
    return after / (before or 1e-9)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the two ordered ratios between which the true one is with 95 %.

    The number of pairs below the true median is binomial, whatever the distribution. With fewer than six
    pairs the interval is all of them, and less certain.
    """
    ordered, n = sorted(ratios), len(ratios)
    below = 0
    while 2 * sum(math.comb(n, k) for k in range(below + 1)) / 2**n <= 0.05:
        below += 1
    lowest = max(0, below - 1)
    return statistics.median(ordered), ordered[lowest], ordered[n - 1 - lowest]


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=20)
    parser.add_argument("--before", default="HEAD", help="revision or folder")
    parser.add_argument("--benchmark", choices=list(OURS), default="step")
    parser.add_argument("--sides", nargs="+", help="of the benchmark; by default ours")
    parser.add_argument("--words", default="", help="options of the benchmark")
    options = read_options(parser, before=str(ROOT), benchmark="memory", words="--tiny")
    names = options.sides or OURS[options.benchmark]
    pairs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        before = unpack(options.before, options.benchmark, Path(scratch))
        words = shlex.split(options.words)
        checkouts = {
            "before": Checkout(before, options.benchmark, words),
            "after": Checkout(ROOT, options.benchmark, words),
        }
        for number in range(1 + options.rounds):
            for name in names:
                order = list(checkouts) if number % 2 else list(checkouts)[::-1]
                pair = {when: checkouts[when].run(name) for when in order}
                if number:  # the first one warms up
                    pairs[name].append(pair)
                    print(f"pair {number}: {name} {pair}", flush=True)
        for checkout in checkouts.values():
            checkout.close()
    figures: dict[str, float] = {}
    for name, found in pairs.items():
        for key in KEYS:
            ratios = [divide(pair["after"][key], pair["before"][key]) for pair in found]
            median, low, high = interval(ratios)
            least = divide(*(min(pair[when][key] for pair in found) for when in ("after", "before")))
            slug = re.sub(r"[^a-z0-9]+", "_", name.lower())
            figures |= {f"{slug}_{key}": median, f"{slug}_{key}_least": least}
            print(f"{name}, {key}: {median:.3f} ({low:.3f} to {high:.3f}), least {least:.3f}")
    settings = {key: str(value) for key, value in vars(options).items() if key != "output"}
    finish(options.output, settings | {"pairs": pairs}, **figures)


if __name__ == "__main__":
    main()
