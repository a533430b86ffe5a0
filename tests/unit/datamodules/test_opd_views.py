"""What a teacher sees of a student's answer: by hand, with two tokenizers, any tags and any characters."""

from __future__ import annotations

from typing import Any

import pytest
from distillation import answered
from miniatures import PIECES

from rlt_lightning.datamodules.cross_tokenizer import ByteExactTokenizer
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import ParsedRow
from rlt_lightning.datamodules.views import TeacherViews
from rlt_lightning.models.load import load_tokenizer
from rlt_lightning.tags import TAG_STYLES, TagStyle, decode
from rlt_lightning.types import Completion, Rollout

THOUGHTS = ["3 add 4 is 7.", "So x = \\frac{1}{2}, 12345", "数学 🧮👩🏽‍🏫 é", "</div> <b>", "🧮"]


@pytest.fixture(scope="module", params=["miniature", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return load_tokenizer("miniature") if request.param == "miniature" else request.getfixturevalue("qwen")


def build_views(tokenizer: Any, tags: str | TagStyle, kind: Any = "explanation") -> TeacherViews:
    chat = ChatFormat(tokenizer, tags, "", "")
    return TeacherViews(chat, chat, kind)


def turn(style: TagStyle, thought: str) -> str:
    solution = style.solution_open + style.wrap("7") + style.solution_close
    return style.thought_open + style.wrap(thought) + style.thought_close + "\n\n" + solution


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("tags", TAG_STYLES)
def test_a_teacher_reads_a_thought_and_its_own_tag(tags: str, thought: str, tokenizer: Any) -> None:
    made, style = build_views(tokenizer, tags), TAG_STYLES[tags]
    row = answered(made, turn(style, thought))
    ids, view = row.completion.token_ids, row.require_view()
    assert made.closing is not None
    last = view.start + view.num_tokens - 1
    assert decode(tokenizer, ids[: view.start]) == style.thought_open + style.separator
    assert decode(tokenizer, ids[view.start : last]) == thought + style.separator
    assert view.token_ids[:-1] == ids[view.start : last]
    # The rest of the answer begins with the student's tag; the teacher's last token begins its own.
    assert decode(tokenizer, ids[last:]).startswith(style.thought_close)
    assert (ids[last], view.token_ids[-1]) == made.closing
    for word, tag in zip(made.closing, (style.thought_close, style.explanation_close), strict=True):
        found = decode(tokenizer, [word])
        assert tag.startswith(found) or found.startswith(tag)
    assert (made.exchanged is None) == (made.closing[0] == made.closing[1])
    view = decode(tokenizer, row.problem.teacher_view)
    assert view.endswith(style.explanation_open + style.separator)


@pytest.mark.parametrize("thought", THOUGHTS)
def test_an_open_thought_is_judged_to_its_end_without_eos(thought: str, tokenizer: Any) -> None:
    for closed in (True, False):  # the student ended its turn, or had no room left
        row = answered(build_views(tokenizer, "r1"), "<think>\n" + thought, closed)
        view = row.require_view()
        assert decode(tokenizer, view.token_ids) == thought
        assert view.num_tokens == len(view.token_ids)
        assert view.start + view.num_tokens == len(row.completion.token_ids) - closed


def test_an_empty_thought_leaves_its_end_to_be_judged(tokenizer: Any) -> None:
    row = answered(build_views(tokenizer, "r1"), "<think>\n</think>\n\n<solution>\n7\n</solution>")
    view = row.require_view()
    assert view.num_tokens == 1


@pytest.mark.parametrize("text", ["7", "<think>", "<thinking>\n7", " <think>\n7\n</think>", "</think>\n"])
def test_what_does_not_begin_with_a_thought_is_not_judged(text: str, tokenizer: Any) -> None:
    assert answered(build_views(tokenizer, "r1"), text).view is None


def test_a_separator_in_one_token_with_the_thought_is_not_judged(qwen: Any) -> None:
    assert [decode(qwen, [i]) for i in qwen.encode("<think>\n\n7")][-2:] == [">\n\n", "7"]
    assert answered(build_views(qwen, "r1"), "<think>\n\n7\n</think>").view is None


def test_a_closing_tag_that_is_spelled_is_read_as_it_is() -> None:
    tokenizer = load_tokenizer("miniature")
    made = build_views(tokenizer, "r1")
    begun = tokenizer.encode("<think>\n7\n", add_special_tokens=False)
    letters = [word for c in "</think>" for word in tokenizer.encode(c, add_special_tokens=False)]
    problem = answered(made, "7").problem
    row = made.build_rollout(problem, Completion([*begun, *letters], None, "length"))
    view = row.require_view()
    # Its first token is compared with the same token, not with the teacher's closing tag.
    assert view.token_ids == [*begun[1:], letters[0]]
    assert made.closing is not None
    assert letters[0] not in made.closing


def test_a_thought_ends_at_either_closing_tag() -> None:
    made = build_views(load_tokenizer("miniature"), "r1")
    assert made.closing is not None
    own, teacher = made.closing
    assert own != teacher
    begun = made.student.tokenizer.encode("<think>\n7\n", add_special_tokens=False)
    problem = answered(made, "7").problem
    for ids in ([own], [teacher], [teacher, begun[1], own]):
        view = made.build_rollout(problem, Completion([*begun, *ids], None, "length")).require_view()
        # The one is read as the other, and nothing behind it is judged.
        assert view.token_ids == [*begun[1:], own if ids[0] == teacher else teacher]
        assert view.num_tokens == len(view.token_ids)


def test_a_hint_judges_all_tokens_with_the_end(tokenizer: Any) -> None:
    made = build_views(tokenizer, "r1", "hint")
    row = answered(made, turn(TAG_STYLES["r1"], "数学"))
    view = row.require_view()
    assert view.token_ids == row.completion.token_ids
    assert view.token_ids[-1] == tokenizer.eos_token_id
    assert made.exchanged is None
    view = decode(tokenizer, row.problem.teacher_view)
    assert view.count("3 +4") == view.count("Here is the solution:\n\n7\n\n") == 1


@pytest.mark.parametrize("kind", ["explanation", "hint"])
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("names", [("miniature", PIECES), (PIECES, "miniature")])
def test_another_tokenizer_reads_the_same_bytes(names: tuple[str, str], thought: str, kind: Any) -> None:
    tokenizers = [load_tokenizer(name) for name in names]
    student, teacher = (ChatFormat(one, "r1", "", "") for one in tokenizers)
    row: Rollout = answered(TeacherViews(student, teacher, kind), turn(student.tags, thought))
    view = row.require_view()
    assert view.spans is not None
    plain = [ByteExactTokenizer(one, "model") for one in tokenizers]
    judged = row.completion.token_ids[view.start : view.start + view.num_tokens]
    # Bytes of each token, which the loop takes off.
    own = [plain[0].decode_bytes(token) for token in judged]
    theirs = [plain[1].decode_bytes(token) for token in view.token_ids]
    whole = turn(student.tags, thought) if kind == "hint" else thought + "\n"
    assert b"".join(own).decode() == whole  # without eos, which is no text
    for num_theirs, num_own in view.spans:
        assert b"".join(own[:num_own]) == b"".join(theirs[:num_theirs])
        own, theirs = own[num_own:], theirs[num_theirs:]
    assert own == theirs == []


def test_a_question_may_hold_the_name_of_the_solution() -> None:
    made = build_views(load_tokenizer("miniature"), "r1", "hint")
    row = ParsedRow("a {solution} b", "{question}", {}, None, None)
    text = decode(made.student.tokenizer, made.build_problem(0, row, None, {}).teacher_view)
    assert text.count("{solution}") == text.count("{question}") == 1
