"""Damaged files in a run folder never end up in figures, and do not block a resume."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from damage import build_checkpoint

from rlt_lightning.checkpoints.folder import (
    ONE_PROCESS,
    discard,
    discard_unfinished,
    list_checkpoints,
    replace_folder,
)
from rlt_lightning.checkpoints.run_folder import choose_run_folder
from rlt_lightning.run.metrics_csv import MetricsCSV, read_metrics

# metrics.csv


def write_metrics(folder: Path) -> bytes:
    log = MetricsCSV(str(folder))
    for step in range(1, 6):
        log.log_metrics({"loss": 1.25 * step, "reward": -10.5 - step}, step)
        log.save()
    return log.path.read_bytes()


def resume(folder: Path, step: int) -> dict[int, dict[str, float]]:
    """What metrics.csv holds after a resume from a step."""
    log = MetricsCSV(str(folder))
    log.resume_after(step)
    if not log.path.exists():  # it had no whole row
        return {}
    with log.path.open(newline="") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return {int(row.pop("step")): row for row in rows}


def test_no_cut_through_metrics_changes_a_figure(tmp_path: Path) -> None:
    whole = write_metrics(tmp_path)
    right = resume(tmp_path, 5)
    for length in range(len(whole) + 1):
        (tmp_path / "metrics.csv").write_bytes(whole[:length])
        for step, row in resume(tmp_path, 5).items():
            assert row == right[step], length
        (tmp_path / "metrics.csv").write_bytes(whole[:length])
        curves = read_metrics(tmp_path / "metrics.csv")
        for name, (steps, values) in curves.items():
            assert values == [right[step][name] for step in steps], length


@pytest.mark.parametrize("line", ["x,1.0,2.0", ",1.0,2.0", "7,x,2.0", "7,1.0,2.0,3.0"])
def test_a_line_without_numbers_is_refused(line: str, tmp_path: Path) -> None:
    whole = write_metrics(tmp_path)
    (tmp_path / "metrics.csv").write_bytes(whole + line.encode() + b"\r\n")
    for read in (lambda: resume(tmp_path, 5), lambda: read_metrics(tmp_path / "metrics.csv")):
        with pytest.raises((ValueError, TypeError)):
            read()
    assert (tmp_path / "metrics.csv").read_bytes().startswith(whole)


def test_metrics_without_their_header_are_refused(tmp_path: Path) -> None:
    _, _, lines = write_metrics(tmp_path).partition(b"\n")
    (tmp_path / "metrics.csv").write_bytes(lines)
    with pytest.raises(KeyError):
        resume(tmp_path, 5)


# Links to what lies elsewhere


def test_a_linked_checkpoint_is_resumed_and_then_only_unlinked(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    (run / "checkpoints").mkdir(parents=True)
    target = build_checkpoint(disk / "step=000006.ckpt")
    link = run / "checkpoints" / target.name
    link.symlink_to(target)
    choice = choose_run_folder("fit", str(run), resume=True)
    assert (choice.ckpt_path, choice.resume) == (str(link), True)
    build_checkpoint(link, scale=2.0)  # of the same step, once more
    assert not link.is_symlink()
    discard(link)
    link.symlink_to(target)
    discard(link)
    assert list_checkpoints(run / "checkpoints") == []
    assert (target / "state.pt").exists()
    link.symlink_to(tmp_path / "gone")
    discard(link)
    link.with_name(link.name + ".old").symlink_to(target)  # left by a kill
    discard_unfinished(run / "checkpoints")
    assert list((run / "checkpoints").iterdir()) == []
    assert (target / "state.pt").exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_linked_model_is_replaced_again_and_again(is_there: bool, tmp_path: Path) -> None:
    target, model = tmp_path / "target", tmp_path / "model"
    if is_there:
        target.mkdir()
    for _ in range(2):
        shutil.rmtree(model, ignore_errors=True)
        model.symlink_to(target)
        with replace_folder(model, ONE_PROCESS) as scratch:
            (scratch / "config.json").touch()
        assert [path.name for path in model.iterdir()] == ["config.json"]
        assert not model.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", *["target"] * is_there]
