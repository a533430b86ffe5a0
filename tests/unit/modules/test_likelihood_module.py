"""The stage of likelihood rewards: tokens, a step against a slow version, scorers, runs and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full, slow
from commands import rlt
from compared import largest_difference, weights
from grpo import MovedReference, Witness, slow_log_probs
from outside import scored
from ranks import run
from rows_of import stratos_row
from torch import Tensor
from trainers import bare_trainer

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import StratosDataModule, StudentLikelihoodData, TeacherRLData
from rlt_lightning.datamodules.formats import encode
from rlt_lightning.engines import Sampling
from rlt_lightning.models.load import load_tokenizer
from rlt_lightning.models.lora import LoRA
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics import DrGRPOLoss, GRPOLoss, LeaveOneOutAdvantages
from rlt_lightning.rewards import LogProbReward, NOVERReward, RLPRReward, SolutionScores, VeriFreeReward
from rlt_lightning.rewards.explanations import build_solution_pass
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import REWARD, Record, Term, columns_of
from rlt_lightning.rollouts.step import ScoringPass, StepBatch
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import Completion, InputError, Problem, Rollout, Rollouts

__all__ = ["scored"]  # a fixture
TEMPERATURE = 1.0
OWN_TAGS = TagStyle("<t>", "</t>", "<s>", "</s>", "<e>", "</e>", separator="\n")


def data(folder: Path, model: str = "miniature", **options: Any) -> StratosDataModule:
    defaults: dict[str, Any] = {
        "source": "chains",
        "num_embedded_rows": 8,
        "prompts_per_step": 2,
        "tags": "r1",
    }
    defaults |= {"tokenizer": model, "student_system_prompt": "", "output_dir": str(folder)}
    kind = options.pop("kind", StudentLikelihoodData)
    return kind(**defaults | options)


def set_up(*arguments: Any, **options: Any) -> StratosDataModule:
    stage = data(*arguments, **options)
    stage.setup("fit")
    return stage


def module(**options: Any) -> RLTModule:
    defaults: dict[str, Any] = {
        "teacher": "miniature",
        "student": "policy",
        "group_size": 4,
        "reward": LogProbReward(),
        "advantages": LeaveOneOutAdvantages(),
        "policy_loss": DrGRPOLoss(kl_coef=0.0, max_completion_length=1),
        "optimizer": OptimizerConfig(lr=1e-3, max_grad_norm=0),
    }
    return RLTModule(**defaults | options)


def rollouts(length: int = 32, **options: Any) -> RolloutCallback:
    return RolloutCallback(sampling=Sampling(TEMPERATURE, max_completion_length=length), **options)


def fit(folder: Path, likelihood: RLTModule, *callbacks: Any, steps: int = 1, **options: Any) -> None:
    bare_trainer(folder, rollouts(), *callbacks, steps=steps).fit(likelihood, data(folder, **options))


# The tokens


def pass_of(stage: StratosDataModule, rollout: Rollout) -> ScoringPass:
    """How the policy reads a solution behind a thought."""
    return build_solution_pass(Student.of("policy", chat_format=stage.format), rollout.require_view(), None)


@pytest.mark.parametrize("tags", ["stratos", "r1", OWN_TAGS], ids=["stratos", "r1", "own"])
def test_tokens_are_those_of_stages_4_and_5(tags: Any, smollm2: str, tmp_path: Path) -> None:
    thought = "Three fours: 4, 8, 12.\n\nSo $3 \\cdot 4 = 12$, which I check."
    rows = [stratos_row("What is 3 * 4?", thought, "The product is \\boxed{12}.", "Think, then answer.")]
    stage = set_up(tmp_path, smollm2, source=rows, tags=tags, student_system_prompt=None, prompts_per_step=1)
    [problem] = stage.problems
    chat = stage.format
    # Stage 5's prompt, and behind it the tag that its answer begins with.
    prompt = encode(chat.tokenizer, chat.render_student_chat(problem.question, problem.student_system_prompt))
    opening = chat.student_tags.thought_open + chat.student_tags.separator
    assert problem.teacher_prompt[: len(prompt)] == prompt
    assert chat.tokenizer.decode(problem.teacher_prompt[len(prompt) :]) == opening
    assert stage.stop == chat.student_tags.thought_close
    # A thought, as it would be sampled, and the solution: what stage 4 trains on, up to the solution's end.
    completion = chat.completion_from_trace(problem, thought)
    rollout = stage.build_rollout(problem, completion)
    assert (rollout.text, rollout.closed) == (thought, True)
    sequence = pass_of(stage, rollout)
    tokens = sequence.prefix + sequence.rest
    wrap = chat.student_tags.wrap
    system = problem.student_system_prompt
    example = chat.build_student_sft_example(1, problem.question, wrap(thought), problem.solution, system)
    assert tokens == example.token_ids[: len(tokens)]
    scored = tokens[slice(*sequence.scored["solution"])]
    assert scored == problem.solution_ids == tokens[-len(scored) :]
    # As in RLT, the separator after the opening tag is scored where it is a token of its own.
    assert chat.tokenizer.decode(scored).lstrip("\n") == "The product is \\boxed{12}."
    # The thought's tokens are those that were sampled, the closing tag's not.
    sampled = sequence.rest[: len(rollout.require_view().token_ids)]
    assert completion.token_ids[: len(sampled)] == sampled
    assert len(problem.teacher_prompt) + len(sampled) < len(tokens)


def test_a_cut_thought_is_followed_by_its_closing_tag(tmp_path: Path) -> None:
    stage = set_up(tmp_path)
    problem = stage.problems[0]
    ids = encode(stage.format.tokenizer, "4 times 3 is")
    rollout = stage.build_rollout(problem, Completion(ids, None, "length"))
    assert not rollout.closed
    sequence = pass_of(stage, rollout)
    text = stage.format.tokenizer.decode(sequence.prefix + sequence.rest)
    assert "<think>\n4 times 3 is</think>\n\n<solution>\n" in text


# A step


def solution_scores(model: Any, rows: list[Rollout], empty: list[list[int]] | None = None) -> SolutionScores:
    """What plain transformers computes of the solutions, one by one, with gradient."""

    def one(problem: Problem, body: list[int]) -> Tensor:
        context = problem.teacher_prompt + body + problem.student_suffix
        return slow_log_probs(model, context, problem.solution_ids, TEMPERATURE)

    found = torch.stack([one(row.problem, row.require_view().token_ids) for row in rows])
    without = [one(row.problem, body) for row, body in zip(rows, empty, strict=True)] if empty else None
    return SolutionScores(
        log_probs=found,
        token_mask=torch.ones_like(found, dtype=torch.bool),
        closed=torch.tensor([row.closed for row in rows]),
        lengths=torch.tensor([len(row.require_view().token_ids) - 1 for row in rows]),  # without the line end
        groups=torch.tensor([row.problem.row for row in rows]),
        empty_log_probs=torch.stack(without).detach() if without else None,
    )


@pytest.mark.parametrize(
    ("reward", "policy_loss"),
    [
        (LogProbReward(), DrGRPOLoss(kl_coef=0.0, max_completion_length=1)),
        full(LogProbReward(reduction="mean"), DrGRPOLoss(kl_coef=0.0, max_completion_length=32)),
        (VeriFreeReward(), GRPOLoss(kl_coef=0.0)),
        full(RLPRReward(), DrGRPOLoss(kl_coef=0.0, max_completion_length=1)),
        full(NOVERReward(), DrGRPOLoss(kl_coef=0.0, max_completion_length=1)),
    ],
    ids=["sum", "mean", "verifree", "rlpr", "nover"],
)
def test_one_step_equals_the_slow_obvious_version(reward: Any, policy_loss: Any, tmp_path: Path) -> None:
    witness = Witness()
    likelihood = module(reward=reward, policy_loss=policy_loss, micro_batch_tokens=300)
    fit(tmp_path, likelihood, witness)
    policy = witness.load_policy("miniature")
    step, rows = witness.one_step()
    # The tokens of an empty thought are a line end, and then its closing tag.
    newline = encode(load_tokenizer("miniature"), "\n")
    scores = solution_scores(policy, rows, [newline] * len(rows) if reward.baseline == "empty" else None)
    rewards = reward(scores)[REWARD].detach()
    torch.testing.assert_close(step.rewards, rewards, atol=1e-5, rtol=0)

    advantages = LeaveOneOutAdvantages()(rewards, 4)
    loss = torch.zeros(())
    for row, advantage, score in zip(rows, advantages, reward.score_solution(scores), strict=True):
        ids = row.completion.token_ids
        log_probs = slow_log_probs(policy, row.problem.teacher_prompt, ids, TEMPERATURE)
        # A completion's sum of both terms has the weight of one of its tokens.
        weight = 1 / getattr(policy_loss, "max_completion_length", len(ids))
        answer = score if reward.has_answer_term else 0.0
        loss = loss - weight * (advantage * log_probs.sum() + answer) / len(rows)
    loss.backward()
    assert max(float(p.grad.abs().max()) for p in policy.parameters() if p.grad is not None) > 1e-3
    witness.require_gradients(policy, 1e-4)


def test_two_groups_of_one_row_are_compared_apart(tmp_path: Path) -> None:
    stage = set_up(tmp_path)
    texts = ("1</think>", "1 1</think>", "1 1 1</think>", "1 1 1 1</think>")
    ids = [encode(stage.format.tokenizer, text) for text in texts]
    rows = [stage.build_rollout(stage.problems[0], Completion(one, None, "stop")) for one in ids]
    reward, student = NOVERReward(), Student.of("a", chat_format=stage.format)

    def score(first: int, number: int, group_size: int) -> torch.Tensor:
        step = StepBatch.of_rollouts(Rollouts(rows[first : first + number], group_size, 0, 1.0))
        step.tokens["solution"] = {i: torch.tensor([-1.0 - first - i]) for i in range(number)}
        step.put_numbers(range(number), reward.measure(step, range(number), student))
        return reward.score(step.table, group_size)[REWARD]

    torch.testing.assert_close(score(0, 4, 2), torch.cat([score(0, 2, 2), score(2, 2, 2)]))
    assert not torch.equal(score(0, 4, 2), score(0, 4, 4))


# Who scores


def test_each_scorer_reads_with_its_own_weights(tmp_path: Path) -> None:
    for scorer, callbacks in (("reference", [MovedReference(0.05)]), ("miniature-teacher", [])):
        witness, likelihood = Witness(), module(student=scorer)
        options = {} if scorer == "reference" else {"force_format": True, "student_tokenizer": scorer}
        fit(tmp_path / scorer, likelihood, witness, *callbacks, **options)
        step, rows = witness.one_step()
        frozen = likelihood.reference or next(iter(likelihood.models.values()))
        assert len(likelihood.models) == (scorer != "reference")
        assert likelihood.answer_weight == 0
        with torch.no_grad():
            slow = LogProbReward()(solution_scores(frozen.model, rows))[REWARD]
            of_policy = LogProbReward()(solution_scores(likelihood.policy, rows))[REWARD]
        torch.testing.assert_close(step.rewards, slow, atol=1e-5, rtol=0)
        assert float((slow - of_policy).abs().max()) > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_a_thought_that_is_unnatural_to_the_scorer_costs(estimator: Any, tmp_path: Path) -> None:
    witness, scorer = Witness(), "miniature-teacher"
    reward = RLPRReward(kl_weight=2.0, kl_estimator=estimator)
    likelihood = module(student=scorer, reward=reward, optimizer=OptimizerConfig(lr=1e-12))
    fit(tmp_path, likelihood, witness, force_format=True, student_tokenizer=scorer)
    (step, rows), expected = witness.one_step(), []
    for row in rows:
        context, thought = row.problem.teacher_prompt, row.require_view().compared
        log_p, log_q = (
            model(torch.tensor([context + thought])).logits[0, len(context) - 1 : -1].log_softmax(-1)
            for model in (likelihood.policy, next(iter(likelihood.models.values())).model)
        )  # (K, V)
        if estimator == "exact":
            values = (log_p.exp() * (log_p - log_q)).sum(-1)
        else:
            ids = torch.tensor(thought)[:, None]
            own, other = (one.gather(1, ids)[:, 0] for one in (log_p, log_q))
            values = own - other if estimator == "k1" else (other - own).expm1() - (other - own)
        expected.append(-2.0 * values.mean())
    torch.testing.assert_close(step.table[Term("kl")], torch.stack(expected).detach(), atol=1e-4, rtol=1e-4)
    assert columns_of(step.table, Term).keys() == {"solution", "format", "kl"}
    torch.testing.assert_close(step.rewards, sum(columns_of(step.table, Term).values()))
    assert "kl_reward" in likelihood.reward.columns()


def test_the_policy_reads_thoughts_at_another_temperature(tmp_path: Path) -> None:
    likelihood = module(student="miniature", reward=RLPRReward(kl_weight=1.0, temperature=0.5))
    passes, run_policy = [], likelihood.run

    def count(function: Any, *arguments: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return run_policy(function, *arguments)

    class Count(Witness):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            pl_module.run = count

    witness = Count()
    with pytest.warns(UserWarning, match=r"reward\.temperature is 0\.5: the k1 and k3 estimates .* biased"):
        fit(tmp_path, likelihood, witness, force_format=True, student_tokenizer="miniature")
    # The engine's log-probs are at another temperature, so the policy scores its thoughts, and then trains.
    assert passes == [False, True]
    step = witness.batches[0].step
    torch.testing.assert_close(step.table[Term("kl")], torch.zeros(8), atol=1e-5, rtol=0)  # from itself
    torch.testing.assert_close(step.rewards, sum(columns_of(step.table, Term).values()))


# Bad input


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"LogProbReward judges thoughts, but .* of TeacherRLData"):
        fit(tmp_path, module(), kind=TeacherRLData, student_tokenizer="miniature")
    with pytest.raises(InputError, match=r"NOVERReward compares .* rollouts\.val_completions is 1"):
        fit(tmp_path, module(reward=NOVERReward()), val_rows=2)
    with pytest.raises(InputError, match="those of StudentLikelihoodData are thoughts"):
        bare_trainer(tmp_path, rollouts()).predict(module(), data(tmp_path))
    with pytest.raises(InputError, match=r"reward\.kl_weight must be 0 where model\.student is policy"):
        fit(tmp_path, module(reward=LogProbReward(kl_weight=1.0)))
    asynchronous = rollouts()
    asynchronous.asynchronous = True  # the constructor asks for an engine outside the process first
    with pytest.raises(InputError, match=r"With an answer term rollouts\.asynchronous must be false"):
        bare_trainer(tmp_path, asynchronous).fit(module(max_staleness=1), data(tmp_path))


# Runs


@pytest.mark.parametrize("strategy", [full("ddp"), slow("fsdp2"), full("zero3")])
def test_two_processes_train_as_one(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    for name in ("single", strategy):
        run(tiny_model, tmp_path / name, name, tokens=500, uneven=True, steps=3, likelihood=True)
    assert largest_difference(weights(tmp_path / strategy), weights(tmp_path / "single")) < 1e-5
    steps = [json.loads((tmp_path / name).with_suffix(".json").read_text()) for name in (strategy, "single")]
    assert len(steps[0]) == 3
    for ours, whole in zip(*steps, strict=True):
        for name in ("reward/mean", "policy/answer_loss", "policy/grad_norm"):
            assert whole[name] != 0
            assert ours[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    # Both passes of a step, the sampled tokens' and the solutions', are divided.
    counts = [json.loads((tmp_path / strategy).with_suffix(f".rank{r}.json").read_text()) for r in (0, 1)]
    assert all(len(own) == 6 and min(own) >= 1 for own in counts)


def test_a_run_of_the_config_has_its_files_and_resumes_exactly(tmp_path: Path) -> None:
    small = ["--data.num_embedded_rows=8", "--data.prompts_per_step=2", "--model.group_size=4"]
    small += ["--rollouts.sampling.max_completion_length=16", "--checkpoint.every_n_train_steps=1"]
    small += ["--checkpoint.save_top_k=-1"]
    command = ["fit", "--config", "configs/laptop/likelihood.yaml", *small]
    whole, first = tmp_path / "whole", tmp_path / "first"
    result = rlt(*command, "--trainer.max_steps=3", f"--output_dir={whole}")
    assert result.returncode == 0, result.stderr
    assert "rlt test" in result.stdout
    metrics = (whole / "metrics.csv").read_text().splitlines()[0]
    assert {"reward/solution", "reward/format", "policy/answer_loss"} <= set(metrics.split(","))
    row = json.loads((whole / "rollouts.jsonl").read_text().splitlines()[0])
    assert row["reward"] == pytest.approx(row["solution_reward"] + row["format_reward"])
    # The learning rate depends on max_steps: the second run goes on from the first one's second checkpoint.
    checkpoint = sorted((whole / "checkpoints").glob("step*"))[1]
    result = rlt(*command, "--trainer.max_steps=3", f"--output_dir={first}", f"--ckpt_path={checkpoint}")
    assert result.returncode == 0, result.stderr
    ours, theirs = ((folder / "model" / "model.safetensors").read_bytes() for folder in (whole, first))
    assert ours == theirs
    recorded = [line for line in (whole / "rollouts.jsonl").open() if json.loads(line)["step"] == 3]
    assert recorded == (first / "rollouts.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize("scorer", ["policy", full("reference")])
def test_a_new_adapter_scores_as_the_model_does(scorer: str, tmp_path: Path) -> None:
    class Watch(Witness):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            adapter = [p for n, p in pl_module.policy.named_parameters() if "lora_B" in n]
            self.trained = any(float(p.grad.abs().max()) > 0 for p in adapter)

    plain, adapted = Watch(), Watch()
    fit(tmp_path / "plain", module(student=scorer), plain)
    fit(tmp_path / "lora", module(student=scorer, lora=LoRA(rank=2)), adapted)
    ours, theirs = (columns_of(one.batches[0].step.table, Record) for one in (adapted, plain))
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, atol=1e-5, rtol=0)
    assert adapted.trained
