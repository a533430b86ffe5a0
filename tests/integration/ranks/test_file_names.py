"""Models whose files have other names than their parameters: read, adapted, trained, pushed and exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from compared import largest_difference
from fake_worker import FakeWorker
from families import build
from ranks import call, run
from safetensors.torch import load_file
from sharded import VERSION, sharded_model
from torch import Tensor
from trainers import bare_trainer
from transformers import AutoModelForCausalLM

from rlt_lightning.callbacks import ModelExporter
from rlt_lightning.datamodules import StudentSFTData
from rlt_lightning.engines import IPCPush
from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.models.file_names import to_file_names
from rlt_lightning.models.load import empty_model, load_model
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.weights import Deferred, gather_in_groups, stored_once, whole_tensors, write_weights
from rlt_lightning.modules import SFTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.rollouts.weight_sync import list_weights
from rlt_lightning.types import InputError

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "granitemoehybrid", "gpt_neox", "gemma3")


@pytest.fixture(scope="module")
def folders(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of tiny random models, as transformers writes them, with a tokenizer."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        build(family, folder, vocab_size=8192, max_position_embeddings=2048)
        found[family] = str(folder)
    return found


def read_folder(folder: str | Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(100, 140)[None], use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_as_from_pretrained_loads_them(family: str, folders: dict[str, str]) -> None:
    loaded = stored_once(load_model(folders[family]))
    empty, read = empty_model(folders[family])
    assert stored_once(empty).keys() == loaded.keys()
    assert all(torch.equal(read(name), tensor) for name, tensor in loaded.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_written_as_save_pretrained_does(
    family: str, folders: dict[str, str], tmp_path: Path
) -> None:
    model = load_model(folders[family])
    empty, _ = empty_model(folders[family])
    model.save_pretrained(tmp_path)
    expected = read_folder(tmp_path)
    assert expected.keys() != stored_once(model).keys()
    for number, knows_files in enumerate((model, empty)):
        written = tmp_path / str(number)
        written.mkdir()
        write_weights(to_file_names(knows_files, list(stored_once(model).items())), written)
        assert read_folder(written).keys() == expected.keys()
        assert largest_difference(read_folder(written), expected) == 0


def test_a_stacked_weight_is_gathered_once(folders: dict[str, str]) -> None:
    model, gathered = load_model(folders["qwen3_moe"]), []

    def defer(name: str, tensor: Tensor) -> Deferred:
        def gather() -> Tensor:
            gathered.append(name)
            return tensor

        return Deferred(tensor.shape, tensor.dtype, gather)

    names = list(stored_once(model))
    placeholders: Any = [(name, defer(name, tensor)) for name, tensor in stored_once(model).items()]
    for name, tensor in to_file_names(model, placeholders):
        with whole_tensors([tensor]) as [whole]:
            assert whole.shape == tensor.shape, name
    assert sorted(gathered) == sorted(names)


def test_workers_are_pushed_the_names_of_files(folders: dict[str, str]) -> None:
    model = load_model(folders["qwen3_moe"])
    add_adapter(model, LoRA(rank=4), seed=0)
    with FakeWorker() as worker:
        push = IPCPush(bucket_mib=1)
        push.push(list_weights(model), [WorkerClient(worker.url)], VERSION)
    require_pushed(folders["qwen3_moe"], worker)  # B is still 0


def require_pushed(model: str, worker: FakeWorker) -> None:
    pushed = worker.tensors
    assert pushed.keys() == read_folder(model).keys()
    assert largest_difference(pushed, read_folder(model)) == 0


def push_shards(rank: int, strategy: str, name: str, url: str) -> None:
    model = sharded_model(rank, strategy, name)
    named_tensors = to_file_names(model, list(model.named_parameters()))
    push = IPCPush(bucket_mib=1)
    if rank == 0:
        push.push(named_tensors, [WorkerClient(url)], VERSION)
    else:
        for _ in gather_in_groups(named_tensors, push.bucket_bytes):
            pass
    torch.distributed.barrier()


@pytest.mark.parametrize("strategy", ["fsdp2", full("zero3")])
def test_shards_of_experts_are_pushed_whole(strategy: str, folders: dict[str, str], tmp_path: Path) -> None:
    with FakeWorker() as worker:
        call(push_shards, tmp_path, strategy, folders["qwen3_moe"], worker.url)
    require_pushed(folders["qwen3_moe"], worker)


@pytest.mark.parametrize("family", ["qwen3_moe", full("deepseek_v3"), full("gemma3")])
def test_a_trained_adapter_is_exported_merged(family: str, folders: dict[str, str], tmp_path: Path) -> None:
    model = folders[family]
    module = SFTModule(model, OptimizerConfig(lr=1e-2), lora=LoRA(4, 8.0), gradient_checkpointing=True)
    trainer = bare_trainer(tmp_path, ModelExporter(), steps=2)
    trainer.fit(module, datamodule=StudentSFTData(num_embedded_rows=8, tokenizer=model, prompts_per_step=2))
    assert read_folder(tmp_path / "model").keys() == read_folder(model).keys()
    exported = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    torch.testing.assert_close(exported, logits(module.policy), atol=2e-4, rtol=0)
    assert (exported - logits(load_model(model))).abs().max() > 0.01


def test_an_adapter_is_refused_before_training_if_files_lack_weights(
    folders: dict[str, str], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    model = tmp_path / "model"
    shutil.copytree(folders["qwen3_moe"], model)
    kept = {name: tensor for name, tensor in read_folder(model).items() if name != "model.norm.weight"}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    module = SFTModule(str(model), OptimizerConfig(lr=1e-2), lora=LoRA(4))
    with pytest.raises(InputError, match=r"missing or have another one: model\.norm\.weight"):
        bare_trainer(tmp_path).fit(module, datamodule=StudentSFTData(tokenizer=str(model)))


@pytest.mark.parametrize("strategy", ["fsdp2", full("zero3")])
def test_sharded_experts_train_as_whole_ones(strategy: str, folders: dict[str, str], tmp_path: Path) -> None:
    model = folders["qwen3_moe"]
    for name in ("single", strategy):
        run(model, tmp_path / name, name, steps=2, export=True)
    single, sharded = (read_folder(tmp_path / name / "model") for name in ("single", strategy))
    assert sharded.keys() == read_folder(model).keys()
    assert largest_difference(sharded, single) < 1e-5
    expert = "model.layers.0.mlp.experts.1.down_proj.weight"
    assert not torch.equal(single[expert], read_folder(model)[expert])
