"""Read what a run folder holds, as plain data of bounded size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.report.completion_rows import COMPLETION_FILES
from rlt_lightning.report.completions import Bounds, Completions, read_completions
from rlt_lightning.run.jsonl import Row, rows_in
from rlt_lightning.run.metrics import read_entries
from rlt_lightning.run.metrics_csv import Curve, read_metrics
from rlt_lightning.run.run_folder import flat, read_settings
from rlt_lightning.types import InputError

FILES = ("metrics.csv", *COMPLETION_FILES, "groups.json", "evaluation.json")
GROUP = {"group", "num_rows", "reward", "reward_min", "reward_max"}


@dataclass
class Run:
    """The contents of one run folder."""

    folder: Path
    metrics: dict[str, Curve]
    completions: Completions
    groups: list[Row]
    evaluation: dict[str, Any] | None
    settings: dict[str, Any]  # config.yaml, flat
    notes: list[str]


def collect(folder: Path, bounds: Bounds) -> Run:
    """Read a run folder.

    Raises:
        InputError: If it holds nothing to show, or a file that is not what it must be.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in FILES):
        raise InputError(
            f"RUN_DIR must be the folder of a run, with one of {', '.join(FILES)}, but {folder} is none. "
            "Name the folder that --output_dir was."
        )
    read_entries(folder)
    metrics, notes = read_metrics(folder / "metrics.csv")
    completions = Completions()
    for name in COMPLETION_FILES:
        if not completions.total:
            with waiting_for(f"{folder / name} to be read"):
                completions = read_completions(partial(rows_in, folder / name), name, bounds)
    groups = read_json(folder / "groups.json", list) or []
    for row in groups:
        require_keys(row, GROUP, folder / "groups.json")
    evaluation = read_json(folder / "evaluation.json", dict)
    if evaluation is not None:
        require_keys(evaluation, {"sets"}, folder / "evaluation.json")
    if not (metrics or completions.total or groups or evaluation):
        raise InputError(
            f"{folder} holds a run that has written no figures yet. Wait for its first iteration."
        )
    kept = len(completions.kept)
    if kept < completions.total:
        notes.append(
            f"{kept:,} of the {completions.total:,} completions in {completions.file} are on this page: each "
            "problem's best, worst, first, last and most improved, as far as there is room, then evenly over "
            "iterations. Curves and their spreads count all. More: --max_completions, --max_text_mib."
        )
    return Run(folder, metrics, completions, groups, evaluation, flat(read_settings(folder)), notes)


def read_json(path: Path, kind: type) -> Any:
    """Return what a JSON file holds; None if there is no file.

    Raises:
        InputError: If it is no JSON, or not of this kind.
    """
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(
            f"{path} must be JSON, but is not ({error}). Write it again, or move it away."
        ) from error
    if not isinstance(value, kind):
        raise InputError(f"{path} must hold a JSON {kind.__name__}, but does not. Write it again.")
    return value


def require_keys(value: Any, keys: set[str], path: Path) -> None:
    """Check that an object has the keys that rlt writes."""
    if not isinstance(value, dict) or not keys <= value.keys():
        raise InputError(
            f"{path} must have {', '.join(sorted(keys))}, as rlt writes them, but has {value!r:.40}. "
            "Write it again, or move it away."
        )
