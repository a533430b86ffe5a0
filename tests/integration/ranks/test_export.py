"""`rlt export` makes a model folder from any checkpoint, on a CPU, one file at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import full
from commands import run_rlt
from compared import largest_difference
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.models import weights
from rlt_lightning.types import InputError


@pytest.mark.parametrize("strategy", ["single", full("zero3")])
def test_a_checkpoint_becomes_an_ordinary_model_folder(
    strategy: str, runs: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    checkpoint, folder = runs[strategy] / "checkpoints" / "step=000005.ckpt", tmp_path / "model"
    result = run_rlt("export", f"--ckpt_path={checkpoint}", f"--output_dir={folder}")
    assert result.stdout == f"Done: {folder}, from {checkpoint}\n"
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = load_file(runs[strategy].with_suffix(".safetensors"))  # gathered at the end of the run
    assert largest_difference({n: model.state_dict()[n] for n in trained}, trained) == 0
    assert largest_difference(trained, load_file(Path(tiny_model) / "model.safetensors")) > 1e-5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    assert "| optimizer steps | 5 |" in (folder / "README.md").read_text()


def test_weights_are_written_in_several_files_in_the_type_that_is_asked_for(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "FILE_BYTES", 100_000)
    export_checkpoint(str(runs["single"]), str(tmp_path / "model"), dtype="bfloat16")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    final = load_file(runs["single"].with_suffix(".safetensors"))
    assert all(torch.equal(model.state_dict()[name], tensor.bfloat16()) for name, tensor in final.items())


def test_an_export_is_replaced_only_when_asked(runs: dict[str, Path], tmp_path: Path) -> None:
    export_checkpoint(str(runs["single"]), str(tmp_path / "model"))
    with pytest.raises(InputError, match="--overwrite true"):
        export_checkpoint(str(runs["single"]), str(tmp_path / "model"))
    export_checkpoint(str(runs["single"]), str(tmp_path / "model"), overwrite=True)
    (tmp_path / "model.tmp").mkdir()  # not ours to delete
    with pytest.raises(InputError, match=r"model\.tmp"):
        export_checkpoint(str(runs["single"]), str(tmp_path / "model"), overwrite=True)
