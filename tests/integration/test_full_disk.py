"""A disk that is full ends a run in one clear line, and nothing that was finished is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import full
from commands import ROOT, python, rlt
from damage import build_checkpoint
from fits import metrics, small_fit
from grpo import data, module, rollout_callback
from lightning.pytorch import Callback
from trainers import bare_trainer

from rlt_lightning.callbacks import ModelExporter, ReferenceSync
from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.checkpoints.folder import list_checkpoints, read_whole_state
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.run.jsonl import append_rows, rewrite
from rlt_lightning.run.metrics_csv import MetricsCSV
from rlt_lightning.types import InputError, naming_full_disk

LINE = "must be written, but its disk has no room"


@pytest.fixture
def limit() -> Any:
    """Limits the size of files that this process writes, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_metrics(folder: Path) -> None:
    log = MetricsCSV(str(folder))
    log.log_metrics({"a": 1.0}, 1)
    log.save()
    log.log_metrics({"a": 2.0}, 2)
    log.save()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "step=000006.ckpt": lambda folder: build_checkpoint(folder / "step=000006.ckpt"),
    "rollouts.jsonl": lambda folder: append_rows(folder / "rollouts.jsonl", [{"text": "a" * 100}]),
    "scores.jsonl": lambda folder: rewrite(folder / "scores.jsonl", ["a" * 100]),
    "metrics.csv": write_metrics,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("num_bytes", [0, 15, 60])
def test_what_is_written_is_named(name: str, num_bytes: int, limit: Any, tmp_path: Path) -> None:
    limit(num_bytes)
    if name == "metrics.csv" and num_bytes == 60:
        return WRITERS[name](tmp_path)  # it fits
    with pytest.raises(InputError, match=f"{tmp_path / name} {LINE}.*--resume true"):
        WRITERS[name](tmp_path)
    limit(resource.RLIM_INFINITY)
    WRITERS[name](tmp_path)


def test_a_checkpoint_that_finds_no_room_leaves_the_one_before(limit: Any, tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "step=000006.ckpt")
    for num_bytes in (100, 1000, 2000):  # in the weights, in the state
        limit(num_bytes)
        with pytest.raises(InputError, match=LINE):
            build_checkpoint(tmp_path / "step=000006.ckpt", scale=2.0)
    limit(resource.RLIM_INFINITY)
    [checkpoint] = list_checkpoints(tmp_path)
    assert read_whole_state(checkpoint)["global_step"] == 6


class FullDisk(Callback):
    """Lets the disk be full at a hook of the trainer."""

    def __init__(self, hook: str, fill: Callable[[], None]) -> None:
        setattr(self, hook, lambda *_, **__: fill())


@pytest.mark.parametrize("num_bytes", [0, 10_000])  # in config.json, in the weights
@pytest.mark.parametrize(
    ("name", "hook", "writer"),
    [
        ("model", "on_train_end", ModelExporter),
        ("reference/step=000001", "on_train_batch_end", partial(ReferenceSync, every_n_steps=1)),
    ],
)
def test_a_model_that_finds_no_room_is_named(
    name: str,
    hook: str,
    writer: Callable[[], Callback],
    num_bytes: int,
    limit: Any,
    tiny_model: str,
    tmp_path: Path,
) -> None:
    callbacks = [rollout_callback(), FullDisk(hook, lambda: limit(num_bytes)), writer()]
    with pytest.raises(InputError, match=f"{tmp_path / name} {LINE}.*--resume true"):
        bare_trainer(tmp_path, *callbacks).fit(module(tiny_model), datamodule=data(tiny_model, tmp_path))
    limit(resource.RLIM_INFINITY)  # before pytest itself writes
    assert not list((tmp_path / name).parent.glob("*.tmp"))


def test_an_export_that_finds_no_room_keeps_the_model_before(
    limit: Any, tiny_model: str, tmp_path: Path
) -> None:
    result = rlt(*small_fit(tiny_model, tmp_path / "run", "--trainer.max_steps=1"))
    assert result.returncode == 0, result.stderr
    export = partial(export_checkpoint, str(tmp_path / "run"), str(tmp_path / "model"), overwrite=True)
    export()
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    limit(10_000)
    with pytest.raises(InputError, match=f"{tmp_path / 'model'} {LINE}"):
        export()
    limit(resource.RLIM_INFINITY)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    export()


@pytest.mark.parametrize("num_bytes", [0, 300])
def test_token_cache_that_finds_no_room_is_named(
    num_bytes: int, limit: Any, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLT_CACHE_DIR", str(tmp_path))
    row = {"question": "1+1?", "solution": "2"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    rows = TeacherRLData(str(tmp_path / "rows.jsonl"), tokenizer=tiny_model, prompts_per_step=4)
    limit(num_bytes)
    with pytest.raises(InputError, match=f"{tmp_path / 'tokens'}, must .* have room.*RLT_CACHE_DIR"):
        rows.setup("fit")
    limit(resource.RLIM_INFINITY)
    assert not list((tmp_path / "tokens").rglob("*.arrow"))
    rows.setup("fit")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(FileNotFoundError), naming_full_disk(Path("a")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    with pytest.raises(RuntimeError), naming_full_disk(Path("a")):
        raise RuntimeError("No such file")


FIT = """
import resource, sys
from rlt_lightning.__main__ import main
sys.argv = ["rlt", *{words}]
resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, {num_bytes}))
sys.exit(main())
"""


@pytest.mark.parametrize("num_bytes", [full(2000), 100_000])  # in config.yaml, in the weights
def test_a_run_ends_in_one_line_and_resumes(num_bytes: int, tiny_model: str, tmp_path: Path) -> None:
    words = small_fit(tiny_model, tmp_path / "run", "--trainer.max_steps=2", "--resume=true")
    code = FIT.format(words=words, num_bytes=num_bytes)
    # Compiled modules that are cut would stay.
    ended = python(code, ROOT, fresh=True, PYTHONDONTWRITEBYTECODE="1")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert LINE in ended.stderr.splitlines()[-1]
    result = rlt(*words)
    assert result.returncode == 0, result.stderr
    assert metrics(tmp_path / "run").keys() == {1, 2}
