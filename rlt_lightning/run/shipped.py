"""The configs that come with the package, found by name.

--config quickstart         the experiment configs/quickstart.yaml
--config overlays/lora      the overlay configs/overlays/lora.yaml
--config my.yaml            a file: it wins over a name
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from rlt_lightning.types import InputError

# A wheel holds them in the package, a checkout beside it.
PLACES = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")


RUN = "# Run: "


def list_shipped_configs() -> dict[str, Path]:
    """Return the shipped configs: file by name, experiments first; the name of an overlay has its folder."""
    folder = next(place for place in PLACES if place.is_dir())
    files = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*/*.yaml"))]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def find_config(name: str) -> Path:
    """Return the file of a config.

    Args:
        name: A file, or the name of a shipped config such as quickstart or overlays/lora. A file wins.

    Raises:
        InputError: If it is neither.
    """
    path = Path(name).expanduser()
    # Not is_file(): a pipe of the shell is a file too.
    if path.exists() and not path.is_dir():
        return path
    files = list_shipped_configs()
    if name in files:
        return files[name]
    raise InputError(
        f"A config must be a file or the name of one of the package, but '{name}' is neither."
        f"{suggest_names(name, files)} `rlt configs` lists the package's."
    )


def read_launch_line(text: str) -> list[str]:
    """Return the words of the command in the first lines of a config."""
    top = takewhile(lambda line: line.startswith("#"), text.splitlines())
    [line] = [line.removeprefix(RUN) for line in top if line.startswith(RUN)]
    return shlex.split(line)


def suggest_names(name: str, names: Iterable[str]) -> str:
    """Return a sentence with the names that a wrong one may mean; nothing if there are none."""
    ends = {known: known.rpartition("/")[2] for known in names}
    end = Path(name).stem
    near = get_close_matches(end, ends.values(), n=3, cutoff=0.7)
    found = [known for close in near for known, other in ends.items() if other == close]
    return f" Did you mean {' or '.join(found)}?" if found else ""
