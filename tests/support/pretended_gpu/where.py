"""Find out which line is running: one of this package, or of a library that it calls."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

_spec = importlib.util.find_spec("rlt_lightning")
assert _spec is not None
assert _spec.submodule_search_locations is not None
PACKAGE = f"{_spec.submodule_search_locations[0]}/"
OURS = f"{Path(__file__).parent}/"
# Folders whose code calls the device or the other ranks by itself.
LIBRARIES = ("/lightning/", "/deepspeed/", "/transformers/", "/torch/")
# Of the package: what starts a run, above all else.
ENTRIES = ("cli/", "python/", "__main__.py")


class Place(NamedTuple):
    """A line: `modules/policy.py`, `log_step`, 431."""

    file: str
    function: str
    line: int

    @property
    def name(self) -> str:
        """Return the function, which stays where lines move."""
        return f"{self.file}:{self.function}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def find_place() -> Place:
    """Return the innermost line of the package that is running, else of a library, else of a test.

    Autograd's threads run no Python of ours.
    """
    frame, other, test = sys._getframe(1), None, None
    while frame is not None:
        path, function, line = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
        if path.startswith(PACKAGE) and not path.removeprefix(PACKAGE).startswith(ENTRIES):
            return Place(path.removeprefix(PACKAGE), function, line)
        library = next((name for name in LIBRARIES if name in path), None)
        if library and other is None and library != "/torch/":
            other = Place(library[1:] + path.rpartition(library)[2], function, line)
        if library is None and test is None and not path.startswith(OURS):
            test = Place(Path(path).name, function, line)
        frame = frame.f_back  # type: ignore[assignment]
    return other or test or Place("autograd", "", 0)
