"""Which folder a run writes into, and what it does with files that are already there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import Running, wait_until

from rlt_lightning.checkpoints.run_folder import RunFolder, choose_run_folder, open_run_folder
from rlt_lightning.types import InputError

LAST, FIRST = "checkpoints/step=000002.ckpt", "checkpoints/step=000001.ckpt"
ELSEWHERE = "../other/step=000003.ckpt"
# The run in the folder: nothing; checkpoints of two steps; rows of a prediction.
NOTHING: list[str] = []
TRAINED, SCORED = [FIRST, LAST], ["scores.jsonl"]

# verb, what lies there, ckpt_path, resume, overwrite -> subfolder, ckpt_path, resume, overwrite
CHOICES: list[tuple[str, list[str], str | None, bool, bool, tuple[str, str | None, bool, bool]]] = [
    ("fit", NOTHING, None, False, False, ("", None, False, False)),
    ("fit", NOTHING, None, False, True, ("", None, False, True)),
    ("fit", NOTHING, None, True, False, ("", None, False, True)),
    ("fit", TRAINED, None, False, False, ("", None, False, False)),
    ("fit", TRAINED, None, False, True, ("", None, False, True)),
    ("fit", TRAINED, None, True, False, ("", LAST, True, False)),
    ("fit", NOTHING, "last", True, False, ("", None, False, True)),
    ("fit", NOTHING, ELSEWHERE, True, False, ("", ELSEWHERE, False, True)),
    ("fit", TRAINED, ELSEWHERE, True, False, ("", LAST, True, False)),
    ("fit", TRAINED, "last", False, False, ("", LAST, True, False)),
    ("fit", TRAINED, "last", False, True, ("", LAST, True, True)),
    ("fit", TRAINED, FIRST, False, False, ("", FIRST, True, False)),
    ("fit", TRAINED, ELSEWHERE, False, False, ("", ELSEWHERE, False, False)),
    ("validate", TRAINED, "last", False, False, ("validate", LAST, False, False)),
    ("predict", TRAINED, "last", False, False, ("predict", LAST, False, False)),
    ("predict", NOTHING, ELSEWHERE, False, False, ("", ELSEWHERE, False, False)),
    ("predict", NOTHING, None, True, False, ("", None, False, True)),
    ("predict", SCORED, None, True, False, ("", None, True, False)),
    ("predict", SCORED, None, False, False, ("", None, False, False)),
    ("predict", SCORED, None, False, True, ("", None, False, True)),
    ("test", ["responses.jsonl"], None, True, False, ("", None, True, False)),
    ("test", ["traces.jsonl"], None, True, True, ("", None, True, True)),
]


def write(folder: Path, names: list[str]) -> None:
    for name in [*names, ELSEWHERE]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize(("verb", "lies", "ckpt_path", "resume", "overwrite", "expected"), CHOICES)
def test_the_run_folder_follows_from_options_and_what_exists(
    verb: str, lies: Any, ckpt_path: str | None, resume: bool, overwrite: bool, expected: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    write(run, lies)
    given = str(run / ckpt_path) if ckpt_path and "/" in ckpt_path else ckpt_path
    choice = choose_run_folder(verb, str(run), "", given, resume, overwrite)
    subfolder, checkpoint, resumes, overwrites = expected
    path = checkpoint and str(run / checkpoint)
    assert choice == RunFolder(run / subfolder, path, resumes, overwrites)


@pytest.mark.parametrize("named", [".", "checkpoints"])
def test_a_run_stands_for_its_newest_checkpoint(named: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, [f"{FIRST}/state.pt", f"{LAST}/state.pt"])
    for verb in ("fit", "predict"):
        choice = choose_run_folder(verb, str(tmp_path / "new"), "", str(run / named))
        assert choice == RunFolder(tmp_path / "new", str(run / LAST), resume=False, overwrite=False)
    assert choose_run_folder("fit", str(run), "", str(run / named)).resume
    with pytest.raises(InputError, match="a run's folder with one"):
        choose_run_folder("fit", str(run), "", str(tmp_path))


def start(folder: Path, overwrite: bool = False) -> None:
    open_run_folder(RunFolder(folder, None, False, overwrite))


def leave_run(folder: Path) -> None:
    """What a run leaves: of two ranks, with W&B, launched workers, DiskPush, and a file half written."""
    for name in ("checkpoints", "workers", "wandb", "weights/76d9f89c-000000", "weights/76d9f89c-000001.tmp"):
        (folder / name).mkdir(parents=True)
    for name in ("workers/worker-8000.log", "wandb/run_id", "config.yaml", "metrics.csv", "metrics.tmp"):
        (folder / name).touch()
    (folder / "data_report.json").write_text("{}")


@pytest.mark.parametrize("name", ["thesis.txt", "rollouts.jsonl", "config.yaml", LAST, ".env"])
def test_what_lies_in_a_folder_is_never_taken_over(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(InputError, match="must be empty or new"):
        start(tmp_path)
    assert (tmp_path / name).exists()


def test_overwriting_deletes_a_run_and_keeps_its_config(tmp_path: Path) -> None:
    leave_run(tmp_path)
    (tmp_path / "thesis.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"also holds thesis\.txt"):
        start(tmp_path, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "thesis.txt").unlink()
    start(tmp_path, overwrite=True)
    # The command line may name the config, which ranks that are started later read again.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "data_report.json"]


def test_a_folder_that_a_live_run_has_opened_is_refused(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from rlt_lightning.checkpoints import run_folder; "
    code += f"run_folder.lock_folder(Path({str(tmp_path)!r})); print('locked', flush=True); sys.stdin.read()"
    other = Running((), None, tmp_path, None, {}, code)
    wait_until(lambda: bool(other.stdout))
    with pytest.raises(InputError, match="another one is writing"):
        start(tmp_path, overwrite=True)
    other.kill()
    other.wait()
    start(tmp_path)
    start(tmp_path)  # one process may open it again


@pytest.mark.parametrize("leads_to", ["nowhere", "file"])
def test_what_cannot_be_a_folder_is_refused(leads_to: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run").symlink_to(tmp_path / leads_to)
    with pytest.raises(InputError, match="--output_dir must be a folder"):
        start(tmp_path / "run")
