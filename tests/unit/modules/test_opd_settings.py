"""On-policy distillation: settings that would be ignored, and the numbers of the sampled form."""

from __future__ import annotations

import pytest
import torch

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import ParsedRow
from rlt_lightning.datamodules.views import TeacherViews
from rlt_lightning.models.load import load_tokenizer
from rlt_lightning.modules import OPDModule
from rlt_lightning.modules.opd import per_token
from rlt_lightning.modules.passes import exchange_targets
from rlt_lightning.numerics.divergence import divergence, sampled_advantages
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.rewards.students import Students
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


def test_mean_sampled_gradient_is_that_of_reverse_kl_with_an_exchange() -> None:
    torch.manual_seed(0)
    logits, teacher = torch.randn(1, 6, dtype=torch.float64, requires_grad=True), torch.randn(1, 6).double()
    expected = torch.autograd.grad(divergence(logits, teacher, exchanged=(4, 1)).sum(), logits)
    student, log_q = logits.log_softmax(1)[0], teacher.log_softmax(1)[0]
    # Every word as the sampled token; the teacher reads its own tag in place of word 4.
    rows = [ScoredSequence([0], [1 if word == 4 else word], [False, True]) for word in range(6)]
    packed = exchange_targets(PackedSequences.from_sequences(rows), torch.arange(6), (4, 1))
    losses = -sampled_advantages(student, log_q[packed.targets]) * student
    found = torch.autograd.grad(losses @ student.detach().exp(), logits)
    torch.testing.assert_close(found, expected)


def test_a_span_counts_once_in_what_is_reported() -> None:
    student, teacher = torch.tensor([-1.0, -2.0, -3.0, -1.0]), torch.tensor([-4.0, -2.0])
    spans = [(1, 3), (1, 1)]
    ratios = per_token(sampled_advantages(student, teacher, spans), spans)
    torch.testing.assert_close(ratios.sum(), teacher.sum() - student.sum())


def test_labels_of_students_are_never_the_same() -> None:
    assert Students.of(None, ["m", "m", "m_2"]).labels == ["m", "m_2", "m_2_2"]
