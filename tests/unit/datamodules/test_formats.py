"""Contexts of teacher and student on real tokenizers: SmolLM2 splits newlines off, Qwen glues them on."""

from __future__ import annotations

import copy
import json
import random
import re
from itertools import chain
from typing import Any

import pytest
from cases import GOLDEN_FOLDER
from tokenizer_kinds import kind_of_tokenizer
from tokenizers import processors

from rlt_lightning.datamodules.formats import ChatFormat, encode, encode_pieces
from rlt_lightning.tags import R1, STRATOS, TagStyle, decode_each, tag_style
from rlt_lightning.types import Completion, InputError

# The token layouts of four model families, in our own words.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "<|endoftext|>{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


@pytest.fixture(params=["smol", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def with_template(tokenizer: Any, template: str | None) -> Any:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


SOLUTION = "\n\nx = \\boxed{7}.\n\n"


# Against the released reward code's own contexts


@pytest.mark.parametrize("case", range(6))
def test_contexts_are_those_of_the_released_code(smol: Any, case: int):
    golden = json.loads((GOLDEN_FOLDER / "rlt_reward.jsonl").read_text().splitlines()[case])
    teacher_system = golden["teacher_prompt"].split("system\n")[1].split("<|im_end|>")[0]
    chat = ChatFormat(smol, "stratos", teacher_system, golden["student_system_prompt"])
    problem = chat.build_problem(1, golden["question"], golden["solution"])
    completion = chat.completion_from_text(problem, golden["completion"])
    rollout = chat.build_rollout(problem, completion)

    teacher = golden["teacher_prompt"] + golden["completion"]
    assert problem.teacher_prompt + completion.token_ids == encode(smol, teacher)
    student = [*problem.student_prefix, *problem.think_prefix, *rollout.require_view().token_ids]
    student += [*problem.student_suffix, *problem.solution_ids]
    expected = encode(smol, golden["student_chat"])
    assert student == expected[: len(student)]
    assert text_of(smol, expected[len(student) :]) == "\n\n<|end_of_solution|><|im_end|>\n"
    assert problem.solution_ids == golden["solution_token_ids"]
    assert len(problem.think_prefix) + rollout.require_view().num_tokens == len(golden["paper"]["thought_kl"])
    assert rollout.text == golden["think"].strip()
    assert rollout.closed == (golden["id"] != "missing_end_tag")


# Tokenising pieces


def test_pieces_are_the_tokens_of_the_whole_text_cut_where_they_start(tokenizer: Any):
    text = "Résous  x + 12 =\t鬱🧮 \n\n ok.  <|im_end|>\n"
    whole = encode(tokenizer, text)
    assert whole == tokenizer(text, add_special_tokens=False).input_ids
    for cut in range(len(text) + 1):
        left, right = encode_pieces(tokenizer, [text[:cut], text[cut:]])
        assert left + right == whole
        # The last token on the left starts before the cut, the first one on the right does not.
        assert len(text_of(tokenizer, left[:-1]).rstrip("\ufffd")) < cut or not left
        assert not right or len(text_of(tokenizer, left)) >= cut


def test_trimmed_offsets_do_not_move_a_token_into_the_next_piece(smol: Any):
    # Llama 3's tokenizer takes leading spaces off the offsets: " b" then seems to start at the b.
    trimming = copy.deepcopy(smol)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert trimming("a b", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (2, 3)]
    assert encode_pieces(trimming, ["a ", "b"]) == encode_pieces(smol, ["a ", "b"])
    assert encode_pieces(trimming, ["a ", "b"])[1] == []


# Contexts


@pytest.mark.parametrize("style", ["stratos", "r1"])
@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA3, None], ids=["smollm2", "qwen3", "llama3", "own"])
def test_three_formats_of_one_row(tokenizer: Any, template: str | None, style: str):
    head = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n1+6?<|im_end|>\n<|im_start|>assistant\n"
    if template == LLAMA3:
        head = "<|endoftext|>[system]\n\n{}<|im_end|>[user]\n\n1+6?<|im_end|>[assistant]\n\n"
    tokenizer = tokenizer if template is None else with_template(tokenizer, template)
    tags = tag_style(style)
    chat = ChatFormat(tokenizer, style, "Teach.", "Learn.")
    gap = tags.separator
    solution = tags.wrap("x = \\boxed{7}.")
    problem = chat.build_problem(1, "1+6?", solution)
    trace = "Count up: 7."

    def show(*token_ids: list[int]) -> str:
        return text_of(tokenizer, list(chain(*token_ids)))

    # RL: the teacher's prompt, and the student's context around an explanation.
    given = f"{tags.solution_open}{solution}{tags.solution_close}\n\n{tags.explanation_open}{gap}"
    assert show(problem.teacher_prompt) == head.format("Teach.") + given
    rollout = chat.build_rollout(problem, chat.completion_from_trace(problem, trace))
    read = rollout.require_view().token_ids
    spliced = show(problem.student_prefix, problem.think_prefix, read, problem.student_suffix)
    turn = f"{tags.thought_open}{gap}{trace}{gap}{tags.thought_close}\n\n{tags.solution_open}"
    context = head.format("Learn.") + turn
    assert (spliced + show(problem.solution_ids)).startswith(context + solution.removesuffix(gap))
    assert rollout.text == trace

    # Stage 1: prompt as in RL, the loss counts explanation, end tag and eos.
    teacher = chat.build_teacher_sft_example(problem, trace)
    counted = [t for t, count in zip(teacher.token_ids, teacher.loss_mask, strict=True) if count]
    assert teacher.token_ids == problem.teacher_prompt + counted
    assert show(counted) == f"{trace}{gap}{tags.explanation_close}{tokenizer.eos_token}"

    # Stage 4: the loss counts the whole assistant turn.
    student = chat.build_student_sft_example(1, "1+6?", tags.wrap(trace), solution)
    counted = [t for t, count in zip(student.token_ids, student.loss_mask, strict=True) if count]
    assert show(student.token_ids[: -len(counted)]) == head.format("Learn.")
    assert show(counted) == f"{turn}{solution}{tags.solution_close}{tokenizer.eos_token}"


def test_separator_tokens_are_those_in_front_of_text(smol: Any, qwen: Any):
    # SmolLM2 has one token for two newlines (1116), but not in front of a letter; Qwen glues them to the tag.
    assert ChatFormat(smol).build_problem(1, "q", SOLUTION).think_prefix == [198, 198]
    problem = ChatFormat(qwen).build_problem(1, "q", SOLUTION)
    assert problem.think_prefix == []
    ends = {ids[-1] for ids in (problem.teacher_prefix, problem.student_prefix, problem.student_suffix)}
    assert ends == {1339}  # >\n\n


def test_tags_that_end_differently_share_no_separator(qwen: Any):
    tags = TagStyle("## Thought", "## End", "<s>", "</s>", "<e>", "</e>")
    problem = ChatFormat(qwen, tags).build_problem(1, "q", SOLUTION)
    assert problem.think_prefix == []
    assert text_of(qwen, problem.teacher_prefix).endswith("<e>\n\n")
    assert text_of(qwen, problem.student_prefix).endswith("## Thought\n\n")


def test_bos_of_the_template_is_not_doubled(smol: Any):
    tokenizer = copy.deepcopy(with_template(smol, LLAMA3))
    adds_bos = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = adds_bos
    assert tokenizer("x").input_ids[0] == 0
    chat_format = ChatFormat(tokenizer)
    problem = chat_format.build_problem(1, "q", SOLUTION)
    assert problem.teacher_prompt.count(0) == problem.student_prefix.count(0) == 1
    assert chat_format.build_student_problem(1, "q", SOLUTION).teacher_prompt.count(0) == 1


def test_empty_system_prompt_sends_no_system_message(smol: Any):
    problem = ChatFormat(with_template(smol, NO_SYSTEM), "stratos", "", "").build_problem(1, "q", SOLUTION)
    assert text_of(smol, problem.student_prefix).startswith("<|im_start|>user\nq<|im_end|>")


# Tags


def test_tag_styles_by_name_or_field():
    assert tag_style("r1") is R1
    assert tag_style(STRATOS) is STRATOS


def test_a_separator_that_sticks_to_the_text_is_refused(smol: Any):
    tags = TagStyle("<t>", "</t>", "<s>", "</s>", "<e>", "</e>", separator=" ")
    with pytest.raises(InputError, match="separator must be tokenised separately"):
        ChatFormat(smol, tags)


# Completions


def test_text_after_the_first_end_tag_is_dropped(tokenizer: Any):
    chat = ChatFormat(tokenizer)
    problem = chat.build_problem(1, "q", SOLUTION)
    text = "Yes.\n\n<|end_of_explanation|>\n\nmore<|end_of_explanation|>"
    completion = chat.completion_from_text(problem, text)
    assert text_of(tokenizer, completion.token_ids) == "Yes.\n\n<|end_of_explanation|>"
    assert completion.finish_reason == "stop"
    assert chat.completion_from_text(problem, "Yes").finish_reason == "length"


@pytest.mark.parametrize("text", ["24 + 12 = 36", "\n\nSo", " a", "é", ""])
def test_a_given_text_never_changes_the_prompts_tokens(tokenizer: Any, text: str):
    # SmolLM2 joins two newlines in front of a digit, Qwen joins a third one to the tag.
    chat = ChatFormat(tokenizer)
    completion = chat.completion_from_text(chat.build_problem(1, "q", SOLUTION), text)
    assert text_of(tokenizer, completion.token_ids) == text


@pytest.mark.parametrize("gap", ["", "\n", "\n\n", ".\n\n", "\n\n\n", ".\n\n\n", "\n \n\n"])
def test_only_the_exact_separator_is_taken_off_the_thought(tokenizer: Any, gap: str):
    chat = ChatFormat(tokenizer)
    problem = chat.build_problem(1, "q", SOLUTION)
    rollout = chat.build_rollout(problem, chat.completion_from_text(problem, f"seven{gap}{chat.end_tag}"))
    body, view = f"seven{gap}", rollout.require_view()
    assert text_of(tokenizer, view.token_ids) == body
    starts = [len(text_of(tokenizer, view.token_ids[:i])) for i in range(len(view.token_ids))]
    in_separator = [start for start in starts if gap.endswith("\n\n") and start >= len(body) - 2]
    assert len(view.token_ids) - view.num_tokens == len(in_separator)
    assert rollout.text == body.strip()


def test_a_token_that_holds_the_start_of_the_end_tag_does_not_reach_the_student(qwen: Any):
    chat = ChatFormat(qwen, "r1")
    problem = chat.build_problem(1, "q", "\n7\n")
    straddling = qwen.convert_tokens_to_ids(".</")
    token_ids = [*encode(qwen, "It is seven"), straddling, *encode(qwen, "explanation>")]
    assert text_of(qwen, token_ids) == "It is seven.</explanation>"
    rollout = chat.build_rollout(problem, Completion(token_ids, None, "stop"))
    assert text_of(qwen, rollout.require_view().token_ids) == rollout.text == "It is seven"


def test_the_end_tag_may_end_inside_the_last_token(qwen: Any):
    chat = ChatFormat(qwen)
    problem = chat.build_problem(1, "q", SOLUTION)
    token_ids = encode_pieces(qwen, ["Seven\n\n<|end_of_explanation|>", "\n\nx"])[0]
    assert token_ids[-1] == 1339  # >\n\n
    rollout = chat.build_rollout(problem, Completion(token_ids, None, "stop"))
    assert text_of(qwen, rollout.require_view().token_ids) == "Seven\n\n"


@pytest.mark.parametrize(
    ("text", "end", "closed"),
    [
        ("Count to seven", "", False),
        ("Count to seven", "eos", False),
        ("", "eos", False),
        ("", "<|end_of_explanation|>", True),
    ],
)
def test_what_ends_a_completion_is_not_in_its_body(tokenizer: Any, text: str, end: str, closed: bool):
    chat = ChatFormat(tokenizer)
    body = encode(tokenizer, text)
    reason = "stop" if closed else end or "length"
    last = [tokenizer.eos_token_id] if end == "eos" else encode(tokenizer, end)
    problem = chat.build_problem(1, "q", SOLUTION)
    rollout = chat.build_rollout(problem, Completion([*body, *last], None, reason))
    view = rollout.require_view()
    assert (view.token_ids, view.num_tokens, rollout.text) == (body, len(body), text)
    assert (rollout.closed, rollout.empty) == (closed, not text)


def test_a_completion_cut_inside_a_character_keeps_all_tokens(smol: Any):
    chat = ChatFormat(smol)
    token_ids, problem = encode(smol, "so 鬱🧮")[:-1], chat.build_problem(1, "q", SOLUTION)
    rollout = chat.build_rollout(problem, Completion(token_ids, None, "length"))
    assert rollout.require_view().token_ids == token_ids
    assert rollout.text.startswith("so 鬱")
    # Nor does a broken character in front of the tag hide it.
    closed = Completion([*token_ids, *encode(smol, chat.end_tag)], None, "stop")
    assert len(chat.build_rollout(problem, closed).require_view().token_ids) == len(token_ids)


def test_a_stop_without_end_tag_is_an_error(smol: Any):
    chat = ChatFormat(smol)
    completion = Completion(encode(smol, "no tag"), None, "stop")
    with pytest.raises(ValueError, match=r"must end with <\|end_of_explanation\|>.*engine"):
        chat.build_rollout(chat.build_problem(1, "q", SOLUTION), completion)


def test_solutions_without_the_separator_are_kept_whole(smol: Any):
    chat = ChatFormat(smol)
    for given, scored in (("\n\nseven\n", "\n\nseven\n"), ("\n\n7.5\n\n", "\n\n7.5"), ("seven", "seven")):
        assert text_of(smol, chat.build_problem(1, "q", given).solution_ids) == scored


def test_the_texts_of_tokens_make_up_the_whole(smol: Any, qwen: Any) -> None:
    text = "  So 2·4 + 6 = 14 ✓\n\n我要求解方程, é 👩‍🎓!"
    for tokenizer in (smol, qwen):
        token_ids = tokenizer(text)["input_ids"]
        texts = decode_each(tokenizer, token_ids)
        assert len(texts) == len(token_ids)
        assert "".join(texts) == text
        assert "✓" in [token.strip() for token in texts]  # several tokens, of which the last has it
    cut = decode_each(smol, smol("14 ✓")["input_ids"][:-1])  # in the middle of a character
    assert "".join(cut) == "14 \ufffd"


def test_an_indentation_keeps_its_spaces():
    tokenizer = kind_of_tokenizer("llama2")
    text = "do: 数\n   do den"
    assert "".join(decode_each(tokenizer, encode(tokenizer, text))) == text


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_tokens_that_are_no_text_harm_no_other(kind: str, smol: Any):
    # A model may write bytes that are no characters.
    is_byte_level = kind == "byte-level"
    tokenizer = smol if is_byte_level else kind_of_tokenizer("llama2")
    texts = {token: tokenizer.decode([token]) for token in range(3, len(tokenizer))}
    words = [token for token, text in texts.items() if len(text) > 1 and text.isascii()]
    parts = [token for token, text in texts.items() if text == "\ufffd"]  # of characters
    assert min(len(words), len(parts)) > 2
    draws = random.Random(0)
    for _ in range(300):
        token_ids = [draws.choice(draws.choice([words, parts, parts])) for _ in range(40)]
        written = "".join(decode_each(tokenizer, token_ids))
        whole = tokenizer.decode(token_ids)
        assert written == whole or not is_byte_level
        assert re.sub("[^\\x00-\\x7f]", "", written) == re.sub("[^\\x00-\\x7f]", "", whole)
