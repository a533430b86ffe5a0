"""Compare the figures that pages quote with the files that benchmarks wrote: docs/benchmarks/quotes.yaml.

scripts/quote_figures.py           lists the differences, and exits with status 1 if there are any
scripts/quote_figures.py --write   puts the files' figures into the pages
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"\{(?:(\w+) )?([^/{}]+)/([^{}:]+):([^{}]+)\}")  # unit, file, keys, format
# What a place in a page may hold: a commit, a date or a figure; – is not measured yet.
NUMBER = r"(?:[0-9a-f]{7}|\d{4}-\d\d-\d\d|-?\d[\d.]*(?:e[-+]?\d+)?|–)"
UNITS: dict[str | None, Callable[[float], float]] = {
    None: lambda value: value,
    "gib": lambda value: value / 2**30,
    "mib": lambda value: value / 2**20,
    "ms": lambda value: 1000 * value,
    "percent": lambda value: 100 * value,
    "more": lambda value: 100 * (value - 1),
    "inverse": lambda value: 1 / value,
}


def files_of(quote: str) -> set[str]:
    """Return the names of the files that a sentence's figures come from."""
    return {match[2] for match in PLACE.finditer(quote)}


def pattern_of(quote: str) -> re.Pattern[str]:
    """Return what finds a sentence whatever its figures are."""
    parts, end = [], 0
    for match in PLACE.finditer(quote):
        parts += [re.escape(quote[end : match.start()]), NUMBER]
        end = match.end()
    return re.compile("".join([*parts, re.escape(quote[end:])]))


def rendered(quote: str, folder: Path) -> str:
    """Return a sentence with the figures of the files."""

    def figure(match: re.Match[str]) -> str:
        value: Any = json.loads((folder / f"{match[2]}.json").read_text())
        for key in match[3].split("/"):
            value = value[key]
        return format(UNITS[match[1]](value), match[4])

    return PLACE.sub(figure, quote)


def differences(root: Path, write: bool) -> list[str]:
    """Return what is wrong with the pages; with `write`, correct their figures first.

    A sentence must be in its page exactly once. A file may be missing only while `unwritten` names it; – may
    then stand for a figure.
    """
    folder = root / "docs" / "benchmarks"
    table = yaml.safe_load((folder / "quotes.yaml").read_text())
    unwritten, wrong = set(table["unwritten"]), []
    wrong += [
        f"{name}.json exists: drop it from `unwritten`"
        for name in sorted(unwritten)
        if (folder / f"{name}.json").exists()
    ]
    for page, quotes in table["pages"].items():
        text = (root / page).read_text()
        for quote in quotes:
            found = pattern_of(quote).findall(text)
            missing = {name for name in files_of(quote) if not (folder / f"{name}.json").exists()}
            if len(found) != 1:
                wrong.append(f"{page} must say once, but says {len(found)} times: {quote}")
            elif missing - unwritten:
                wrong.append(
                    f"{page} quotes {', '.join(sorted(missing))}, of which there is no file: {quote}"
                )
            elif not missing and found[0] != (right := rendered(quote, folder)):
                if write:
                    text = text.replace(found[0], right)
                else:
                    wrong.append(f"{page} says '{found[0]}', but the files say '{right}'")
        if write:
            (root / page).write_text(text)
    return wrong


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    wrong = differences(ROOT, parser.parse_args().write)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
