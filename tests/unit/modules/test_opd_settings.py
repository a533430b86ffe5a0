"""On-policy distillation: settings that would be ignored, and the numbers of the sampled form."""

from __future__ import annotations

import pytest

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import ParsedRow
from rlt_lightning.datamodules.views import TeacherViews
from rlt_lightning.models.load import load_tokenizer
from rlt_lightning.modules import OPDModule
from rlt_lightning.types import InputError


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_positive(temperature: float) -> None:
    with pytest.raises(InputError, match=r"model\.temperature above 0"):
        OPDModule(temperature=temperature)


def test_a_question_may_hold_the_name_of_the_solution(miniature: str) -> None:
    tokenizer = load_tokenizer(miniature)
    chat = ChatFormat(tokenizer, "r1", "", "")
    made = TeacherViews(chat, chat, "hint")
    row = ParsedRow("a {solution} b", "{question}", {}, None, None)
    view = made.build_problem(0, row, None, {}).teacher_view
    text = tokenizer.decode(view)
    assert text.count("{solution}") == text.count("{question}") == 1
