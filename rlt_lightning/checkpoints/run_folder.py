"""Choose the folder of a run, and decide by what is in it whether the run starts, resumes or is refused.

`choose_run_folder` decides from the command line and from what exists; `open_run_folder` then acts on it:

    what is there                       what happens
    no folder, or an empty one          it is made
    a run, with --resume true           the run resumes; one without results is replaced
    a run, with --overwrite true        the run is deleted, unless there are also files that no run writes
    anything else                       the folder is refused
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlt_lightning.checkpoints.folder import find_checkpoint, list_checkpoints
from rlt_lightning.types import InputError

# Settings that may change when a prediction or evaluation resumes: they change the remaining rows by rounding
# at most. Only an engine of another class draws other samples.
FREE_SETTINGS = (
    ".rollouts.engine",
    ".model.init_args.micro_batch_tokens",
    *(
        f".data.init_args.{name}"
        for name in ("output_dir", "prompts_per_step", "val_batch_size", "batch_size")
    ),
)
FINISHED_ROWS = ("traces.jsonl", "scores.jsonl", "responses.jsonl")  # of runs that resume row by row
RESULTS = (*FINISHED_ROWS, "model", "distillation.jsonl", "evaluation.json")  # what --resume never replaces
# What a run may leave in its folder, and all that --overwrite may delete.
RUN_ENTRIES = {
    *("config.yaml", "metrics.csv", "rollouts.jsonl", "scores.jsonl", "data_report.json", "report.html"),
    *("traces.jsonl", "distillation.jsonl", "README.md"),
    *("responses.jsonl", "evaluation.json", "evaluation.md"),
    *("checkpoints", "model", "model.tmp", "model.old", "reference", "weights", "workers"),
    *("validate", "predict", "test", "wandb", "tensorboard", "lightning_logs"),
}
RUN_ENTRIES |= {f"{Path(name).stem}.tmp" for name in RUN_ENTRIES}  # half written

lock: int | None = None  # descriptor of the run folder, which is locked until the process ends


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and what it does with files that are already there.

    Example: `rlt fit --output_dir runs/a --resume true`, killed in step 3, is run again as
    `RunFolder(Path("runs/a"), "runs/a/checkpoints/step=000002.ckpt", resume=True, overwrite=True)`.

    Args:
        folder: The run folder.
        ckpt_path: The checkpoint to load, if any.
        resume: Whether the run that lies in the folder continues.
        overwrite: Whether a run in the folder may be deleted if it is not resumed.
    """

    folder: Path
    ckpt_path: str | None
    resume: bool
    overwrite: bool


def choose_run_folder(
    verb: str,
    output_dir: str | None = None,
    default: str = "",
    ckpt_path: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> RunFolder:
    """Choose the run folder and the checkpoint from the command line and from what exists.

    Nothing is written. `ckpt_path` "last" is looked for in the folder; verbs other than fit then write
    into a folder of their name inside it, so that the run stays as it is.

    Args:
        verb: fit, validate, predict or test.
        output_dir: The folder that the user named.
        default: The folder where the user named none.
        ckpt_path: "last", a checkpoint, or None.
        resume: Whether the user said --resume true.
        overwrite: Whether the user said --overwrite true.

    Raises:
        InputError: If options that need --output_dir lack it, a checkpoint does not exist, or --resume would
            replace a result.
    """
    is_fit = verb == "fit"
    if not output_dir and (resume or ckpt_path == "last"):
        raise InputError("--resume true and --ckpt_path last need --output_dir, the folder of the run.")
    folder = Path(output_dir or default)
    if is_fit and resume:
        if checkpoints := list_checkpoints(folder / "checkpoints"):
            ckpt_path = str(checkpoints[-1])
        elif ckpt_path == "last":
            ckpt_path = None
    if ckpt_path == "last":
        ckpt_path = str(find_checkpoint(folder / "checkpoints"))
        folder = folder if is_fit else folder / verb
    elif ckpt_path and not Path(ckpt_path).is_file():
        ckpt_path = str(find_checkpoint(Path(ckpt_path)))
    if is_fit:  # a checkpoint of another run starts a new one
        resumes = is_within(folder, ckpt_path)
    else:
        resumes = resume and any((folder / name).exists() for name in FINISHED_ROWS)
    if resume and not resumes:
        require_no_results(folder)
        overwrite = True
    return RunFolder(folder, ckpt_path, resumes, overwrite)


def is_within(folder: Path, path: str | None) -> bool:
    """Return whether a path, if there is one, lies in a folder; what a link in it leads to does too."""
    return bool(path) and Path(os.path.abspath(str(path))).is_relative_to(os.path.abspath(folder))


def require_no_results(folder: Path) -> None:
    """Check that a run which has nothing to resume may be replaced, since no result lies in its folder.

    Raises:
        InputError: If there is one.
    """
    results = [folder / name for name in RESULTS if (folder / name).exists()]
    if results := [*results, *list_checkpoints(folder / "checkpoints")]:
        raise InputError(
            f"--resume true found no run to resume, but it does not replace {results[0]}, which is there. "
            "Choose another --output_dir, or replace all of it by --overwrite true instead."
        )


def compare_settings(folder: Path, config: dict[str, Any], verb: str) -> None:
    """Warn about settings that were changed since the run that a training resumes.

    Raises:
        InputError: If one was changed and another verb resumes: its rows would be of two kinds.
    """
    changes = list_changes(folder, config)
    if not changes:
        return
    more = f"; and {len(changes) - 5} more" if len(changes) > 5 else ""
    message = f"The run resumes with other settings than it began with: {'; '.join(changes[:5])}{more}."
    if verb != "fit":
        raise InputError(f"{message} Restore them, or choose another --output_dir.")
    warnings.warn(f"{message} Of the optimizer's, those in the checkpoint are used.", stacklevel=2)


def list_changes(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return which settings of model, optimizer, data and rollouts differ from a run's config.yaml.

    FREE_SETTINGS and the trainer's may change.
    """
    before = read_settings(folder)

    def select_fixed(settings: dict[str, Any]) -> dict[str, Any]:
        groups = ("model", "data", "rollouts", "optimizer", "lr_scheduler")
        fixed = flatten({name: settings.get(name) for name in groups})
        fixed |= flatten((settings.get("distillation") or {}).get("per_token"), ".distillation.per_token")
        return {name: value for name, value in fixed.items() if not name.startswith(FREE_SETTINGS)}

    old, new = select_fixed(before), select_fixed(config)
    return [
        f"{name[1:]} was {old.get(name)} and is {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in a run's config.yaml; none if there is no file."""
    path = folder / "config.yaml"
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return settings


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names, which begin with a dot, without those that are None."""
    if not isinstance(value, dict):
        return {} if value is None else {name: value}
    return {k: v for key, item in value.items() for k, v in flatten(item, f"{name}.{key}").items()}


def open_run_folder(choice: RunFolder) -> None:
    """Make the run folder and lock it, or refuse to mix two runs in one.

    Raises:
        InputError: If the folder holds a run and neither resume nor overwrite was asked for, or if another
            process writes there.
    """
    folder = choice.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--output_dir must be a folder, but cannot be made: {error}. Name another."
        ) from error
    lock_folder(folder)
    entries = [entry for entry in sorted(folder.iterdir()) if entry.name != "data_report.json"]
    if choice.resume:
        if choice.ckpt_path is not None:
            print(f"resuming from {choice.ckpt_path}", file=sys.stderr)
    elif entries and not choice.overwrite:
        raise InputError(
            f"--output_dir must be empty or new, but {folder} is not. Choose another folder, replace what is "
            "there (--overwrite true), or resume it (--resume true)."
        )
    elif strangers := [entry.name for entry in entries if entry.name not in RUN_ENTRIES]:
        raise InputError(
            f"--overwrite replaces a run and nothing else, but {folder} also holds "
            f"{', '.join(strangers[:5])}. Choose another folder or move them away."
        )
    else:
        for entry in entries:
            if entry.name == "config.yaml":
                continue  # the command line may name it; ranks that are started later read it again
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def lock_folder(folder: Path) -> None:
    """Let no other process use the folder before this one ends or opens another.

    Raises:
        InputError: If another process has locked it.
    """
    global lock
    if lock is not None:
        os.close(lock)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"--output_dir must be the folder of one run, but another one is writing into {folder}. Wait "
            "until it has ended, or choose another folder."
        ) from error
    except OSError:  # this file system knows no locks
        pass
