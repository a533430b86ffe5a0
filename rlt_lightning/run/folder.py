"""Choose the folder of a run, and decide by what is in it whether the run starts, resumes or is refused.

`choose_run_folder` decides from the command line and from what exists; `open_run_folder` then acts on it:

    what is there                       what happens
    no folder, or an empty one          it is made
    files of a start without results    the folder is used, and they are overwritten (`is_leftover`)
    a run, with --resume true           the run resumes; one without results is replaced
    a run, with --overwrite true        the run is deleted, unless there are also files that no run writes
    anything else                       the folder is refused
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlt_lightning.checkpoints.folder import find_checkpoint, find_newest_checkpoint, list_checkpoints
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
# What a checkpoint's optimizer states bring back, as PyTorch's `load_state_dict` does.
OPTIMIZER_SETTINGS = (".optimizer.lr", ".optimizer.weight_decay", ".optimizer.betas", ".optimizer.init_args.")
FINISHED_ROWS = ("traces.jsonl", "scores.jsonl", "responses.jsonl")  # of runs that resume row by row
RESULTS = (*FINISHED_ROWS, "model", "distillation.jsonl", "evaluation.json")  # what --resume never replaces
# What a run may leave in its folder, and all that --overwrite may delete.
RUN_FILES = {
    *("config.yaml", "metrics.csv", "rollouts.jsonl", "scores.jsonl", "data_report.json", "report.html"),
    "catalogue.json",
    *("traces.jsonl", "distillation.jsonl", "README.md"),
    *("responses.jsonl", "evaluation.json", "evaluation.md"),
}
RUN_ENTRIES = {
    *RUN_FILES,
    *(f"{Path(name).stem}.tmp" for name in RUN_FILES),  # half written
    *("checkpoints", "model", "model.tmp", "model.old", "reference", "weights", "workers"),
    *("validate", "predict", "test", "wandb", "tensorboard", "lightning_logs", ".writable"),
}
# What a start leaves whatever became of it; `is_leftover` says when the rest is nothing but a failed start's.
ALWAYS_LEFTOVER = {
    *("config.tmp", "data_report.json", "data_report.tmp", ".writable"),
    *("catalogue.json", "catalogue.tmp"),
    *("wandb", "tensorboard", "lightning_logs"),
}
# Matches what VLLMEngine calls a version of the weights, and DiskPush the folder that it writes it into.
VERSION_FOLDER = re.compile(r"[0-9a-f]{8}-\d{6}(\.tmp)?")
# Settings that stand in every config.yaml of a run, and hardly together in a config that a person wrote.
RUN_SETTINGS = {
    *("trainer", "model", "data", "rollouts", "seed_everything", "seed"),
    *("output_dir", "ckpt_path", "resume", "overwrite"),
}

made: list[Path] = []  # folders that this process has made for its run, the innermost first
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
        overwrite: Whether a run in the folder may be deleted if it is not resumed. `fit --resume true` sets
            it too: without a checkpoint the run starts over.
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
    if ckpt_path == "last" and not output_dir:
        raise InputError("--ckpt_path last needs --output_dir, the folder of the run.")
    if resume and not output_dir:
        raise InputError("--resume needs --output_dir, the folder of the run to resume.")
    folder = Path(output_dir or default)
    if folder.name in ("", ".."):  # config.yaml must name the folder for other working directories too
        folder = folder.resolve()
    own = list_checkpoints(folder / "checkpoints") if is_fit else []
    if is_fit and resume:
        overwrite = True
        if own:
            ckpt_path = "last"
    if is_fit and overwrite and ckpt_path == "last" and not own:
        ckpt_path = None
    if ckpt_path == "last":
        ckpt_path = str(find_newest_checkpoint(folder / "checkpoints"))
        folder = folder if is_fit else folder / verb
    elif ckpt_path and not Path(ckpt_path).exists():
        raise InputError(f"--ckpt_path must be last or a checkpoint that exists, but is {ckpt_path}.")
    elif ckpt_path and Path(ckpt_path).is_dir():
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
    if not path:
        return False
    places = (Path(path).resolve(), Path(os.path.abspath(path)))
    return any(
        root in place.parents
        for root in (folder.resolve(), Path(os.path.abspath(folder)))
        for place in places
    )


def require_no_results(folder: Path) -> None:
    """Check that a run which has nothing to resume may be replaced, since no result lies in its folder.

    Raises:
        InputError: If there is one.
    """
    found = [folder / name for name in RESULTS if (folder / name).exists()]
    if found := [*found, *list_checkpoints(folder / "checkpoints")]:
        raise InputError(
            f"--resume true found no run to resume, but it does not replace {found[0]}, which is there. "
            "Choose another --output_dir, or replace all of it by --overwrite true instead."
        )


def require_same_run(folder: Path, config: dict[str, Any]) -> None:
    """Check that a run which resumes has the settings that its rows were made with.

    Raises:
        InputError: If one differs; the message names the first.
    """
    path = folder / "config.yaml"
    if not path.exists():
        raise InputError(
            f"A resumed run must have the settings that it began with, but {path} is gone. Restore it, "
            "or choose another --output_dir."
        )
    for change in list_changes(folder, config):
        raise InputError(
            f"A resumed run must have the settings that it began with, but {change}. Restore it, or choose "
            "another --output_dir."
        )


def tell_changes(folder: Path, config: dict[str, Any]) -> None:
    """Warn about settings that were changed since the run that a training resumes."""
    if changes := list_changes(folder, config):
        more = f"; and {len(changes) - 5} more" if len(changes) > 5 else ""
        names = [change.split()[0] for change in changes]
        idle = [name for name in names if any(setting in f".{name}" for setting in OPTIMIZER_SETTINGS)]
        stays = f" Without effect, since the checkpoint's stay: {', '.join(idle)}." if idle else ""
        warnings.warn(
            f"The run resumes with other settings than its checkpoint was trained with: "
            f"{'; '.join(changes[:5])}{more}.{stays}",
            stacklevel=2,
        )


def list_changes(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return which settings of model, optimizer, data and rollouts differ from a run's config.yaml.

    FREE_SETTINGS and the trainer's may change.
    """
    before = read_settings(folder)

    def select_fixed(settings: dict[str, Any]) -> dict[str, Any]:
        groups = ("model", "optimizer", "lr_scheduler", "data", "rollouts")
        found = flatten({name: settings.get(name) for name in groups})
        found |= flatten((settings.get("distillation") or {}).get("per_token"), ".distillation.per_token")
        return {name: value for name, value in found.items() if not name.startswith(FREE_SETTINGS)}

    old, new = select_fixed(before), select_fixed(config)
    return [
        f"{name[1:]} was {old.get(name)} and is {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what a run's config.yaml holds; empty if there is none.

    Raises:
        InputError: If it is no YAML mapping.
    """
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        reason = f"it is a {type(settings).__name__}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        settings, reason = None, " ".join(str(error).split())
    if not isinstance(settings, dict):
        raise InputError(
            f"{path} must be YAML with settings, but is not ({reason}). Restore it, or move it away."
        )
    return settings


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names, which begin with a dot, without those that are None."""
    if not isinstance(value, dict):
        return {} if value is None else {name: value}
    return {k: v for key, item in value.items() for k, v in flatten(item, f"{name}.{key}").items()}


def open_run_folder(choice: RunFolder, given: Sequence[Path] = ()) -> None:
    """Make the run folder and lock it, or refuse to mix two runs in one.

    Args:
        choice: The folder, and what may be done about what lies there.
        given: Configs of the command line. They are read already, but a process that is started later for
            another rank reads them again, so none is deleted.

    Raises:
        InputError: If the folder holds a run and neither resume nor overwrite was asked for, if another
            process writes there, or if it cannot be written.
    """
    folder = choice.folder
    with requiring_writable(folder):
        made[:] = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        if choice.resume:
            if choice.ckpt_path is not None:
                print(f"resuming from {choice.ckpt_path}", file=sys.stderr)
            return
        if choice.overwrite or not all(is_leftover(entry, given) for entry in folder.iterdir()):
            clear_folder(folder, choice.overwrite, RUN_ENTRIES.__contains__, given)


@contextmanager
def requiring_writable(folder: Path) -> Iterator[None]:
    """Let an error of the disk inside the block say that the folder cannot be written.

    Raises:
        InputError: If there is one.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--output_dir must be a folder that can be written, but {folder} is not ({error.strerror}). "
            "Choose another."
        ) from error


def clear_folder(
    folder: Path, overwrite: bool, is_own: Callable[[str], object], given: Sequence[Path] = ()
) -> None:
    """Delete what a run has written into a folder.

    Args:
        folder: The folder.
        overwrite: Whether that was asked for.
        is_own: Tells by its name whether such a run writes an entry.
        given: Configs of the command line, which stay.

    Raises:
        InputError: If it was not asked for, or the folder holds what no such run writes.
    """
    entries = sorted(folder.iterdir())
    if not overwrite:
        raise InputError(
            f"--output_dir must be empty or new, but {folder} is not. Choose another folder, replace what is "
            "there (--overwrite true), or resume it (--resume true)."
        )
    if strangers := [entry.name for entry in entries if not is_own(entry.name)]:
        raise InputError(
            f"--overwrite replaces a run and nothing else, but {folder} also holds "
            f"{', '.join(strangers[:5])}. Choose another folder or move them away."
        )
    for entry in entries:
        if not is_one_of(entry, given):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def is_leftover(entry: Path, given: Sequence[Path] = ()) -> bool:
    """Return whether a run that computed nothing left this entry, so that the next start may overwrite it.

    Args:
        entry: What lies in a run folder.
        given: Configs of the command line. One that lies in the folder may be what the failed start wrote
            and the user corrected.
    """
    if entry.is_symlink():
        return False
    if entry.name == "config.yaml":
        return is_resolved_config(entry, anywhere=is_one_of(entry, given))
    if entry.name == "metrics.csv":
        return len(entry.read_bytes().splitlines()) < 2  # at most the header
    if entry.name == "checkpoints":
        return not any(entry.iterdir())
    if entry.name == "workers":
        return all(path.suffix == ".log" for path in entry.iterdir())
    if entry.name == "weights":
        return all(VERSION_FOLDER.fullmatch(path.name) for path in entry.iterdir())
    return entry.name in ALWAYS_LEFTOVER


def is_one_of(entry: Path, given: Sequence[Path]) -> bool:
    """Return whether an entry of a folder is one of the configs of the command line."""
    return any(path.resolve() == entry.resolve() for path in given)


def is_resolved_config(path: Path, anywhere: bool) -> bool:
    """Return whether a file is a config.yaml that a run wrote, and not a config that a user wrote.

    Args:
        path: The file.
        anywhere: Whether a run in any folder may have written it. A config of the command line is replaced by
            its own settings, so a copy may be too; any other copy may hold what a user has changed.
    """
    try:
        settings = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        return False
    if not isinstance(settings, dict) or not settings.keys() >= RUN_SETTINGS:
        return False
    return anywhere or names_folder(Path(str(settings["output_dir"])), path.parent)


def names_folder(name: Path, folder: Path) -> bool:
    """Return whether a path named a folder, perhaps from another working directory."""
    if name.is_absolute() or name.resolve() == folder.resolve():
        return name.resolve() == folder.resolve()
    parts = [part for part in Path(os.path.normpath(name)).parts if part != ".."]
    places = (Path(os.path.abspath(folder)), folder.resolve())
    return bool(parts) and any(list(place.parts[-len(parts) :]) == parts for place in places)


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


def remove_empty_folders() -> None:
    """Remove what this process has made for its run, if it is still empty."""
    for path in made:
        with suppress(OSError):
            path.rmdir()
    made.clear()
