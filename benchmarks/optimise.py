"""The optimise phase: reference pass, forward and backward, against TRL's GRPOTrainer on given completions.

    .venv/bin/python benchmarks/optimise.py [--gradient_checkpointing true] [--against plain]

16 completions of 128 tokens after a prompt of 350, SmolLM2-135M in fp32, a reference that differs from the
policy, GRPO with beta 0.04. Each side is a separate process (trl_step.py; `serve` below); they take turns and
run one phase at a time, without optimizer steps. Losses and gradients must agree before speed is compared.
`--against plain` needs no TRL: the other side is the same model one completion at a time with full logits.

On a GPU: --device cuda --precision bf16-true --liger. With --shortest the completions are random tokens, so
many at least and --length at most. Losses and gradients must agree in fp32 only. TRL's attention with a
padding mask cannot use PyTorch's flash kernel; `--against trl unpadded` adds TRL with one that can
(unpadded.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from side_by_side import alternate, bars, benchmark_parser, finish, measure_training, read_options

from rlt_lightning.models.embedded import DEFAULT_MODEL, resolve
from rlt_lightning.models.kernels import Kernels, fuse_blocks, prepare_model
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
TIME_GOAL, MEMORY_GOAL, TEMPERATURE = 4.0, 0.4, 0.7  # as reward.py
PRECISIONS = {"32-true": "float32", "bf16-true": "bfloat16", "bf16-mixed": "float32"}
NAMES = {"trl": "TRL", "unpadded": "TRL, unpadded attention", "plain": "plain"}


def load_both(case: dict[str, Any], attention: str | None = None) -> tuple[Any, Any]:
    """Load policy and reference where they compute, the policy as it is trained."""
    dtype = PRECISIONS[case["precision"]]
    with torch.device(case["device"]):
        policy, reference = (load_model(case[name], dtype, attention) for name in ("model", "reference"))
    if case["gradient_checkpointing"]:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train(), reference.requires_grad_(False)


def autocast(case: dict[str, Any]) -> torch.autocast:
    """Return the context of a forward."""
    device = torch.device(case["device"]).type
    return torch.autocast(device, torch.bfloat16, enabled=case["precision"] == "bf16-mixed")


def call(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(model, *arguments)`."""
    return function(model, *arguments)


def serve(path: str) -> None:
    """Run our side, as trl_step.py runs TRL's: one phase for every `go` on the standard input."""
    case = json.loads(Path(path).read_text())
    torch.set_num_threads(case["threads"])
    policy, reference = load_both(case)
    device, kernels = policy.device, Kernels(liger=case["liger"])
    with autocast(case):  # as at the start of a run
        head = prepare_model(partial(call, policy), "policy", kernels, HeadOptions(), device)
        fuse_blocks(partial(call, reference), "reference", kernels, device)
    prompt, completions = case["prompt_ids"], case["completions"]
    sequences = [
        ScoredSequence(prompt, ids, [False] * len(prompt) + [True] * len(ids)) for ids in completions
    ]
    lengths = [SequenceLengths(0, len(prompt), len(ids)) for ids in completions]
    rows = micro_batches(lengths, case["micro_batch_tokens"], case["layout"])
    policy_loss = GRPOLoss(kl_coef=case["kl_coef"], unbiased_kl=case["unbiased_kl"])
    advantages = torch.tensor(case["advantages"], device=device)
    losses: list[float] = []

    def phase() -> None:
        losses.append(0.0)
        for row in rows:
            packed = PackedSequences.from_sequences(sequences, row.families, device)
            lengths = [len(completions[i]) for i in row.indices]
            with torch.no_grad(), autocast(case):
                ref_flat, _ = compute_log_probs(reference, packed, case["temperature"], head)
            with autocast(case):
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

    answer(policy, phase, losses, case["gradients"], sum(row.num_tokens for row in rows))


def serve_plain(path: str) -> None:
    """Run the side without TRL: one completion at a time, with full logits."""
    case = json.loads(Path(path).read_text())
    torch.set_num_threads(case["threads"])
    policy, reference = load_both(case, "sdpa")
    policy_loss = GRPOLoss(kl_coef=case["kl_coef"], unbiased_kl=case["unbiased_kl"])
    prompt, completions = case["prompt_ids"], case["completions"]
    num_tokens = sum(map(len, completions))
    losses: list[float] = []

    def log_probs_of_completion(model: Any, completion: list[int]) -> torch.Tensor:
        ids, start = torch.tensor([prompt + completion], device=model.device), len(prompt)
        with autocast(case):
            logits = model(input_ids=ids, use_cache=False).logits.float() / case["temperature"]
        return logits.log_softmax(-1)[:, start - 1 : -1].gather(2, ids[:, start:, None])[..., 0]

    def phase() -> None:
        losses.append(0.0)
        for completion, advantage in zip(completions, case["advantages"], strict=True):
            with torch.no_grad():
                ref_log_probs = log_probs_of_completion(reference, completion)
            log_probs = log_probs_of_completion(policy, completion)  # (1, T)
            loss, _ = policy_loss(
                log_probs=log_probs,
                ref_log_probs=ref_log_probs,
                advantages=log_probs.new_tensor([advantage]),
                token_mask=torch.ones_like(log_probs, dtype=torch.bool),
                num_sequences=len(completions),
                num_tokens=num_tokens,
            )
            loss.backward()
            losses[-1] += loss.item()

    answer(policy, phase, losses, case["gradients"], num_tokens + len(prompt) * len(completions))


def answer(
    policy: Any, phase: Callable[[], None], losses: list[float], gradients: str, num_tokens: int
) -> None:
    """Run one phase, of so many tokens, for every line `go` of the input; save the last gradients."""
    print("ready", flush=True)
    while sys.stdin.readline().strip() == "go":
        measured = measure_training(policy, phase, policy.device)
        print(json.dumps(measured | {"loss": losses[-1], "tokens": num_tokens}), flush=True)
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
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.gradients.stem} ended in a round, for the reason above")
        result: dict[str, float] = json.loads(line)
        return result

    def finish(self) -> dict[str, torch.Tensor]:
        """End the process; return its last gradients."""
        print("quit", file=self.process.stdin, flush=True)
        assert self.process.wait() == 0
        return load_file(self.gradients)


def draw_group(num_words: int, options: Any) -> tuple[list[int], list[list[int]]]:
    """Return a prompt of 500 random tokens, and completions of --shortest to --length."""
    lengths = torch.randint(options.shortest, options.length + 1, (options.completions,)).tolist()
    prompt, *completions = (torch.randint(3, num_words, (length,)).tolist() for length in (500, *lengths))
    return prompt, completions


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest relative error of a weight's gradient, and the cosine of all gradients together."""
    pairs = [(ours[name].float(), gradient.float()) for name, gradient in theirs.items()]
    dot = sum((x * y).sum().item() for x, y in pairs)
    norms = [sum(x.square().sum().item() for x in side) ** 0.5 for side in zip(*pairs, strict=True)]
    largest = max(((x - y).norm() / y.norm()).item() for x, y in pairs)
    return {"largest_gradient_error": largest, "gradient_cosine": dot / (norms[0] * norms[1])}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--against", choices=list(NAMES), nargs="+", default=["trl"])
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument(
        "--shortest", type=int, help="completion of random tokens; by default they are sampled"
    )
    parser.add_argument("--rows", type=int, help="that TRL takes at a time; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="32-true")
    parser.add_argument("--liger", action="store_true", help="in all sides but plain")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layout", choices=["auto", "shared_prefix", "packed", "single"], default="auto")
    parser.add_argument("--micro_batch_tokens", type=int, default=16384)
    parser.add_argument("--gradient_checkpointing", choices=["true", "false"], default="false")
    options = read_options(parser, model="miniature", against=["plain"], completions=4, length=8, threads=1)
    with torch.device(options.device):
        model = load_model(options.model, PRECISIONS[options.precision])
    torch.manual_seed(0)
    if options.shortest:
        prompt_ids, completions = draw_group(model.config.vocab_size, options)
    else:
        from reward import one_group  # its text and its sampling

        rollouts = one_group(model, load_tokenizer(options.model), options.completions, options.length)
        prompt_ids = rollouts.rollouts[0].problem.teacher_prompt
        completions = [rollout.completion.token_ids for rollout in rollouts.rollouts]
    rewards = torch.randn(options.completions)
    others = [NAMES[name] for name in options.against]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for parameter in model.parameters():  # a reference that differs, so that the KL has a gradient
            parameter.data += 0.02 * parameter.data.std().nan_to_num() * torch.randn_like(parameter)
        model.save_pretrained(folder / "reference")
        load_tokenizer(options.model).save_pretrained(folder / "reference")
        del model  # its memory is the sides'
        torch.cuda.empty_cache()
        case = {
            "model": resolve(options.model),
            "reference": str(folder / "reference"),
            "prompt_ids": prompt_ids,
            "completions": completions,
            "advantages": GroupNormalisedAdvantages()(rewards, options.completions).tolist(),
            "temperature": TEMPERATURE,
            "kl_coef": 0.04,
            "unbiased_kl": True,
            "gradient_checkpointing": options.gradient_checkpointing == "true",
            "rows": options.rows or options.completions,
        }
        names = "device", "precision", "liger", "threads", "layout", "micro_batch_tokens"
        case |= {name: getattr(options, name) for name in names}
        sides = {}
        for other in others:
            theirs = [__file__, "serve_plain"] if other == "plain" else [str(HERE / "trl_step.py")]
            attention = {"attention": "unpadded" if other == NAMES["unpadded"] else "sdpa"}
            sides[other] = Side([sys.executable, *theirs], case | attention, folder, other)
        sides["ours"] = Side([sys.executable, __file__, "serve"], case, folder, "ours")
        results: dict[str, Any] = alternate(sides, options.rounds)
        *their_gradients, our_gradients = (side.finish() for side in sides.values())
        agreement: dict[str, Any] = {}
        for other, gradients in zip(others, their_gradients, strict=True):
            agreement[other] = compare(our_gradients, gradients)
            agreement[other]["loss_error"] = abs(results["ours"]["loss"] - results[other]["loss"])
    # The tiny model is so sure of most tokens that 1 - p, and with it the gradient, is mostly rounding.
    bound = 1e-2 if options.tiny else 1e-3
    if options.precision == "32-true":
        assert all(errors["loss_error"] < 1e-4 for errors in agreement.values()), agreement
        assert all(errors["largest_gradient_error"] < bound for errors in agreement.values()), agreement
    other = others[0]
    time_ratio = results[other]["seconds"] / results["ours"]["seconds"]
    memory_ratio = results["ours"]["peak_bytes"] / max(1, results[other]["peak_bytes"])
    settings = {k: v for k, v in vars(options).items() if k != "output"}
    panels = {
        "seconds": {name: result["seconds"] for name, result in results.items()},
        "peak memory, GiB": {name: result["peak_bytes"] / 2**30 for name, result in results.items()},
    }
    name = Path(options.model).name
    title = f"optimise phase, {options.completions} x {options.length} tokens after {len(prompt_ids)}, {name}"
    for side, errors in agreement.items():
        print(f"{side}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    finish(
        options.output,
        settings | agreement[other] | {"agreement": agreement} | results,
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
