"""The folder of a run: what may lie there, when it may be used, and when a run in it may go on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from rlt_lightning.checkpoints.choices import checkpoints_in
from rlt_lightning.types import InputError

# What may change when a prediction or evaluation goes on: at most it rounds the rows to come otherwise.
FREE_SETTINGS = (
    ".rollouts.engine",
    ".model.init_args.micro_batch_tokens",
    *(
        f".data.init_args.{name}"
        for name in ("output_dir", "prompts_per_step", "val_batch_size", "batch_size")
    ),
)
# What a run may leave in its folder: all that --overwrite may delete.
RUN_ENTRIES = {"config.yaml", "metrics.csv", "rollouts.jsonl", "scores.jsonl", "data_report.json"}


RUN_ENTRIES |= {"traces.jsonl", "distillation.jsonl", "distillation.parquet", "README.md"}


RUN_ENTRIES |= {"groups", "groups.json", "groups.svg", "comparison.jsonl", "comparison.md"}


RUN_ENTRIES |= {
    "checkpoints",
    "validate",
    "predict",
    "test",
    "model",
    "model.tmp",
    "model.old",
    "reference",
    "wandb",
    "tensorboard",
    "lightning_logs",
    "weights",
    "workers",
    "responses.jsonl",
    "evaluation.json",
    "evaluation.md",
    ".writable",
    "report.html",
}


RUN_ENTRIES |= {f"{Path(name).stem}.tmp" for name in RUN_ENTRIES if Path(name).suffix}  # half written

FINISHED_ROWS = ("traces.jsonl", "scores.jsonl", "responses.jsonl")  # of runs that go on row by row
RESULTS = (*FINISHED_ROWS, "model", "distillation.jsonl", "evaluation.json")  # what --resume never replaces


def require_dead_start(folder: Path) -> None:
    """Check that a run which has nothing to go on from may begin anew in its folder: no result is there.

    Raises:
        InputError: If there is one.
    """
    found = [folder / name for name in RESULTS if (folder / name).exists()]
    if found := [*found, *checkpoints_in(folder / "checkpoints")]:
        raise InputError(
            f"--resume true found nothing to go on from, but it does not replace {found[0]}, which is there. "
            "Choose another --output_dir, or replace all of it by --overwrite true instead."
        )


def require_same_run(folder: Path, config: dict[str, Any]) -> None:
    """Check that a run which goes on finds the settings that its rows were made with.

    Raises:
        InputError: Naming the first that differs. FREE_SETTINGS and the trainer's may change.
    """
    path = folder / "config.yaml"
    if not path.exists():
        raise InputError(
            f"A run that goes on must have the settings that it began with, but {path} is gone. Restore it, "
            "or choose another --output_dir."
        )
    before = yaml.safe_load(path.read_text())

    def that_count(settings: dict[str, Any]) -> dict[str, Any]:
        found = flat({name: settings.get(name) for name in ("model", "data", "rollouts")})
        found |= flat((settings.get("scores") or {}).get("per_token"), ".scores.per_token")
        return {name: value for name, value in found.items() if not name.startswith(FREE_SETTINGS)}

    old, new = that_count(before), that_count(config)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise InputError(
                f"A run that goes on must have the settings that it began with, but {name[1:]} was "
                f"{old.get(name)} and is {new.get(name)}. Restore it, or choose another --output_dir."
            )


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, which begin with a dot; those that are None are left out."""
    if not isinstance(value, dict):
        return {} if value is None else {name: value}
    return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}


def open_run_folder(folder: Path, resume: bool, overwrite: bool) -> None:
    """Make the run folder, or refuse to mix two runs in one.

    Raises:
        InputError: If the folder holds a run and neither resume nor overwrite was asked for, or cannot be
            written.
    """
    try:
        entries = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
        if entries - {"data_report.json"} and not resume:  # a run that bad data stopped left only its report
            if not overwrite:
                raise InputError(
                    f"--output_dir must be empty or new, but {folder} is not. Choose another folder, replace "
                    "what is there (--overwrite true), or go on with it (--resume true)."
                )
            if strangers := sorted(entries - RUN_ENTRIES):
                raise InputError(
                    f"--overwrite replaces a run and nothing else, but {folder} also holds "
                    f"{', '.join(strangers[:5])}. Choose another folder or move them away."
                )
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"--output_dir must be a folder that can be written, but {folder} is not ({error.strerror}). "
            "Choose another."
        ) from error
