"""A disk that is full ends a run in one clear line, and nothing that was finished is lost."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import full
from commands import ROOT, python, run_rlt
from damage import build_checkpoint
from fits import metrics, small_fit

from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.checkpoints.folder import list_checkpoints, read_whole_state
from rlt_lightning.types import InputError

LINE = "must be written, but its disk has no room"


@pytest.fixture
def limit() -> Any:
    """Limits the size of files that this process writes, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_finds_no_room_leaves_the_one_before(limit: Any, tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "step=000006.ckpt")
    for num_bytes in (100, 1000, 2000):  # in the weights, in the state
        limit(num_bytes)
        with pytest.raises(Exception, match=r"File too large|unexpected pos"):
            build_checkpoint(tmp_path / "step=000006.ckpt", scale=2.0)
    limit(resource.RLIM_INFINITY)
    [checkpoint] = list_checkpoints(tmp_path)
    assert read_whole_state(checkpoint)["global_step"] == 6


def test_an_export_that_finds_no_room_keeps_the_model_before(
    limit: Any, tiny_model: str, tmp_path: Path
) -> None:
    run_rlt(*small_fit(tiny_model, tmp_path / "run", "--trainer.max_steps=1"))
    export = partial(export_checkpoint, str(tmp_path / "run"), str(tmp_path / "model"), overwrite=True)
    export()
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    limit(1_000_000)  # in the weights; the tokenizer is smaller
    with pytest.raises(InputError, match=f"{tmp_path / 'model'} {LINE}"):
        export()
    limit(resource.RLIM_INFINITY)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    export()


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
    assert f"{tmp_path / 'run'} {LINE}" in ended.stderr.splitlines()[-1]
    run_rlt(*words)
    assert metrics(tmp_path / "run").keys() == {1, 2}
