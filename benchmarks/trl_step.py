"""The other side of the optimise phase's benchmark: TRL's GRPOTrainer on given completions.

    .venv/bin/python benchmarks/trl_step.py CASE.json

It imports nothing of ours, but the attention of unpadded.py if the case asks for it. It is a worker
process, so that its parent can alternate both sides in one run: it prints `ready`, then for every line `go`
on its standard input it runs one phase and prints the loss, the seconds and how far resident memory, or the
GPU's, rose (new gradients included) as a line of JSON, until `quit` or the end of its input. A phase is the
reference pass, the forward and the backward, by TRL's own methods. Nothing is sampled and no optimizer
steps, so every round is the same, but the first is slower: it loads code and weights.

CASE.json holds `model` and `reference` (Hugging Face folders), `prompt_ids` of one prompt, N `completions`
(ids) with N `advantages`, `temperature`, `kl_coef`, `threads`, `rows` (taken at a time), `device`,
`precision`, `liger`, `attention` (sdpa or unpadded) and `gradients`: a file for the last round's gradients,
or null. Two more keys can overrule TRL's defaults, both true: `gradient_checkpointing` computes the
policy's layers twice, and `unbiased_kl` (`use_bias_correction_kl`) multiplies the KL estimate by the ratio,
which is 1 but has a gradient.

Three properties of TRL affect the figures. The reference pass takes `rows` at a time, as the loss does. The
fused head never holds all logits, but without a GPU it scores the prompt and the padding too. And the loss
computes every position's entropy, as a metric.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read on import; also keeps TRL from reporting its use

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.integrations.liger import apply_liger_kernel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict


def build_trainer(case: dict[str, Any], folder: str) -> GRPOTrainer:
    num_completions, rows = len(case["completions"]), case["rows"]
    dtype = "bfloat16" if case["precision"] == "bf16-true" else "float32"
    if case["attention"] == "unpadded":
        import unpadded  # noqa: F401
    config = GRPOConfig(
        output_dir=folder,
        report_to="none",
        use_cpu=case["device"] == "cpu",
        bf16=case["precision"] == "bf16-mixed",
        model_init_kwargs={"dtype": dtype, "attn_implementation": case["attention"]},
        use_liger_kernel=case["liger"],
        loss_type="grpo",
        beta=case["kl_coef"],
        temperature=case["temperature"],
        num_generations=num_completions,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=num_completions // rows,
        num_iterations=1,
        max_completion_length=max(map(len, case["completions"])),
        gradient_checkpointing=case.get("gradient_checkpointing", True),
        use_bias_correction_kl=case.get("unbiased_kl", True),
    )
    dataset = Dataset.from_list([{"prompt": "never sampled from"}])
    trainer = GRPOTrainer(case["model"], never_rewarded, config, dataset)
    # TRL has no setting for the reference: it loads the policy's folder once more.
    reference = AutoModelForCausalLM.from_pretrained(case["reference"], dtype=getattr(torch, dtype))
    trainer.ref_model.load_state_dict(reference.state_dict())
    # What train() would do before its first step; we cannot call it, since it samples.
    if config.use_liger_kernel:
        apply_liger_kernel(trainer.model, config.liger_kernel_config)
    trainer.model.train()
    if config.gradient_checkpointing:
        trainer.model.activation_checkpointing_enable(config.activation_checkpointing_kwargs)
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    trainer.current_gradient_accumulation_steps = num_completions // rows
    return trainer


def never_rewarded(**_: object) -> list[float]:
    raise AssertionError("the advantages are given")


def build_inputs(case: dict[str, Any], pad_id: int) -> dict[str, torch.Tensor]:
    """Return what TRL's `_generate_and_score_completions` returns, except for the reference's log-probs."""
    completions = [torch.tensor(ids) for ids in case["completions"]]
    completion_mask = pad_sequence([torch.ones_like(ids) for ids in completions], batch_first=True)  # (N, T)
    prompt_ids = torch.tensor([case["prompt_ids"]] * len(completions))  # one prompt: no left padding
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": pad_sequence(completions, batch_first=True, padding_value=pad_id),
        "completion_mask": completion_mask,
        "advantages": torch.tensor(case["advantages"]),
    }
    return {name: tensor.to(case["device"]) for name, tensor in inputs.items()}


def optimise(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor]) -> float:
    """Run one training step up to the gradients and return the loss."""
    rows = trainer.args.per_device_train_batch_size
    with torch.no_grad():
        ref_log_probs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.ref_model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            batch_size=rows,
        )  # (N, T)
    total, num_items = 0.0, inputs["completion_mask"].sum()
    for part in split_tensor_dict(
        {**inputs, "ref_per_token_logps": ref_log_probs}, len(ref_log_probs) // rows
    ):
        loss = trainer.compute_loss(trainer.model_wrapped, {**part, "num_items_in_batch": num_items})
        trainer.accelerator.backward(loss)
        total += loss.item()
    return total


def measured(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    if inputs["prompt_ids"].is_cuda:
        return measured_on_gpu(trainer, inputs)
    trainer.model.zero_grad()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else later rounds reuse what the first had to ask for
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    resident = memory_bytes("VmRSS")
    start = time.perf_counter()
    loss = optimise(trainer, inputs)
    seconds = time.perf_counter() - start
    return {"loss": loss, "seconds": seconds, "peak_bytes": memory_bytes("VmHWM") - resident}


def measured_on_gpu(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Measure as `measure_training` in side_by_side.py."""
    optimise(trainer, inputs)  # memory is taken from the driver now, and given back below
    trainer.model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    start = time.perf_counter()
    loss = optimise(trainer, inputs)
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - allocated
    torch.cuda.empty_cache()
    return {"loss": loss, "seconds": seconds, "peak_bytes": peak}


def memory_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # TRL's chatter goes elsewhere
    torch.set_num_threads(case["threads"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(case, folder)
    inputs = build_inputs(case, trainer.processing_class.pad_token_id)
    print("ready", file=answers, flush=True)
    while sys.stdin.readline().strip() == "go":
        tokens = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        print(json.dumps(measured(trainer, inputs) | {"tokens": tokens}), file=answers, flush=True)
    if case["gradients"] is not None:
        gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
        save_file(gradients, case["gradients"])


if __name__ == "__main__":
    main()
