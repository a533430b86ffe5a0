"""Measure whether a miniature takes steps right and copies a solution that it sees, and how sure it is."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import torch

from rlt_lightning.datamodules.formats import ChatFormat, build_masked_example, encode
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.tags import R1
from rlt_lightning.tasks.named_chains import draw_facts, draw_named_chain
from rlt_lightning.tasks.stepwise import CHAIN_WORDING, StepwiseProblem, TraceKind, draw_chains, draw_ending
from rlt_lightning.types import SFTExample

MAX_STEPS = 5  # of a chain
KNOWN = -1  # seed of the facts that the student of named chains learned in pretraining; no run's
IGNORED = -100  # label of a token that the loss does not count


class Corpus:
    """Makes examples of chains in the formats of teachers and students.

    Args:
        tokenizer: A miniature's.
        seed: Seed of what is drawn.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.format = ChatFormat(tokenizer, R1, "", "")
        self.pad_token_id = tokenizer.pad_token_id
        self.rng = Random(f"pretrain {seed}")

    def trace(self, problem: StepwiseProblem, kind: TraceKind) -> str:
        """Draw a trace that is of one kind from its start."""
        if kind == "steps":
            return CHAIN_WORDING.trace(problem.steps)
        return CHAIN_WORDING.trace(draw_ending(problem, CHAIN_WORDING, 0, kind, self.rng))

    def example(self, problem: StepwiseProblem, trace: str, as_teacher: bool) -> SFTExample:
        """Return the conversation of a teacher or of a student as a training example."""
        form, solution = self.format, R1.wrap(f"\\boxed{{{problem.answer}}}")
        if as_teacher:
            return form.build_teacher_sft_example(form.build_problem(1, problem.question, solution), trace)
        return form.build_student_sft_example(1, problem.question, R1.wrap(trace), solution)

    def batch(self, examples: list[SFTExample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad examples to token ids and labels, each (B, L)."""
        length = max(len(example.token_ids) for example in examples)
        ids = torch.full((len(examples), length), self.pad_token_id)
        labels = torch.full((len(examples), length), IGNORED)
        for row, example in enumerate(examples):
            tokens, mask = torch.tensor(example.token_ids), torch.tensor(example.loss_mask)
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = tokens.masked_fill(~mask, IGNORED)
        return ids, labels


@torch.no_grad()
def measure_gates(model: Any, tokenizer: Any, num_problems: int = 256) -> dict[str, float]:
    """Return the share of numbers that a base gets right in a student's steps and in a teacher's leaps.

    Both are measured on problems of five steps that no training has seen, greedily, given what stands before
    each number.
    """
    corpus = Corpus(tokenizer, 0)
    # The digit in each token, whatever else it holds; -1 for none.
    numbers = torch.tensor([digit_in(tokenizer.decode([i])) for i in range(len(tokenizer))])
    rng = corpus.rng = Random("gates")
    problems = [draw_chains(rng, 1, MAX_STEPS, "test")[0] for _ in range(num_problems)]
    found = {}
    asked_for: dict[str, tuple[TraceKind, bool, tuple[str, ...]]] = {
        "step_accuracy": ("steps", False, (" is",)),
        "leaps_copied": ("leap", True, (" is", " be")),
    }
    for name, (kind, as_teacher, words) in asked_for.items():
        texts = [(problem, corpus.trace(problem, kind)) for problem in problems]
        ids, labels = corpus.batch([corpus.example(*text, as_teacher) for text in texts])
        guess = model(input_ids=ids).logits.argmax(-1)[:, :-1]
        before = torch.isin(ids[:, :-1], torch.tensor([tokenizer.encode(word)[0] for word in words]))
        right = numbers[ids[:, 1:]]
        asked = before & (labels[:, 1:] != IGNORED) & (right >= 0)
        found[name] = float((numbers[guess] == right)[asked].float().mean())
    return found


@torch.no_grad()
def measure_named_gates(model: Any, tokenizer: Any, num_problems: int = 200) -> dict[str, float]:
    """Return what a base of named chains can do, given what stands before each number, greedily.

    Args:
        model: The base.
        tokenizer: Its tokenizer.
        num_problems: Problems of each kind.

    Returns:
        Shares of right results of steps, of solutions copied by a student, of names of steps (`_words`) and
        of what they add (`_operands`), by a teacher and by a student that may know them; the student's mean
        log-probability of what an unknown name adds, in nats, by chance ln 0.1 = -2.30.
    """
    known = draw_facts(KNOWN)
    names = list(known)
    half = len(names) // 2
    corpus, rng = Corpus(tokenizer, 0), Random("gates")
    is_, add, box = (tokenizer.encode(text)[0] for text in (" is", " add", "\\boxed{"))
    words_of_names = torch.tensor([tokenizer.encode(f" {name}")[0] for name in names])
    texts = [f"{space}{digit}" for space in (" ", "") for digit in range(10)]
    digits = torch.tensor([tokenizer.encode(text)[0] for text in texts])
    found = {}
    for name, some, facts, as_teacher in (
        ("teacher", names[:half], {}, True),
        ("student", names[:half], {}, False),
        ("known", names[half:], known, False),
    ):
        problems = [draw_named_chain(rng, some, facts) for _ in range(num_problems)]
        ids, labels = corpus.batch(
            [corpus.example(problem, CHAIN_WORDING.trace(problem.steps), as_teacher) for problem in problems]
        )
        log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        right = log_probs.argmax(-1) == ids[:, 1:]
        asked, before = labels[:, 1:] != IGNORED, ids[:, :-1]
        operands = asked & (before == add) & (before.roll(1, dims=1) == is_)
        found[f"{name}_operands"] = float(right[operands].float().mean())
        words = asked & torch.isin(ids[:, 1:], words_of_names)
        found[f"{name}_words"] = float(right[words].float().mean())
        if name == "student":
            results = asked & (before == is_) & torch.isin(ids[:, 1:], digits)
            found["steps"] = float(right[results].float().mean())
            chosen = log_probs.gather(2, ids[:, 1:, None])[..., 0]
            found["student_operand_nats"] = float(chosen[operands].mean())
            # The solution, behind the last box.
            copied = asked & ((before == box).cumsum(1) > 0) & torch.isin(ids[:, 1:], digits)
            found["copies"] = float(right[copied].float().mean())
    return {name: round(value, 3) for name, value in found.items()}


def measure_named_base(name: str) -> dict[str, float]:
    """Return the figures of the gates of the base of named chains of this name."""
    return measure_named_gates(load_model(name), load_tokenizer(name))


def digit_in(text: str) -> int:
    """Return the digit of the task that a token holds, or -1."""
    found = re.fullmatch(r" ?(\d)\D*", text, re.ASCII)
    return int(found[1]) if found else -1


def measure_base(name: str) -> dict[str, float]:
    """Return the figures of the gates of the model of this name."""
    return measure_gates(load_model(name), load_tokenizer(name))


@torch.no_grad()
def measure_entropy(model: Any, examples: list[SFTExample], temperature: float = 0.7) -> float:
    """Return the mean entropy of the next-token distribution at the tokens that examples train, in nats."""
    total, count = 0.0, 0
    for example in examples:
        ids, mask = torch.tensor([example.token_ids]), torch.tensor(example.loss_mask)[1:]
        logits = model(input_ids=ids).logits[0, :-1][mask]
        total += float(torch.distributions.Categorical(logits=logits / temperature).entropy().sum())
        count += int(mask.sum())
    return total / count


def measure_answers(name: str, problems: list[dict[str, Any]], responses: list[dict[str, Any]]) -> float:
    """Return the mean entropy of a student's answers to held-out problems, nats a token."""
    tokenizer, answers = load_tokenizer(name), []
    form = ChatFormat(tokenizer, R1, "", "")
    for row in responses:
        question = problems[int(row["id"].split("/")[1]) - 1]["question"]
        prompt = encode(tokenizer, form.render_student_chat(question))
        answers.append(build_masked_example(1, prompt, encode(tokenizer, row["response"])))
    return measure_entropy(load_model(name), answers)


def measure_explanations(name: str, rows: list[dict[str, Any]]) -> float:
    """Return the mean entropy of a teacher's explanations, nats a token."""
    form, traces = ChatFormat(load_tokenizer(name), R1, "", ""), []
    for row in rows:
        problem = form.build_problem(1, row["question"], R1.wrap(row["solution"]))
        traces.append(form.build_teacher_sft_example(problem, row["reasoning_trace"]))
    return measure_entropy(load_model(name), traces)
