"""On-policy distillation of real miniature models, against plain forwards with full logits in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Running, start
from distillation import EXPLANATION, HINT, TEMPERATURE, Witness, answered, data, fit, module, parsed, teacher  # noqa: F401
from fits import metrics, weights
from kills import kill, wait_for
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlt_lightning.callbacks import ReferenceSync
from rlt_lightning.datamodules.views import View
from rlt_lightning.models.lora import LoRA
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.rollouts.columns import Record
from rlt_lightning.types import InputError, Rollout


def log_probs_after(model: Any, prompt: list[int], rest: list[int]) -> Tensor:
    """Full log-probs before each token of `rest`, (T, V): one sequence, nothing packed."""
    logits = model(input_ids=torch.tensor([prompt + rest])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(dim=-1)


def slow_pairs(student: Any, teacher: Any, row: Rollout, kind: str, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Both models' log-probs at the scored tokens, (T, V) each, found by the tags' single tokens."""
    ids, prompt, view = row.completion.token_ids, row.problem.teacher_prompt, row.problem.teacher_view
    if kind == "hint":
        with torch.no_grad():
            judged = log_probs_after(teacher, view, ids)
        return log_probs_after(student, prompt, ids), judged
    opening, closing = tokenizer.encode("<think>\n", add_special_tokens=False), closing_ids(tokenizer)
    if ids[: len(opening)] != opening:
        return torch.empty(0, 1), torch.empty(0, 1)
    end = ids.index(closing[0]) if closing[0] in ids else len(ids)
    thought = ids[len(opening) : end]
    decided = thought + ([closing[0]] if closing[0] in ids else [])
    own = log_probs_after(student, prompt + opening, decided)
    with torch.no_grad():
        read = log_probs_after(teacher, view, thought + ([closing[1]] if closing[0] in ids else []))
    swapped = read.clone()
    swapped[:, closing[0]], swapped[:, closing[1]] = read[:, closing[1]], read[:, closing[0]]
    return own, swapped


def closing_ids(tokenizer: Any) -> tuple[int, int]:
    """The miniature's single tokens of both closing tags, as they stand after a line end."""
    found = []
    for text in ("a\n</think>\n\n<answer>", "a\n</explanation>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        [place] = [i for i, token in enumerate(ids) if tokenizer.decode([token]).startswith("</")]
        found.append(ids[place])
    return found[0], found[1]


def slow_divergence(options: Divergence, own: Tensor, theirs: Tensor) -> Tensor:
    """The divergence at each token, (T,), from the definition."""
    s, t = own.exp(), theirs.exp()
    if options.kind == "reverse":
        return (s * (own - theirs)).sum(dim=1)
    if options.kind == "forward":
        return (t * (theirs - own)).sum(dim=1)
    m = options.beta * t + (1 - options.beta) * s
    against = options.beta * t * (theirs - m.log()) + (1 - options.beta) * s * (own - m.log())
    return against.sum(dim=1)


def require_same_gradients(witness: Witness, student: Any) -> None:
    """Compare a step in fp32 with a student whose gradients are in float64."""
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        own, bound = witness.gradients[name].double(), 3e-5 * parameter.grad.abs().max().item()
        torch.testing.assert_close(own, parameter.grad, atol=bound, rtol=0, msg=name)


def load_plainly(student: str, teacher: str) -> tuple[Any, Any, Any]:
    """Both models in float64, and their tokenizer."""
    models = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in (student, teacher)]
    return *models, AutoTokenizer.from_pretrained(student)


# The loss


@pytest.mark.parametrize(
    ("options", "view"),
    [
        (Divergence(), EXPLANATION),
        (Divergence("forward"), EXPLANATION),
        (Divergence("jsd", beta=0.3), EXPLANATION),
        (Divergence(), HINT),
    ],
    ids=["reverse", "forward", "jsd", "hint"],
)
def test_one_step_equals_full_logits(
    options: Divergence, view: View, miniature: str, teacher: str, tmp_path: Path
) -> None:
    witness = Witness()
    opd = module(miniature, teacher=teacher, divergence=options, group_size=2, micro_batch_tokens=300)
    fit(tmp_path, opd, witness, view=view)

    student, judge, tokenizer = load_plainly(miniature, teacher)
    step, rows = witness.one_step()
    pairs = [slow_pairs(student, judge, row, view, tokenizer) for row in rows]
    values = [slow_divergence(options, *pair) for pair in pairs]
    assert sum(len(own) > 0 for own in values) >= 6
    means = torch.stack([-own.mean() if len(own) else torch.zeros(()) for own in values])
    torch.testing.assert_close(step.rewards, means.detach().float(), atol=2e-6, rtol=0)
    assert [len(own) for own in values] == [int(n) for n in step.table[Record("judged_tokens")]]

    loss = torch.cat(values).mean()
    torch.testing.assert_close(witness.metrics[0]["policy/loss"], loss.detach().float(), atol=1e-6, rtol=0)
    loss.backward()
    require_same_gradients(witness, student)


def test_sampled_gradient_is_log_ratio_times_score(miniature: str, teacher: str, tmp_path: Path) -> None:
    witness = Witness()
    fit(tmp_path, module(miniature, teacher=teacher, estimator="sampled"), witness)
    student, judge, tokenizer = load_plainly(miniature, teacher)
    terms = []
    for row in witness.one_step()[1]:
        own, theirs = slow_pairs(student, judge, row, "explanation", tokenizer)
        start = len(tokenizer.encode("<think>\n", add_special_tokens=False))
        sampled = torch.tensor(row.completion.token_ids[start : start + len(own)], dtype=torch.long)[:, None]
        if len(own):
            ratio = (theirs - own).gather(1, sampled).detach()
            terms.append(-(ratio * own.gather(1, sampled)).squeeze(1))
    torch.cat(terms).mean().backward()
    require_same_gradients(witness, student)


# Who the teacher is


def test_lora_base_is_the_frozen_student(miniature: str, tmp_path: Path) -> None:
    # An adapter's second matrix starts at 0: two steps, so that policy and base differ.
    figures = []
    for name, options in (("base", {}), ("copy", {"teacher": miniature})):
        witness = Witness()
        lora = module(miniature, lora=LoRA(rank=4), **options)
        fit(tmp_path / name, lora, witness, view=HINT, steps=3)
        figures.append([float(metrics["distill/divergence"]) for metrics in witness.metrics])
    assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    assert figures[0][0] != figures[0][2]


def test_live_and_frozen_agree_until_the_first_step(miniature: str, tmp_path: Path) -> None:
    found = {}
    for kind in ("frozen", "live"):
        witness = Witness()
        fit(tmp_path / kind, module(miniature, teacher_weights=kind), witness, view=HINT, steps=2)
        found[kind] = [float(metrics["distill/divergence"]) for metrics in witness.metrics]
    assert found["live"][0] == pytest.approx(found["frozen"][0], abs=1e-6)
    assert found["live"][1] != pytest.approx(found["frozen"][1], rel=1e-3)


def test_averaged_teacher_moves(miniature: str, tmp_path: Path) -> None:
    opd = module(miniature, teacher_weights="averaged")
    fit(tmp_path, opd, ReferenceSync(every_n_steps=1, alpha=1.0), view=HINT)
    assert opd.reference is not None
    for own, moved in zip(opd.policy.parameters(), opd.reference.model.parameters(), strict=True):
        torch.testing.assert_close(moved, own.detach(), atol=0, rtol=0)


# Refusals


def test_teachers_that_cannot_judge_are_refused(miniature: str, tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ReferenceSync need each other"):
        fit(tmp_path, module(miniature, teacher_weights="averaged"))
    with pytest.raises(InputError, match="compares spans of text"):  # of two tokenizers
        fit(tmp_path, module(miniature, teacher=tiny_model))


# Strategies and kills, by the command line


def command(folder: Path, teacher: str, *options: str) -> Running:
    words = ["fit", "--config=configs/laptop/opd.yaml", f"--model.teacher={teacher}"]
    words += ["--data.num_embedded_rows=16", "--data.prompts_per_step=4"]
    words += ["--rollouts.sampling.max_completion_length=24", "--resume=true"]
    return start(*words, *options, f"--output_dir={folder}", log=folder.with_suffix(".log"))


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
def test_two_processes_equal_one(strategy: str, teacher: str, tmp_path: Path) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    chosen = {"ddp": "--trainer.strategy=ddp"}
    two = chosen.get(strategy, f"--config=configs/hardware/{strategy}.yaml")
    found = {}
    for name, options in (("one", []), (strategy, [two, "--trainer.devices=2"])):
        steps = ["--trainer.max_steps=2", "--checkpoint.every_n_train_steps=2"]
        assert command(tmp_path / name, teacher, *options, *steps).wait() == 0
        found[name] = metrics(tmp_path / name)
    for step, figures in found["one"].items():
        for name in ("policy/loss", "distill/divergence", "distill/judged_tokens", "policy/grad_norm"):
            assert found[strategy][step][name] == pytest.approx(figures[name], rel=1e-4), (step, name)


@pytest.mark.full
def test_killed_and_resumed_equals_not_stopping(tmp_path: Path) -> None:
    # The averaged teacher must come back too.
    own = ["--model.teacher_weights=averaged", "--trainer.max_steps=8", "--data.view=hint"]
    own += ["--trainer.callbacks=rlt_lightning.callbacks.ReferenceSync", "--checkpoint.every_n_train_steps=2"]
    own += ["--trainer.callbacks.init_args.every_n_steps=3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command(whole, "null", *own).wait() == 0
    run = command(killed, "null", *own)
    saved = killed / "checkpoints"
    wait_for(lambda: any(saved.glob("*000004*")), run)
    kill(run, "all")
    assert not (killed / "model").exists()
    assert command(killed, "null", *own).wait() == 0
    assert metrics(killed) == metrics(whole)
    theirs = weights(killed)
    assert all(torch.equal(theirs[name], value) for name, value in weights(whole).items())
