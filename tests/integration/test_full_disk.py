"""On a disk that is full nothing that was finished is lost."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import rlt
from damage import build_checkpoint
from fits import small_fit
from safetensors import SafetensorError

from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.checkpoints.folder import list_checkpoints, read_whole_state


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
    result = rlt(*small_fit(tiny_model, tmp_path / "run", "--trainer.max_steps=1"))
    assert result.returncode == 0, result.stderr
    export = partial(export_checkpoint, str(tmp_path / "run"), str(tmp_path / "model"), overwrite=True)
    export()
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    limit(1_000_000)  # in the weights; the tokenizer is smaller
    with pytest.raises((OSError, SafetensorError)):
        export()
    limit(resource.RLIM_INFINITY)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    export()
