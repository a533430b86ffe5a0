"""The optimise phase: reference pass, forward and backward, against TRL's GRPOTrainer on given completions.

    .venv/bin/python benchmarks/optimise.py [--gradient_checkpointing true] [--against plain]

16 completions of 128 tokens after a prompt of 350, SmolLM2-135M in fp32, a reference that differs from the
policy, GRPO with beta 0.04. Each side is a separate process (trl_step.py; `serve` below); they take turns and
run one phase at a time, without optimizer steps. Losses and gradients must agree before speed is compared.
`--against plain` needs no TRL: the other side is the same model one completion at a time with full logits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from side_by_side import alternate, bars, benchmark_parser, finish, measure, read_options

from rlt_lightning.models.embedded import DEFAULT_MODEL, resolve
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.packed import HeadOptions, compute_log_probs
from rlt_lightning.numerics import GroupNormalisedAdvantages, GRPOLoss
from rlt_lightning.numerics.packing import (
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    micro_batches,
    to_padded,
)

HERE = Path(__file__).parent
TIME_GOAL, MEMORY_GOAL = 4.0, 0.4


def serve(path: str) -> None:
    """Run our side, as trl_step.py runs TRL's: one phase for every `go` on the standard input."""
    case = json.loads(Path(path).read_text())
    torch.set_num_threads(case["threads"])
    policy, reference = load_model(case["model"]).train(), load_model(case["reference"])
    reference.requires_grad_(False)
    if case["gradient_checkpointing"]:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    prompt, completions = case["prompt_ids"], case["completions"]
    sequences = [
        ScoredSequence(prompt, ids, [False] * len(prompt) + [True] * len(ids)) for ids in completions
    ]
    lengths = [SequenceLengths(0, len(prompt), len(ids)) for ids in completions]
    rows = micro_batches(lengths, case["micro_batch_tokens"], case["layout"])
    policy_loss = GRPOLoss(kl_coef=case["kl_coef"], unbiased_kl=case["unbiased_kl"])
    advantages, head = torch.tensor(case["advantages"]), HeadOptions()
    losses: list[float] = []

    def phase() -> None:
        losses.append(0.0)
        for row in rows:
            packed = PackedSequences.from_sequences(sequences, row.families)
            lengths = [len(completions[i]) for i in row.indices]
            with torch.no_grad():
                ref_flat, _ = compute_log_probs(reference, packed, case["temperature"], head)
            flat, _ = compute_log_probs(policy, packed, case["temperature"], head, with_entropy=True)
            log_probs, token_mask = to_padded(flat, lengths)
            loss, _ = policy_loss(
                log_probs=log_probs,
                ref_log_probs=to_padded(ref_flat, lengths)[0],
                advantages=advantages[row.indices],
                token_mask=token_mask,
                num_sequences=len(completions),
                num_tokens=sum(map(len, completions)),
            )
            loss.backward()
            losses[-1] += loss.item()

    answer(policy, phase, losses, case["gradients"])


def serve_plain(path: str) -> None:
    """Run the side without TRL: one completion at a time, with full logits."""
    case = json.loads(Path(path).read_text())
    torch.set_num_threads(case["threads"])
    policy, reference = (
        load_model(case[name], attn_implementation="sdpa") for name in ("model", "reference")
    )
    policy.train()
    if case["gradient_checkpointing"]:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy_loss = GRPOLoss(kl_coef=case["kl_coef"], unbiased_kl=case["unbiased_kl"])
    num_tokens = sum(map(len, case["completions"]))
    losses: list[float] = []

    def log_probs_of_completion(model: Any, completion: list[int]) -> torch.Tensor:
        ids = torch.tensor([case["prompt_ids"] + completion])
        logits = model(input_ids=ids, use_cache=False).logits / case["temperature"]
        start = len(case["prompt_ids"])
        return logits.log_softmax(-1)[:, start - 1 : -1].gather(2, ids[:, start:, None])[..., 0]

    def phase() -> None:
        losses.append(0.0)
        for completion, advantage in zip(case["completions"], case["advantages"], strict=True):
            with torch.no_grad():
                ref_log_probs = log_probs_of_completion(reference, completion)
            log_probs = log_probs_of_completion(policy, completion)  # (1, T)
            loss, _ = policy_loss(
                log_probs=log_probs,
                ref_log_probs=ref_log_probs,
                advantages=torch.tensor([advantage]),
                token_mask=torch.ones_like(log_probs, dtype=torch.bool),
                num_sequences=len(case["completions"]),
                num_tokens=num_tokens,
            )
            loss.backward()
            losses[-1] += loss.item()

    answer(policy, phase, losses, case["gradients"])


def answer(policy: Any, phase: Callable[[], None], losses: list[float], gradients: str) -> None:
    """Run one phase for every line `go` of the standard input; save the last gradients."""
    print("ready", flush=True)
    while sys.stdin.readline().strip() == "go":
        policy.zero_grad()
        print(json.dumps(measure(phase) | {"loss": losses[-1]}), flush=True)
    save_file({name: p.grad for name, p in policy.named_parameters()}, gradients)


class Side:
    """A process that runs one phase when called."""

    def __init__(self, command: list[str], case: dict[str, Any], folder: Path, name: str) -> None:
        self.gradients = folder / f"{name}.safetensors"
        path = folder / f"{name}.json"
        path.write_text(json.dumps(case | {"gradients": str(self.gradients)}))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*command, str(path)], **pipes)
        # Deepspeed prints a line when TRL imports it.
        assert any(line.strip() == "ready" for line in self.process.stdout)

    def __call__(self) -> dict[str, float]:
        print("go", file=self.process.stdin, flush=True)
        result: dict[str, float] = json.loads(self.process.stdout.readline())
        return result

    def finish(self) -> dict[str, torch.Tensor]:
        """End the process; return its last gradients."""
        print("quit", file=self.process.stdin, flush=True)
        assert self.process.wait() == 0
        return load_file(self.gradients)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--against", choices=["trl", "plain"], default="trl")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layout", choices=["auto", "shared_prefix", "packed", "single"], default="auto")
    parser.add_argument("--micro_batch_tokens", type=int, default=16384)
    parser.add_argument("--gradient_checkpointing", choices=["true", "false"], default="false")
    options = read_options(parser, model="miniature", against="plain", completions=4, length=8, threads=1)
    from reward import one_group  # its text and its sampling

    model = load_model(options.model)
    rollouts = one_group(model, load_tokenizer(options.model), options.completions, options.length)
    torch.manual_seed(0)
    rewards = torch.randn(options.completions)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for parameter in model.parameters():  # a reference that differs, so that the KL has a gradient
            parameter.data += 0.02 * parameter.data.std().nan_to_num() * torch.randn_like(parameter)
        model.save_pretrained(folder / "reference")
        load_tokenizer(options.model).save_pretrained(folder / "reference")
        case = {
            "model": resolve(options.model),
            "reference": str(folder / "reference"),
            "prompt_ids": rollouts.rollouts[0].problem.teacher_prompt,
            "completions": [rollout.completion.token_ids for rollout in rollouts.rollouts],
            "advantages": GroupNormalisedAdvantages()(rewards, options.completions).tolist(),
            "temperature": rollouts.temperature,
            "kl_coef": 0.04,
            "unbiased_kl": True,
            "gradient_checkpointing": options.gradient_checkpointing == "true",
            "threads": options.threads,
            "layout": options.layout,
            "micro_batch_tokens": options.micro_batch_tokens,
        }
        other = "TRL" if options.against == "trl" else "plain"
        theirs = [str(HERE / "trl_step.py")] if other == "TRL" else [__file__, "serve_plain"]
        sides = {
            other: Side([sys.executable, *theirs], case, folder, other),
            "ours": Side([sys.executable, __file__, "serve"], case, folder, "ours"),
        }
        results: dict[str, Any] = alternate(sides, options.rounds)
        their_gradients, our_gradients = (side.finish() for side in sides.values())
    loss_error = abs(results["ours"]["loss"] - results[other]["loss"])
    errors = {
        name: ((our_gradients[name] - gradient).norm() / gradient.norm()).item()
        for name, gradient in their_gradients.items()
    }
    assert loss_error < 1e-4, loss_error
    # The tiny model is so sure of most tokens that 1 - p, and with it the gradient, is mostly rounding.
    assert max(errors.values()) < (1e-2 if options.tiny else 1e-3), errors
    time_ratio = results[other]["seconds"] / results["ours"]["seconds"]
    memory_ratio = results["ours"]["peak_bytes"] / max(1, results[other]["peak_bytes"])
    settings = {k: v for k, v in vars(options).items() if k != "output"}
    panels = {
        "seconds": {name: result["seconds"] for name, result in results.items()},
        "peak memory, GiB": {name: result["peak_bytes"] / 2**30 for name, result in results.items()},
    }
    title = f"optimise phase, {options.completions} x {options.length} tokens after 350, {options.model}, CPU"
    agreement = {"loss_error": loss_error, "largest_gradient_error": max(errors.values())}
    print(f"loss differs by {loss_error:.1e}, gradients by {max(errors.values()):.1e} (relative, largest)")
    finish(
        options.output,
        settings | agreement | results,
        lambda: bars(options.output, title, panels),
        ratio=time_ratio,
        goal=TIME_GOAL,
        memory=memory_ratio,
        memory_goal=MEMORY_GOAL,
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", path]:
            serve(path)
        case ["serve_plain", path]:
            serve_plain(path)
        case _:
            main()
