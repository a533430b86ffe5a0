"""Low-rank adapters: the equation by hand, training under every strategy, export merged and separate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from commands import run_rlt
from compared import gather_whole
from families import build
from grpo import data, module, rollout_callback
from lightning.pytorch import Callback
from peft import PeftModel
from ranks import Runs, run
from safetensors.torch import load_file
from torch import Tensor, nn
from trainers import bare_trainer
from transformers import AutoModelForCausalLM

from rlt_lightning.callbacks import ReferenceSync
from rlt_lightning.models import lora as lora_module
from rlt_lightning.models.load import empty_model, load_model
from rlt_lightning.models.lora import LoRA, add_adapter, defer_merge, merge_weights, without_adapter
from rlt_lightning.models.weights import stored_once, trained_tensors
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.losses import GRPOLoss
from rlt_lightning.types import InputError

LORA = LoRA(rank=4, alpha=8.0)
IDS = torch.arange(100, 140)[None]


def adapted(name: str, lora: LoRA = LORA) -> Any:
    """A model whose adapter does something."""
    model = load_model(name)
    add_adapter(model, lora, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 10)
    return model


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.log_softmax(-1)


def merged(model: Any) -> dict[str, Tensor]:
    return gather_whole(merge_weights(model, stored_once(model)))


def test_only_chosen_layers_are_adapted(tiny_model: str) -> None:
    with pytest.raises(InputError, match="no_such"):
        adapted(tiny_model, LoRA(targets=["q_proj", "no_such"]))
    model = adapted(tiny_model, LoRA(targets=["q_proj"]))
    assert {name.rpartition("self_attn.")[2] for name in trained_tensors(model)} == {
        "q_proj.lora_A.default.weight",
        "q_proj.lora_B.default.weight",
    }


def test_autocast_makes_no_copies_that_change_no_bit(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> tuple[list[Tensor], int]:
        """Outputs and gradients, and how many fp32 copies of half precision were made."""
        model = load_model(tiny_model, "bfloat16")
        add_adapter(model, LoRA(rank=4), seed=0)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # it begins as 0, which would hide A's gradient
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as recorded:
            logits = model(torch.arange(20)[None], use_cache=False).logits
            logits.float().square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        copies = sum(event.name == "aten::_to_copy" for event in recorded.events())
        return [logits.detach(), *gradients], copies

    ours, few = step()
    monkeypatch.setattr(lora_module, "cast_unless_autocast", lambda states, dtype: states.to(dtype))
    theirs, many = step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert many - few >= 2 * 7  # an input of each of the layers, and its gradient


def test_the_part_that_an_adapter_reaches_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("qwen3_moe", tmp_path)
    adapted(str(tmp_path))
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("model.lora reaches")]
    model = load_model(str(tmp_path))
    total = sum(weight.numel() for weight in model.parameters())
    experts = sum(weight.numel() for name, weight in model.named_parameters() if "experts.gate_up" in name)
    assert f"experts.gate_up_proj {experts / total:.0%}" in line


def test_an_empty_model_gets_the_values_of_a_loaded_one(tiny_model: str) -> None:
    loaded = load_model(tiny_model, "bfloat16")
    add_adapter(loaded, LORA, seed=3)
    empty, read = empty_model(tiny_model, "bfloat16")
    read = add_adapter(empty, LORA, 3, read)
    assert {tensor.device.type for tensor in stored_once(empty).values()} == {"meta"}
    for (name, own), (other_name, other) in zip(
        stored_once(loaded).items(), stored_once(empty).items(), strict=True
    ):
        assert (name, own.dtype) == (other_name, other.dtype)
        assert own.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
        assert torch.equal(own, read(name).to(own.dtype)), name
    other_seed = load_model(tiny_model)
    add_adapter(other_seed, LORA, seed=4)
    a = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(trained_tensors(loaded)[a], trained_tensors(other_seed)[a])


def test_an_adapter_is_drawn_in_main_memory_under_any_default_device(tiny_model: str) -> None:
    expected = load_model(tiny_model)
    add_adapter(expected, LORA, seed=0)
    model, read = empty_model(tiny_model)
    # Lightning calls configure_model with the GPU as the default device, which refuses a CPU's generator.
    with torch.device("meta"):
        read = add_adapter(model, LORA, 0, read)
        drawn = {name: read(name) for name in trained_tensors(model)}
    for name, tensor in trained_tensors(expected).items():
        assert drawn[name].device.type == "cpu"
        assert torch.equal(drawn[name], tensor), name


def test_a_weight_is_merged_where_it_is_stored() -> None:
    # At the end of a run W is read from files into main memory, while A and B are on the GPU.
    w, a, b = torch.ones(3, 3, device="meta"), torch.ones(2, 3), torch.ones(3, 2)
    assert defer_merge(w, a, b, 1.0, transposed=False).full_tensor().device == w.device


def test_merged_weights_compute_the_same_and_without_the_adapter_the_base_does(tiny_model: str) -> None:
    model, plain = adapted(tiny_model), load_model(tiny_model)
    base = log_probs(plain)
    assert torch.equal(without_adapter(model, log_probs), base)
    ours = log_probs(model)  # the adapter is on again
    assert (ours - base).abs().max() > 0.01
    weights = merged(model)
    assert weights.keys() == stored_once(plain).keys()
    plain.load_state_dict(weights, strict=False)  # the tied head is not stored
    torch.testing.assert_close(log_probs(plain), ours, atol=2e-5, rtol=0)


def test_a_transposed_layer_merges_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel  # whose Conv1D stores (in, out)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=64, n_embd=32, n_layer=1, n_head=2)).eval()
    plain = GPT2LMHeadModel(model.config).eval()
    add_adapter(model, LoRA(rank=2, alpha=4.0), seed=0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    plain.load_state_dict(merged(model), strict=False)
    torch.testing.assert_close(log_probs(plain), log_probs(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama4_text", "deepseek_v4", "phimoe", "falcon"])
def test_only_what_multiplies_is_adapted(family: str, tmp_path: Path) -> None:
    build(family, tmp_path)
    model = load_model(str(tmp_path)).eval()
    with torch.no_grad():
        before = model(IDS, use_cache=False).logits
        add_adapter(model, LORA, seed=0)
        torch.testing.assert_close(model(IDS, use_cache=False).logits, before)
    assert len(trained_tensors(model)) >= 24  # A and B of attention in three layers


class End(Callback):
    """Keeps what a run ended with."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics = pl_module.step_metrics
        self.weights = merged(pl_module.policy)


def fit(model: str, folder: Path, *callbacks: Any, **options: Any) -> End:
    end = End()
    optimizer = OptimizerConfig(lr=1e-2, max_grad_norm=0)
    rlt = module(model, optimizer=optimizer, policy_loss=GRPOLoss(kl_coef=1.0), **options)
    bare_trainer(folder, rollout_callback(), end, *callbacks, steps=3).fit(
        rlt, datamodule=data(model, folder)
    )
    assert (rlt.reference is None) == (not callbacks)
    return end


@pytest.mark.full
def test_a_reference_that_rests_is_the_base_and_costs_no_copy(tiny_model: str, tmp_path: Path) -> None:
    shared = fit(tiny_model, tmp_path / "shared", lora=LORA)
    copied = fit(tiny_model, tmp_path / "copied", ReferenceSync(every_n_steps=100), lora=LORA)
    kl, with_copy = (float(run.metrics["policy/kl_ref"]) for run in (shared, copied))
    assert kl > 1e-6
    assert kl == pytest.approx(with_copy, rel=1e-4)
    for name, tensor in copied.weights.items():
        torch.testing.assert_close(shared.weights[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_moving_reference_moves_towards_the_merged_policy(tiny_model: str, tmp_path: Path) -> None:
    rlt = module(tiny_model, optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=0), lora=LORA)
    callbacks = rollout_callback(), ReferenceSync(every_n_steps=2, alpha=0.75)
    bare_trainer(tmp_path, *callbacks, steps=2).fit(rlt, datamodule=data(tiny_model, tmp_path))
    base, policy = load_model(tiny_model).state_dict(), merged(rlt.policy)
    assert rlt.reference is not None
    for name, tensor in rlt.reference.model.named_parameters():
        torch.testing.assert_close(tensor, 0.75 * policy[name] + 0.25 * base[name])


@pytest.fixture(scope="module")
def adapters(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of finished runs with an adapter, by strategy; each has exported the adapter separately."""
    return Runs(tiny_model, tmp_path_factory.mktemp("adapters"), lora=True, steps=4)


def with_peft(base: str, folder: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()


@pytest.mark.full
def test_every_strategy_trains_the_same_adapter(adapters: dict[str, Path], tiny_model: str) -> None:
    folders = {strategy: adapters[strategy] for strategy in ("single", "fsdp2", "zero3")}
    weights = {s: load_file(folder.with_suffix(".safetensors")) for s, folder in folders.items()}
    checkpoint = load_file(
        adapters["zero3"] / "checkpoints" / "step=000004.ckpt" / "weights" / "model.safetensors"
    )
    assert checkpoint.keys() == {name for name in weights["single"] if ".lora_" in name}
    start = load_model(tiny_model)
    add_adapter(start, LORA, seed=0)
    for name, before in stored_once(start).items():
        after = weights["single"][name]
        assert torch.equal(before, after) == (".lora_" not in name)
        for strategy in ("fsdp2", "zero3"):
            torch.testing.assert_close(weights[strategy][name], after, atol=2e-6, rtol=1e-5)
    whole = {s: log_probs(with_peft(tiny_model, folder / "model")) for s, folder in folders.items()}
    for strategy in ("fsdp2", "zero3"):
        torch.testing.assert_close(whole[strategy], whole["single"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("strategy", ["single", full("fsdp2"), full("zero3")])
def test_a_resumed_adapter_is_the_uninterrupted_one(
    strategy: str, adapters: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    checkpoint = adapters[strategy] / "checkpoints" / "step=000002.ckpt"
    run(tiny_model, tmp_path / "run", strategy, steps=4, checkpoint=checkpoint, lora=True)
    ours, theirs = (load_file(f.with_suffix(".safetensors")) for f in (tmp_path / "run", adapters[strategy]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("strategy", ["single", full("fsdp2")])
def test_a_checkpoint_of_another_adapter_is_refused(
    strategy: str, adapters: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    checkpoint = adapters["single"] / "checkpoints" / "step=000002.ckpt"
    with pytest.raises(AssertionError, match=r"must have the same model\.lora as this one"):
        run(tiny_model, tmp_path / "run", strategy, steps=4, checkpoint=checkpoint)


def test_an_adapter_is_exported_merged_and_separate(
    adapters: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    alone = log_probs(with_peft(tiny_model, adapters["fsdp2"] / "model"))
    checkpoint = adapters["fsdp2"] / "checkpoints" / "step=000004.ckpt"
    for adapter in ("merged", "separate"):
        options = [f"--ckpt_path={checkpoint}", f"--output_dir={tmp_path / adapter}", f"--adapter={adapter}"]
        run_rlt("export", *options)
    assert "LoRA | rank 4, alpha 8.0" in (tmp_path / "merged" / "README.md").read_text()
    assert torch.equal(log_probs(with_peft(tiny_model, tmp_path / "separate")), alone)
    config = json.loads((tmp_path / "separate" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny_model
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(log_probs(merged_model), alone, atol=2e-5, rtol=0)


@pytest.mark.full
def test_half_precision_rounds_neither_the_start_nor_the_export(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny_model, folder, "zero3_bf16", steps=2, lora=True, adapter="merged")
    start = load_model(tiny_model)
    add_adapter(start, LORA, seed=0)
    initial = load_file(folder / "initial.ckpt" / "weights" / "model.safetensors")
    assert all(torch.equal(initial[name], tensor) for name, tensor in trained_tensors(start).items())
    run_rlt("export", f"--ckpt_path={folder}", f"--output_dir={tmp_path / 'model'}")
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder / "model", tmp_path / "model"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    changed = ours["model.layers.0.mlp.down_proj.weight"]
    assert changed.dtype == torch.float32
    assert not torch.equal(changed, changed.bfloat16().float())


def test_an_adapter_does_not_go_on_with_another_base(
    adapters: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    checkpoint = adapters["single"] / "checkpoints" / "step=000002.ckpt"
    with pytest.raises(AssertionError, match="must have the same model as this one"):
        run(str(other), tmp_path / "run", "single", steps=4, checkpoint=checkpoint, lora=True)
