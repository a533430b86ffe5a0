"""A base in 4 bits and AdamW's moments in 8 bits: what they store; they learn, resume and export."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from compared import gather_whole
from lightning.pytorch import Callback
from ranks import run
from safetensors.torch import load_file
from torch import Tensor
from trainers import bare_trainer
from transformers import AutoModelForCausalLM

from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.commands.plan import Model
from rlt_lightning.datamodules import StratosDataModule, TeacherSFTData
from rlt_lightning.models.load import load_model
from rlt_lightning.models.lora import LoRA, add_adapter, merge_weights, without_adapter
from rlt_lightning.models.quantised import quantise, quantised_layers
from rlt_lightning.models.weights import stored_once, trained_tensors
from rlt_lightning.modules import SFTModule
from rlt_lightning.modules.optimizer import OptimizerConfig

needs_bitsandbytes = pytest.mark.skipif(
    util.find_spec("bitsandbytes") is None, reason="needs the quant extra: pip install 'rlt-lightning[quant]'"
)
LORA = LoRA(rank=4, alpha=8.0, base="4bit")
IDS = torch.arange(100, 140)[None]


def adapted(name: str, dtype: str = "float32") -> Any:
    """A model with a base in 4 bits, whose adapter does something."""
    model = load_model(name, dtype)
    add_adapter(model, LORA, seed=0)
    for name, parameter in trained_tensors(model).items():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 10
    return model


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.float().log_softmax(-1)


def merged(model: Any) -> dict[str, Tensor]:
    return gather_whole(merge_weights(model, stored_once(model)))


@needs_bitsandbytes
def test_only_the_adapter_is_trained_and_it_is_in_fp32(tiny_model: str) -> None:
    model = adapted(tiny_model, "bfloat16")
    assert len(list(quantised_layers(model))) == 7 * 2  # of 2 layers
    assert all(
        ".lora_" in name and tensor.dtype == torch.float32 for name, tensor in trained_tensors(model).items()
    )
    assert model.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16


@needs_bitsandbytes
def test_merged_weights_compute_what_the_trained_model_computes(tiny_model: str) -> None:
    model, plain = adapted(tiny_model), load_model(tiny_model)
    names = stored_once(plain).keys()
    base, ours, weights = without_adapter(model, log_probs), log_probs(model), merged(model)
    assert (ours - base).abs().max() > 0.01
    assert weights.keys() == names
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(log_probs(plain), ours, atol=2e-5, rtol=0)
    quantise(reference := load_model(tiny_model))
    assert torch.equal(log_probs(reference), base)  # the KL penalty's reference


class Losses(Callback):
    """Keeps the loss of every step, and the base before and after."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.losses: list[float] = []
        self.before = {n: layer.weight.data.clone() for n, layer in quantised_layers(pl_module.policy)}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.losses.append(float(pl_module.step_metrics["policy/loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.after = {n: layer.weight.data for n, layer in quantised_layers(pl_module.policy)}
        self.optimizer = trainer.optimizers[0]


def chains(model: str, folder: Path) -> StratosDataModule:
    return TeacherSFTData(
        source="chains", num_embedded_rows=16, prompts_per_step=4, tokenizer=model, output_dir=str(folder)
    )


def fit_sft(model: str, folder: Path, steps: int, lora: LoRA | None, **optimizer: Any) -> Losses:
    losses = Losses()
    sft = SFTModule(model, optimizer=OptimizerConfig(lr=2e-3, **optimizer), lora=lora)
    bare_trainer(folder, losses, steps=steps).fit(sft, datamodule=chains(model, folder))
    return losses


@needs_bitsandbytes
def test_a_loss_falls_while_the_base_stays(miniature: str, tmp_path: Path) -> None:
    run = fit_sft(miniature, tmp_path, 12, LoRA(rank=8, alpha=16.0, base="4bit"), states="8bit")
    assert sum(run.losses[-4:]) < 0.8 * sum(run.losses[:4])
    assert run.before
    assert all(torch.equal(run.after[name], codes) for name, codes in run.before.items())


@pytest.mark.full
@needs_bitsandbytes
@pytest.mark.parametrize("strategy", ["single", full("ddp")])
@pytest.mark.parametrize(
    ("lora", "options"), [(True, {"base": "4bit", "states": "8bit"}), full(False, {"states": "8bit"})]
)
def test_a_resumed_run_is_the_uninterrupted_one(
    strategy: str, lora: bool, options: dict[str, Any], tiny_model: str, tmp_path: Path
) -> None:
    options = options | {"lora": lora, "adapter": "merged"}
    run(tiny_model, tmp_path / "whole", strategy, steps=4, **options)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step=000002.ckpt"
    run(tiny_model, tmp_path / "resumed", strategy, steps=4, checkpoint=checkpoint, **options)
    ours, theirs = (load_file(tmp_path / f"{name}.safetensors") for name in ("resumed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    saved = load_file(checkpoint / "weights" / "model.safetensors")
    assert all((".lora_" in name) == lora for name in saved)
    codes = load_file(checkpoint / "state1" / "model.safetensors")
    assert {tensor.dtype for tensor in codes.values()} <= {torch.uint8, torch.float32}
    if lora:
        check_export(tmp_path / "whole", tiny_model, tmp_path / "model")
    else:
        with pytest.raises(AssertionError, match=r"model\.optimizer\.states that it began with, 8bit"):
            run(tiny_model, tmp_path / "other", strategy, steps=4, checkpoint=checkpoint)


def check_export(folder: Path, model: str, exported: Path) -> None:
    """Check that the run's own export and that of its checkpoint add the adapter to the original weights."""
    export_checkpoint(str(folder), str(exported))
    ours, own = (load_file(path / "model.safetensors") for path in (exported, folder / "model"))
    assert all(torch.equal(ours[name], own[name]) for name in own)
    end = load_file(folder.with_suffix(".safetensors"))
    name = "model.layers.1.mlp.down_proj"
    a, b = (end[f"{name}.lora_{matrix}.default.weight"] for matrix in "AB")
    original = load_model(model).get_submodule(name).weight
    torch.testing.assert_close(ours[f"{name}.weight"], original + 2.0 * b @ a)
    assert AutoModelForCausalLM.from_pretrained(exported).get_submodule(name).weight.dtype == torch.float32


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["float32", full("bfloat16")])
def test_the_plan_counts_the_bytes_of_a_real_run(dtype: str, miniature: str, tmp_path: Path) -> None:
    sft = SFTModule(miniature, OptimizerConfig(lr=1e-3, states="8bit"), lora=LORA, dtype=dtype)
    losses = Losses()
    bare_trainer(tmp_path, losses, steps=1).fit(sft, datamodule=chains(miniature, tmp_path))
    tensors = list(sft.policy.parameters())
    for _, layer in quantised_layers(sft.policy):
        state = layer.quant_state
        tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    planned = Model(sft, miniature, dtype, LORA, False, "whole")
    assert planned.stored_bytes == storage_bytes(tensors)
    states = losses.optimizer.state.values()
    kept = [t for s in states for k, t in s.items() if isinstance(t, Tensor) and not k.startswith("qmap")]
    assert planned.states_8bit == storage_bytes(kept)
