"""A student with another tokenizer: what it reads, and r_KL on spans, against a slow and obvious version."""

from __future__ import annotations

import json
import random
from codecs import getincrementaldecoder
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from commands import rlt
from explanation_scorer import ExplanationScorer
from grpo import Witness, rollout_callback
from tiny import CHAINS
from tokenizer_kinds import KINDS, kind_of_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from trainers import bare_trainer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlt_lightning import Teacher
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.models.load import load_model
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.modules.passes import PassRunner, score_rollouts
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.explanations import build_kl_passes
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY, StepBatch
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.types import Completion, InputError, Rollout, Rollouts

PIECES = [
    *("So ", "x = ", "12345", "3.14159", "1e-10", " 007", "\n", "\n\n", "    ", " \t", "the", " student"),
    *(".", "数学", "，所以", "証明する", "물리", "Привет", " ação", "e\u0301", "\ufb01", "\u200b", "\u00a0"),
    *("\u2581", "👩🏽‍🏫", "🧮", "🇩🇪", " 🎉🎉", "\\frac{1}{2}", "$\\sum_{i=1}^{n} x_i$"),
    *("\\begin{align}", "^{2}", "def f(x):\n    return x ** 2", "for(i=0;i<10;++i){", "//", "```python\n"),
    *("<|im_end|>", "</think>", "<s>", "<tool_call>", "<|begin_of_thought|>", "<0x0A>", "\x13", "\U00050000"),
    *("…", "“x”", "don't"),
]


BYTE_LEVEL = [("smollm2", "qwen"), full(("qwen", "smollm2"))]
# Both with a space put before texts, or one of them; runs of spaces and line breaks as added tokens; scores.
OTHERS = [("llama2", "gemma"), ("gemma", "qwen"), ("smollm2", "mistral"), ("mistral", "unigram"),
          ("unigram", "smollm2")]  # fmt: skip


def tokenizer_of(name: str, request: pytest.FixtureRequest) -> Any:
    if name in KINDS:
        return kind_of_tokenizer(name)
    if name == "smollm2":
        return AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2"))
    shared = request.getfixturevalue("shared")
    return AutoTokenizer.from_pretrained(shared / "data/tokenizers/Qwen2.5-Instruct")


@pytest.fixture(scope="module", params=[*BYTE_LEVEL, *OTHERS], ids="-".join)
def chat(request: pytest.FixtureRequest) -> CrossTokenizerFormat:
    """The format of a teacher and a student of two families."""
    return CrossTokenizerFormat(*(tokenizer_of(name, request) for name in request.param))


def random_model(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    others = {"max_position_embeddings": 4096, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **others)).eval()


def explanations(tokenizer: Any, number: int, seed: int) -> list[list[int]]:
    """Tokens of explanations of many kinds; tokenised in parts, so that they are not the usual ones."""
    draw, found = random.Random(seed), []
    for _ in range(number):
        ids: list[int] = []
        for _ in range(draw.randrange(1, 6)):
            text = "".join(draw.choices(PIECES, k=draw.randrange(1, 6)))
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        # Some are cut at any token, which may be within a character.
        found.append(ids[: draw.randrange(1, len(ids) + 1)] if draw.random() < 0.3 else ids)
    return found


def sample_rollouts(chat: CrossTokenizerFormat, number: int, seed: int = 0) -> list[Rollout]:
    problem = chat.build_problem(1, "What is 3 + 4?", chat.tags.wrap("7, since 3 + 4 = 7."))
    closing = chat.tokenizer("\n\n" + chat.end_tag, add_special_tokens=False)["input_ids"]
    found = []
    for i, ids in enumerate(explanations(chat.tokenizer, number, seed)):
        closes = i % 3 != 0
        completion = Completion(ids + closing * closes, None, "stop" if closes else "length")
        found.append(chat.build_rollout(problem, completion))
    return found


def slow_log_probs(model: Any, prompt: list[int], scored: list[int], temperature: float = 0.7) -> Tensor:
    # Logits of 151,000 words only where they are read, which is what takes long.
    given, keep = torch.tensor([prompt + scored]), len(scored) + 1
    with torch.no_grad():
        logits = model(input_ids=given, logits_to_keep=keep).logits[0] / temperature
    rows = logits.log_softmax(-1)[:-1]
    return rows.gather(1, torch.tensor(scored)[:, None]).squeeze(1)


def score(teacher: Any, student: Any, rows: list[Rollout], chat: Any, **options: Any) -> StepBatch:
    reward, scorer = RLTReward(**options), Student.of("student", chat_format=chat)
    models = {"student": Model(ModelEntry(student)), POLICY: Model(ModelEntry(teacher))}
    runner = PassRunner(models, torch.device("cpu"), micro_batch_tokens=3000, layout="packed")
    return score_rollouts(runner, reward, scorer, Rollouts(rows, 1, 0, 0.7))


# What the student reads


def test_two_hundred_explanations_keep_their_bytes(chat: CrossTokenizerFormat) -> None:
    replaced = cut = 0
    for rollout in sample_rollouts(chat, 200):
        view = rollout.require_view()
        assert view.spans is not None
        teachers = ChatFormat.build_rollout(chat, rollout.problem, rollout.completion).require_view()
        data = b"".join(map(chat.teachers_text.decode_bytes, teachers.token_ids))
        read = b"".join(map(chat.students_text.decode_bytes, view.token_ids))
        # An incomplete character at the end is left out, other bytes that are none become U+FFFD.
        text = getincrementaldecoder("utf-8")("replace").decode(data)
        cut += text != data.decode(errors="replace")
        if not chat.students_text._spells(text):
            replaced += 1
            text = "".join(c if chat.students_text._spells(c) else "\ufffd" for c in text)
        # A tokenizer with ▁ for a space reads the character ▁ as one.
        is_byte_level = chat.students_text.is_byte_level
        assert read == (text if is_byte_level else text.replace("▁", " ")).encode()
        # Spans divide what r_KL counts, and end where both sides have the same bytes.
        assert sum(teacher for teacher, _ in view.spans) == view.num_tokens <= len(teachers.token_ids)
        assert sum(student for _, student in view.spans) == view.num_own <= len(view.token_ids)
        assert controls_of(chat.student_tokenizer).isdisjoint(view.token_ids)
    print(f"figure: {cut} of 200 end within a character, {replaced} have characters without tokens")


def test_contexts_are_in_the_students_own_tokens(chat: CrossTokenizerFormat) -> None:
    problem = chat.build_problem(1, "What is 3 + 4?", chat.tags.wrap("7"), "Be brief.")
    completion = chat.completion_from_trace(problem, "Add 3 and 4, 数学.")
    rollout = chat.build_rollout(problem, completion)
    student = Student.of("student", chat_format=chat)
    read, _ = build_kl_passes(student, rollout.require_view(), RLTReward(), 0.7, 0.7)
    tags = chat.tags
    turn = f"{tags.thought_open}\n\nAdd 3 and 4, 数学.\n\n{tags.thought_close}\n\n{tags.solution_open}\n\n7"
    prompt = chat.student.render_student_chat("What is 3 + 4?", "Be brief.")
    tokens = chat.student_tokenizer(prompt + turn, add_special_tokens=False)["input_ids"]
    assert read.prefix + read.rest == tokens
    scored = tokens[slice(*read.scored["explanation"])] + tokens[slice(*read.scored["solution"])]
    # Between them is the separator, where the tokens of either side glue it to a text.
    assert chat.student_tokenizer.decode(scored).split() == ["Add", "3", "and", "4,", "数学.", "7"]
    assert problem.think_prefix == []


def controls_of(tokenizer: Any) -> set[int]:
    """Added tokens but for white space, which Gemma's has in runs."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {i for i, token in added.items() if not token.content.replace("▁", " ").isspace()}


def test_a_student_that_glues_the_separator_to_a_tag_is_refused(miniature: str) -> None:
    gemma = kind_of_tokenizer("gemma")
    described = json.loads(gemma.backend_tokenizer.to_str())
    model = described["model"]
    model["vocab"]["\n<"] = len(model["vocab"])
    model["merges"].insert(0, ["\n", "<"])
    glues = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), eos_token="<eos>", bos_token="<bos>"
    )
    glues.chat_template = gemma.chat_template
    teacher = AutoTokenizer.from_pretrained(miniature)
    CrossTokenizerFormat(teacher, gemma, "r1", "", "")
    with pytest.raises(InputError, match="must divide the separator from the tag after it"):
        CrossTokenizerFormat(teacher, glues, "r1", "", "")


def test_half_a_character_at_the_end_counts_on_neither_side(chat: CrossTokenizerFormat) -> None:
    problem = chat.build_problem(1, "q", chat.tags.wrap("7"))
    whole = chat.tokenizer("So 🪼", add_special_tokens=False)["input_ids"]
    rollout = chat.build_rollout(problem, Completion(whole[:-1], None, "length"))
    view = rollout.require_view()
    assert chat.student_tokenizer.decode(view.token_ids).strip() == "So"
    assert view.num_left_out == len(whole) - 1 - view.num_tokens > 0
    assert chat.tokenizer.decode(view.compared).strip() == "So"
    # In byte-level tokens " 🪼" begins with one that holds a space and the first byte, else with "▁".
    first = chat.teachers_text.is_byte_level
    only = chat.build_rollout(problem, Completion(whole[-4:-3] if not first else whole[1:2], None, "length"))
    view = only.require_view()
    assert (view.num_tokens, view.spans, view.num_left_out) == (0, [], 1)
    assert chat.student_tokenizer.decode(view.token_ids) in ("", " ")


# What it scores


@pytest.mark.parametrize(("estimator", "number"), [("k1", 10), ("k3", 10), full("k1", 200)])
def test_span_sums_are_whole_text_log_probs(chat: CrossTokenizerFormat, estimator: str, number: int) -> None:
    texts = chat.teachers_text, chat.students_text
    if estimator == "k3" and not all(text.is_byte_level for text in texts):
        pytest.skip("exp(-d) of a long span under two random models is inf")
    teacher, student = random_model(chat.tokenizer, 0), random_model(chat.student_tokenizer, 1)
    rows = sample_rollouts(chat, number)
    scored = score(teacher, student, rows, chat, kl_estimator=estimator)
    kl, solutions = scored.tokens["kl"], scored.tokens["solution"]
    largest = 0.0
    for i, rollout in enumerate(rows):
        view = rollout.require_view()
        assert view.spans is not None
        assert rollout.completion.log_probs is None
        prompt, think = rollout.problem.teacher_prompt, view.compared
        prefix = rollout.problem.student_prefix
        read = view.token_ids[: view.num_own]
        if not think:
            assert kl[i].tolist() == []
            continue
        of_teacher = slow_log_probs(teacher, prompt, think)
        of_student = slow_log_probs(student, prefix, read)
        if estimator == "k1":
            whole = float(of_teacher.sum() - of_student.sum())
            # Rounding grows with the sums, while their difference may be near 0.
            size = float(of_teacher.sum().abs() + of_student.sum().abs())
            largest = max(largest, abs(float(kl[i].sum()) - whole) / size)
        values, t, s = [], 0, 0
        for num_teacher, num_student in view.spans:  # slow: one span at a time
            d = of_teacher[t : t + num_teacher].sum() - of_student[s : s + num_student].sum()
            t, s = t + num_teacher, s + num_student
            value = d if estimator == "k1" else d - 1 + torch.exp(-d)
            values += [float(value) / num_teacher] * num_teacher
        torch.testing.assert_close(kl[i], torch.tensor(values), atol=1e-3, rtol=1e-4)
        context = prefix + view.token_ids + rollout.problem.student_suffix
        solution = slow_log_probs(student, context, rollout.problem.solution_ids)
        torch.testing.assert_close(solutions[i], solution, atol=1e-4, rtol=1e-4)
        if estimator == "k1":
            r_kl = sum(values) / len(values) + 0.01 * max(values)
            r_ss = solution.mean() + 0.01 * solution.min()
            reward = r_ss - 3 * r_kl - (0 if rollout.closed and not rollout.empty else 1)
            torch.testing.assert_close(scored.rewards[i], reward, atol=1e-3, rtol=1e-4)
    if estimator == "k1":
        assert largest < 1e-6
        print(f"figure: {number}: span sums and whole-text log-probs differ by at most {largest:.1e} of them")


# Runs


def test_what_the_student_cannot_hold_names_the_row() -> None:
    chat = CrossTokenizerFormat(kind_of_tokenizer("llama2"), kind_of_tokenizer("gemma"))
    teacher, student = random_model(chat.tokenizer, 0), random_model(chat.student_tokenizer, 1)
    student.config.max_position_embeddings = 50
    with pytest.raises(InputError, match="must fit into its context of 50 tokens, but row 1"):
        score(teacher, student, sample_rollouts(chat, 1), chat)


def test_scores_and_tokens_are_written_in_both_vocabularies(tiny_model: str, tmp_path: Path) -> None:
    models = [f"--model.teacher={tiny_model}", "--model.student=miniature", "--distillation.per_token=true"]
    options = [*CHAINS, "--data.max_rows=3", "--trainer.accelerator=cpu", f"--output_dir={tmp_path / 'run'}"]
    result = rlt("predict", "--config=recipe_7b/score", *models, *options)
    assert result.returncode == 0, result.stderr
    assert "reads every explanation as text, in tokens of its own" in result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/scores.jsonl").open()]
    assert len(rows) == 3
    for row in rows:
        assert row["reasoning_trace"].startswith("".join(row["thought_tokens"]).strip())
        assert row["solution"].strip() in "".join(row["solution_tokens"])
        assert len(row["thought_kl"]) == len(row["thought_tokens"]) > 3
        assert row["kl_mean"] == pytest.approx(sum(row["thought_kl"]) / len(row["thought_kl"]), abs=1e-4)


def test_exact_kl_is_refused_before_a_model_is_loaded(tiny_model: str, tmp_path: Path) -> None:
    models = [f"--model.teacher={tiny_model}", "--model.student=miniature", *CHAINS]
    result = rlt("predict", "--config=recipe_7b/rank", *models, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode != 0
    assert "Set it to k1 or k3, which compare the models on spans of text" in result.stderr
    assert "loading" not in result.stderr


def test_trl_and_verl_score_by_the_same_spans(tiny_model: str) -> None:
    texts = {"tags": "stratos", "teacher_system_prompt": "", "student_system_prompt": ""}
    rows = [{"question": "start 3. add 4.", "solution": "7", "reasoning_trace": "3 add 4 is 7."}]
    theirs = Teacher(tiny_model, "miniature", reward=RLTReward(), **texts).score(rows)[0]  # type: ignore[arg-type]
    ours = ExplanationScorer("miniature", tiny_model, **texts)  # type: ignore[arg-type]
    [problem] = ours.build_problems(rows)
    rollout = ours.format.build_rollout(problem, ours.format.completion_from_trace(problem, "3 add 4 is 7."))
    terms = ours.score([rollout], ModelEntry(load_model(tiny_model)), torch.device("cpu"))
    assert terms.rewards.item() == pytest.approx(theirs.reward, abs=1e-5)
    with pytest.raises(InputError, match="exact sums over a vocabulary"):
        ExplanationScorer("miniature", tiny_model, RLTReward(kl_estimator="exact"), **texts)  # type: ignore[arg-type]


def test_a_renumbered_student_trains_the_same(miniature: str, renumbered: str, tmp_path: Path) -> None:
    found = []
    for student in (miniature, renumbered):
        witness = Witness()
        module = RLTModule(miniature, student, group_size=4, optimizer=OptimizerConfig(lr=1e-3))
        texts = {"tags": "r1", "teacher_system_prompt": "", "student_system_prompt": ""}
        data = TeacherRLData("chains", num_embedded_rows=32, prompts_per_step=4, **texts)  # type: ignore[arg-type]
        bare_trainer(tmp_path, witness, rollout_callback(64), steps=3).fit(module, datamodule=data)
        rewards = torch.cat([batch.step.rewards for batch in witness.batches if batch.step])
        rows = [row for batch in witness.batches if batch.rollouts for row in batch.rollouts.rollouts]
        view = [row.require_view().spans for row in rows]
        found.append((rewards, module.policy.state_dict(), view))
    (own, weights, own_view), (others, other_weights, view) = found
    assert own_view == [None] * len(own_view)
    assert None not in view
    torch.testing.assert_close(others, own, atol=1e-4, rtol=1e-4)
    # AdamW turns rounding in a gradient near zero into a step: so the movements are compared as a whole.
    before = LlamaForCausalLM.from_pretrained(miniature).state_dict()
    ends = (weights, other_weights)
    moved, other_moved = (torch.cat([(end[n] - before[n]).flatten() for n in before]) for end in ends)
    assert moved.norm() > 0.1
    assert (other_moved - moved).norm() < 0.01 * moved.norm()
