"""The reward of one group: `Reader` against a loop over samples with full logits.

    .venv/bin/python benchmarks/reward.py [--rounds 5]

Samples 16 completions of 128 tokens after a prompt of 350 with SmolLM2-135M, which is teacher and student, in
fp32. The loop runs student and teacher once per completion, computes log-probs of all logits and selects the
spans, as the authors' released code does. Ours is timed twice: as in a training step, where the engine has
reported the teacher's log-probs, and for given traces, where they must be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import CPU, alternate, bars, benchmark_parser, finish, measure, read_options
from torch import Tensor

from rlt_lightning.engines import HFEngine, SampleRequest, Sampling, sample_all
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.reader import Reader, score_rollouts
from rlt_lightning.numerics.packing import MicroBatch, SequenceLengths, micro_batches
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.students import Students
from rlt_lightning.rollouts.step import POLICY
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.types import ModelView, Problem, Rollout, Rollouts

GOAL, TEMPERATURE = 5.0, 0.7
TEXT = """A farmer sells eggs at the market every morning. On Monday she sold thirty-six eggs in boxes of
six, on Tuesday half as many, and on Wednesday as many as on the two days before together. Each box costs two
coins and a quarter, and she gives every tenth customer a box for nothing. How many coins did she take home in
the three days, if nobody bought more than one box? Explain every step, and say what is not needed. """


def one_group(model: Any, tokenizer: Any, num_completions: int, length: int) -> Rollouts:
    """Sample completions of one problem, which has a prompt of 350 tokens and a solution of 60."""
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
    engine = HFEngine()
    # All completions of full length.
    tokenizer.chat_template = tokenizer.eos_token = model.generation_config.eos_token_id = None
    engine.start(model, tokenizer, Path())
    sampling = Sampling(temperature=TEMPERATURE, max_completion_length=length)
    requests = [SampleRequest(problem.teacher_prompt, seed=0, num_completions=num_completions)]
    [completions] = sample_all(engine, requests, sampling, "</never>")
    rollouts = [
        Rollout(problem, c, "text", True, (ModelView(problem, c, c.token_ids[:length], length, length),))
        for c in completions
    ]
    return Rollouts(rollouts, num_completions, policy_version=0, temperature=TEMPERATURE)


def log_softmax_of(model: Any, token_ids: list[int]) -> Tensor:
    ids = torch.tensor([token_ids])
    log_probs = (model(input_ids=ids).logits / TEMPERATURE).log_softmax(dim=-1)
    return log_probs[:, :-1].gather(2, ids[:, 1:, None])[0, :, 0]  # of every token but the first


@torch.no_grad()
def loop(policy: Any, student: Any, rollouts: Rollouts, reward: RLTReward) -> Tensor:
    """Compute the reward of each completion, one by one."""
    found = []
    for rollout in rollouts.rollouts:
        problem, think = rollout.problem, rollout.views[0].token_ids
        context = problem.student_prefix + think + problem.student_suffix + problem.solution_ids
        student_log_probs = log_softmax_of(student, context)
        teacher_log_probs = log_softmax_of(policy, problem.teacher_prefix + think)
        start = len(problem.student_prefix) - 1
        kl = (
            teacher_log_probs[len(problem.teacher_prefix) - 1 :]
            - student_log_probs[start : start + len(think)]
        )
        solution = student_log_probs[-len(problem.solution_ids) :]
        r_ss = solution.mean() + reward.min_coef * solution.min()
        r_kl = kl.mean() + reward.max_coef * kl.max()
        unclosed = 0.0 if rollout.closed else reward.format_penalty
        found.append(reward.solution_weight * r_ss - reward.kl_weight * r_kl + unclosed)
    return torch.stack(found)


def build_scorer(
    policy: Any, student: Any, reward: RLTReward, recompute: bool
) -> Callable[[Rollouts], Tensor]:
    """Return a function that scores completions on the CPU, in rows of 16k tokens."""
    models = {"student": Model(ModelEntry(student)), POLICY: Model(ModelEntry(policy))}

    def plan(lengths: list[SequenceLengths], all_ranks: bool) -> list[tuple[MicroBatch, float]]:
        return [(row, 1.0) for row in micro_batches(lengths, max_tokens=16384)]

    reader = Reader(models, plan, CPU, recompute=recompute)
    chat_format: Any = None  # without a baseline it writes nothing
    students = Students.of("student", None).with_formats([chat_format])
    return lambda rollouts: score_rollouts(reader, reward, students, rollouts).rewards


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    options = read_options(parser, model="miniature", completions=4, length=8)
    policy, student = load_model(options.model), load_model(options.model)
    plain_policy, plain_student = (load_model(options.model, attn_implementation="sdpa") for _ in range(2))
    rollouts = one_group(policy, load_tokenizer(options.model), options.completions, options.length)
    reward = RLTReward()
    rewards: dict[str, Tensor] = {}

    def ours(recompute: bool) -> Tensor:
        return build_scorer(policy, student, reward, recompute)(rollouts)

    functions = {
        "loop over samples": lambda: loop(plain_policy, plain_student, rollouts, reward),
        "ours": lambda: ours(recompute=False),
        "ours, both forwards": lambda: ours(recompute=True),
    }

    def side(name: str) -> Any:
        return lambda: measure(lambda: rewards.update({name: functions[name]()}), CPU)

    results: dict[str, Any] = alternate({name: side(name) for name in functions}, options.rounds)
    error = max((rewards[name] - rewards["loop over samples"]).abs().max().item() for name in functions)
    assert error < 1e-4, error
    slow = results["loop over samples"]["seconds"]
    ratios = {name: slow / result["seconds"] for name, result in results.items()}
    sizes = {"completions": options.completions, "length": options.length, "largest_difference": error}
    panels = {
        "seconds": {name.replace(", ", "\n"): result["seconds"] for name, result in results.items()},
        "peak memory, GiB": {
            name.replace(", ", "\n"): result["peak_bytes"] / 2**30 for name, result in results.items()
        },
    }
    title = f"reward of {options.completions} completions, {options.model}, CPU"
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
