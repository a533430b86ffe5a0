"""Which folder a run writes into, and what it does with files that are already there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from commands import Running, wait_until

from rlt_lightning.run.folder import RUN_SETTINGS, RunFolder, choose_run_folder, open_run_folder
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
    ("fit", NOTHING, "last", False, True, ("", None, False, True)),
    ("fit", TRAINED, None, False, False, ("", None, False, False)),
    ("fit", TRAINED, None, False, True, ("", None, False, True)),
    ("fit", TRAINED, None, True, False, ("", LAST, True, True)),
    ("fit", NOTHING, "last", True, False, ("", None, False, True)),
    ("fit", NOTHING, ELSEWHERE, True, False, ("", ELSEWHERE, False, True)),
    ("fit", TRAINED, ELSEWHERE, True, False, ("", LAST, True, True)),
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
    verb: str,
    lies: list[str],
    ckpt_path: str | None,
    resume: bool,
    overwrite: bool,
    expected: tuple[str, str | None, bool, bool],
    tmp_path: Path,
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


def test_without_a_folder_the_default_is_chosen() -> None:
    assert choose_run_folder("fit", None, "runs/x") == RunFolder(Path("runs/x"), None, False, False)


def start(folder: Path, overwrite: bool = False, given: tuple[Path, ...] = ()) -> None:
    open_run_folder(RunFolder(folder, None, False, overwrite), given)


def leave_failed_start(folder: Path, output_dir: str | None = None) -> None:
    """What a run leaves that failed at its first push: two ranks, W&B, launched workers, AdapterPush."""
    for name in ("checkpoints", "workers", "wandb", "weights/76d9f89c-000000", "weights/76d9f89c-000001.tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "workers" / "worker-8000.log").write_text("out of memory")
    (folder / "wandb" / "run_id").write_text("abc")
    (folder / "weights" / "76d9f89c-000000" / "adapter_model.safetensors").touch()
    resolved = {name: None for name in RUN_SETTINGS} | {"output_dir": output_dir or str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved))
    (folder / "metrics.csv").touch()
    (folder / "data_report.json").write_text("{}")


def test_a_failed_start_is_taken_over_and_nothing_of_it_is_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    leave_failed_start(run)
    before = sorted(run.rglob("*"))
    start(run)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    [
        *("thesis.txt", "rollouts.jsonl", "scores.jsonl", "model/config.json", LAST, ".env"),
        *("workers/notes.txt", "weights/model.safetensors"),
    ],
)
def test_files_of_a_user_or_of_a_run_are_not_taken_over(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    leave_failed_start(run)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).touch()
    with pytest.raises(InputError, match="must be empty or new"):
        start(run)
    assert (run / name).exists()


def test_metrics_of_a_step_are_not_taken_over(tmp_path: Path) -> None:
    leave_failed_start(tmp_path)
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n")
    with pytest.raises(InputError, match="must be empty or new"):
        start(tmp_path)


def test_overwriting_keeps_the_given_config(tmp_path: Path) -> None:
    leave_failed_start(tmp_path)
    start(tmp_path, overwrite=True, given=(tmp_path / "config.yaml",))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    start(tmp_path, overwrite=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_live_run_has_opened_is_refused(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from rlt_lightning.run.folder import lock_folder; "
    code += f"lock_folder(Path({str(tmp_path)!r})); print('locked', flush=True); sys.stdin.read()"
    other = Running((), None, tmp_path, None, {}, code)
    wait_until(lambda: bool(other.stdout))
    with pytest.raises(InputError, match="another one is writing"):
        start(tmp_path, overwrite=True)
    other.kill()
    other.wait()
    start(tmp_path)
    start(tmp_path)  # one process may open it again
