"""The reward of one group: `PassRunner` against a loop over samples with full logits.

    .venv/bin/python benchmarks/reward.py [--rounds 5] [--device cuda --precision bf16-true [--liger]]

Samples 16 completions of 128 tokens after a prompt of 350 with SmolLM2-135M, which is teacher and student, in
fp32. The loop runs student and teacher once per completion, computes log-probs of all logits and selects the
spans, as the authors' released code does. Ours is timed twice: as in a training step, where the engine has
reported the teacher's log-probs, and for given traces, where they must be computed. With --drawn the
completions are random tokens, and a fourth side takes four at a time, without padding: they are equally long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import alternate, bars, benchmark_parser, finish, measure, read_options
from torch import Tensor

from rlt_lightning.engines import HFEngine, SampleRequest, Sampling
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.kernels import Kernels, fuse_blocks, prepare_model
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.passes import PassRunner, score_rollouts
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.types import Completion, ModelView, Problem, Rollout, Rollouts

GOAL, TEMPERATURE = 5.0, 0.7
TEXT = """A farmer sells eggs at the market every morning. On Monday she sold thirty-six eggs in boxes of
six, on Tuesday half as many, and on Wednesday as many as on the two days before together. Each box costs two
coins and a quarter, and she gives every tenth customer a box for nothing. How many coins did she take home in
the three days, if nobody bought more than one box? Explain every step, and say what is not needed. """


def one_group(model: Any, tokenizer: Any, num_completions: int, length: int, drawn: bool = False) -> Rollouts:
    """Sample completions of one problem, which has a prompt of 350 tokens and a solution of 60.

    If `drawn`, they are random tokens, which the model scores as an engine reports them.
    """
    words = tokenizer.encode(TEXT * 5)
    problem = Problem(
        row=1,
        question="",
        solution="",
        teacher_prefix=words[:350],
        think_prefix=[],
        student_prefix=words[:350],
        student_suffix=words[20:30],
        solution_ids=words[30:90],
    )
    if drawn:
        torch.manual_seed(0)
        drawn = torch.randint(model.config.vocab_size, (num_completions, length)).tolist()
        with torch.no_grad():
            scored = [log_softmax_of(model, [words[:350] + ids])[0, 349:].tolist() for ids in drawn]
        completions = [
            Completion(ids, log_probs, "length") for ids, log_probs in zip(drawn, scored, strict=True)
        ]
    else:
        engine = HFEngine()
        # All completions of full length.
        tokenizer.chat_template = tokenizer.eos_token = model.generation_config.eos_token_id = None
        engine.start(model, tokenizer, Path())
        sampling = Sampling(temperature=TEMPERATURE, max_completion_length=length)
        requests = [SampleRequest(problem.teacher_prompt, seed=0, num_completions=num_completions)]
        completions = [completion for _, completion in engine.sample(requests, sampling, "</never>")]
    rollouts = [
        Rollout(problem, c, "text", True, ModelView(problem, c, c.token_ids[:length], length, length))
        for c in completions
    ]
    return Rollouts(rollouts, num_completions, policy_version=0, temperature=TEMPERATURE)


def log_softmax_of(model: Any, token_ids: list[list[int]]) -> Tensor:
    ids = torch.tensor(token_ids, device=model.device)
    log_probs = (model(input_ids=ids).logits.float() / TEMPERATURE).log_softmax(dim=-1)
    return log_probs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]  # of every token but the first


@torch.no_grad()
def loop(policy: Any, student: Any, rollouts: Rollouts, reward: RLTReward, num_rows: int = 1) -> Tensor:
    """Compute the rewards of completions of equal length, by default one by one."""
    found = []
    for start in range(0, len(rollouts.rollouts), num_rows):
        batch = rollouts.rollouts[start : start + num_rows]
        problem, thinks = batch[0].problem, [rollout.require_view().token_ids for rollout in batch]
        length, end = len(thinks[0]), problem.student_suffix + problem.solution_ids
        student_log_probs = log_softmax_of(
            student, [problem.student_prefix + think + end for think in thinks]
        )
        teacher_log_probs = log_softmax_of(policy, [problem.teacher_prompt + think for think in thinks])
        first = len(problem.student_prefix) - 1
        kl = (
            teacher_log_probs[:, len(problem.teacher_prefix) - 1 :]
            - student_log_probs[:, first : first + length]
        )
        solution = student_log_probs[:, -len(problem.solution_ids) :]
        r_ss = solution.mean(1) + reward.min_coef * solution.amin(1)
        r_kl = kl.mean(1) + reward.max_coef * kl.amax(1)
        unclosed = torch.tensor([0.0 if rollout.closed else reward.format_penalty for rollout in batch])
        found.append(reward.solution_weight * r_ss - reward.kl_weight * r_kl + unclosed.to(r_kl.device))
    return torch.cat(found)


def build_scorer(
    policy: Any, student: Any, reward: RLTReward, recompute: bool, liger: bool = False
) -> Callable[[Rollouts], Tensor]:
    """Return a function that scores completions in rows of 16k tokens, with the kernels of a run."""

    def call(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(model, *arguments)

    kernels, device = Kernels(liger=liger), policy.device
    head = prepare_model(partial(call, policy), "policy", kernels, HeadOptions(), device)
    fuse_blocks(partial(call, student), "student", kernels, device)
    models = {"student": Model(ModelEntry(student)), POLICY: Model(ModelEntry(policy))}
    runner = PassRunner(models, device, head, micro_batch_tokens=16384)
    chat_format: Any = None  # without a baseline it writes nothing
    student = Student.of("student", chat_format=chat_format)
    return lambda rollouts: score_rollouts(runner, reward, student, rollouts, recompute=recompute).rewards


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--drawn", action="store_true", help="random completions, in place of sampled ones")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["32-true", "bf16-true"], default="32-true")
    parser.add_argument("--liger", action="store_true", help="in our sides; the loop has none")
    options = read_options(parser, model="miniature", completions=4, length=8)
    device, exact = torch.device(options.device), options.precision == "32-true"
    load = partial(load_model, options.model, "float32" if exact else "bfloat16")
    with device:
        policy, student = load(), load()
        plain_policy, plain_student = (load(attn_implementation="sdpa") for _ in range(2))
    tokenizer = load_tokenizer(options.model)
    rollouts = one_group(policy, tokenizer, options.completions, options.length, options.drawn)
    reward = RLTReward()
    rewards: dict[str, Tensor] = {}

    scorer = partial(build_scorer, policy, student, reward)
    functions = {
        "loop over samples": partial(loop, plain_policy, plain_student, rollouts, reward),
        "ours": partial(scorer(recompute=False, liger=options.liger), rollouts),
        "ours, both forwards": partial(scorer(recompute=True, liger=options.liger), rollouts),
    }
    if options.drawn:
        functions["batches of 4"] = partial(functions["loop over samples"], num_rows=4)

    def side(name: str) -> Any:
        return lambda: measure(lambda: rewards.update({name: functions[name]()}), device)

    results: dict[str, Any] = alternate({name: side(name) for name in functions}, options.rounds)
    error = max((rewards[name] - rewards["loop over samples"]).abs().max().item() for name in functions)
    assert error < 1e-4 or not exact, error
    slow = results["loop over samples"]["seconds"]
    ratios = {name: slow / result["seconds"] for name, result in results.items()}
    sizes = {"completions": options.completions, "length": options.length, "largest_difference": error}
    panels = {
        "seconds": {name.replace(", ", "\n"): result["seconds"] for name, result in results.items()},
        "peak memory, GiB": {
            name.replace(", ", "\n"): result["peak_bytes"] / 2**30 for name, result in results.items()
        },
    }
    title = f"reward of {options.completions} completions, {Path(options.model).name}, {options.device}"
    print(f"largest difference {error:.1e} nats; both forwards: ratio {ratios['ours, both forwards']:.2f}")
    finish(
        options.output,
        sizes | {"speed_up": ratios, **results},
        lambda: bars(options.output, title, panels),
        ratio=ratios["ours"],
        goal=GOAL,
    )


if __name__ == "__main__":
    main()
