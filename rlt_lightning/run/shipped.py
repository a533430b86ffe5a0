"""Find the configs that come with the package by their names, such as laptop/rlt.

--config laptop/rlt         the experiment configs/laptop/rlt.yaml
--config add/lora           the overlay configs/add/lora.yaml
--config my.yaml            a file: it wins over a name

A config begins with comments: what it is for, "# Needs: …", "# Run: …", and "# Next: …", the command of the
next stage, with RUN in place of the run's folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from rlt_lightning.types import InputError

# A wheel holds them in the package, a checkout beside it.
CONFIG_FOLDERS = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")

# Experiments lie in the first three, overlays in the others.
FOLDERS = {
    "laptop": "Experiments for a laptop's CPU: rlt VERB --config NAME",
    "recipe_7b": "The paper's recipe and what it is compared with, for GPUs; some take models of any size",
    "own_rows": "Rows of your own without traces, all stages on one GPU: examples/own_rows.sh",
    "hardware": "Which machine, on top of an experiment: rlt VERB --config NAME --config OVERLAY",
    "add": "What is added to an experiment, as an overlay too",
}
RUN = "# Run: "
NEXT = "# Next: "


def list_shipped_configs() -> dict[str, Path]:
    """Return the shipped configs, file by name, in the order of FOLDERS."""
    root = next(root for root in CONFIG_FOLDERS if root.is_dir())
    files = [path for folder in FOLDERS for path in sorted((root / folder).glob("*.yaml"))]
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in files}


def find_config(name: str) -> Path:
    """Return the file of a config.

    Args:
        name: A file, or the name of a shipped config such as laptop/rlt or add/lora. A file wins.

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
        f"A config must be a file or the name of one of the package, but '{name}' is neither. `rlt configs` "
        "lists the package's."
    )


def read_launch_line(text: str) -> list[str]:
    """Return the words of the command in the first lines of a config."""
    top = takewhile(lambda line: line.startswith("#"), text.splitlines())
    [line] = [line.removeprefix(RUN) for line in top if line.startswith(RUN)]
    return shlex.split(line)


def read_next_command(
    configs: Iterable[Path], run_folder: Path, strategy: str = "", source: str | None = None
) -> str | None:
    """Return the command of the next stage, with this run's results; None if there is none.

    Args:
        configs: Those of the run. As with other settings, the line of a later one wins.
        run_folder: The run's folder. Without the result that the line names there is no next stage.
        strategy: That of this run, or of the one whose model it took: ZeRO-3 stays ZeRO-3.
        source: Rows that the user has chosen; None: those of the next config.
    """
    texts = [path.read_text() for path in configs if path.is_file()]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(NEXT)]
    command = lines[-1].removeprefix(NEXT) if lines else ""
    if not all((run_folder / result).exists() for result in re.findall(r"RUN/(\S+)", command)):
        return None
    if "deepspeed" in strategy.lower():
        command = command.replace("hardware/fsdp2", "hardware/zero3")
    reads_them = "--model.teacher" in command and "--data.source" not in command
    command = command.replace("RUN", shlex.quote(str(run_folder)))
    return (f"{command} --data.source {shlex.quote(source)}" if source and reads_them else command) or None
