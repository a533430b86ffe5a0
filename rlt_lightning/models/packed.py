"""How a transformers model runs a packed row, and how its head turns hidden states into log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlt_lightning.models.attention import SEGMENT_ATTENTION, PackedRow
from rlt_lightning.numerics.divergence import Divergence, linear_divergence
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.types import InputError


@dataclass(frozen=True)
class HeadOptions:
    """How log-probs are computed from hidden states; no choice changes a result.

    Args:
        logits_mib: Memory for logits at a time, MiB; None: 8 on a CPU, else 512.
        compiled: Fuse the head's arithmetic with torch.compile; None: on a GPU, if it equals the
            head as it is.
    """

    logits_mib: int | None = None
    compiled: bool | None = None


def scored_hidden_states(model: Any, packed: PackedSequences) -> Tensor:
    """Run the transformer without its head and return the states that predict the scored tokens, (M, H)."""
    options: dict[str, Any] = {"input_ids": packed.input_ids, "use_cache": False}
    # A single sequence goes through any model as it is.
    if len(packed.segments.boundaries) > 2:
        # No cache: with one, transformers attends across packed sequences.
        options["position_ids"] = packed.position_ids
        if model.config._attn_implementation == SEGMENT_ATTENTION:
            # transformers takes a mask of four dimensions as it is, and nobody reads this one: without it,
            # transformers would build a dense L x L mask from the positions.
            no_mask = torch.empty(1, 1, 1, 0, device=packed.input_ids.device)
            options |= {"packed_row": PackedRow(packed.segments), "attention_mask": no_mask}
    return model.base_model(**options).last_hidden_state[0, packed.predictors]


def log_probs_of(
    model: Any,
    packed: PackedSequences,
    temperature: float = 1.0,
    head: HeadOptions = HeadOptions(),
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of the scored tokens and, if asked for, the entropies there, (M,) each, nats."""
    hidden = scored_hidden_states(model, packed)  # (M, H)
    return head_log_probs(model, hidden, packed.targets, temperature, head, with_entropy)


def states_and_log_probs(
    model: Any, packed: PackedSequences, temperature: float, head: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Return the states that predict the scored tokens, (M, H), and the tokens' log-probs, (M,), nats."""
    hidden = scored_hidden_states(model, packed)
    return hidden, head_log_probs(model, hidden, packed.targets, temperature, head)[0]


def sequence_log_probs(model: Any, token_ids: list[int], temperature: float = 1.0) -> Tensor:
    """Return log-probs of a sequence's tokens but the first, (len(token_ids) - 1,), nats, no gradient."""
    sequence = ScoredSequence([], token_ids, [False] + [True] * (len(token_ids) - 1))
    with torch.no_grad():
        packed = PackedSequences.from_sequences([sequence], device=next(model.parameters()).device)
        return log_probs_of(model, packed, temperature)[0]


def head_log_probs(
    model: Any,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    options: HeadOptions,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of the targets and, if asked for, entropies, (M,) each, from hidden states (M, H)."""

    def log_probs(head: Head, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_log_probs(
            hidden, head, targets, options.logits_mib, bool(options.compiled), with_entropy
        )

    return ModelHead(model, temperature).run(log_probs, hidden)


class ModelHead(NamedTuple):
    """The language-model head of a model, at a temperature."""

    model: Any
    temperature: float

    def module(self) -> nn.Linear:
        """Return the linear layer.

        Raises:
            InputError: If the head is anything else.
        """
        module = self.model.get_output_embeddings()
        if not isinstance(module, nn.Linear):
            raise InputError(
                f"The language-model head of {type(self.model).__name__} must be a linear layer, but is a "
                f"{type(module).__name__}. Use a model whose head is not wrapped or quantised."
            )
        return module

    def scale(self) -> LogitScale:
        """Return what turns the layer's output into logits."""
        return logit_scale(self.model, self.temperature)

    def run(self, function: Callable[..., Any], *hidden: Tensor) -> Any:
        """Return `function(head, *hidden)`, computed as the forward of the model's head.

        Calling the module, rather than reading its weight, lets whatever shards the weight (ZeRO-3, FSDP2)
        gather it before, and again before the backward pass: once each, however many blocks are computed.
        ZeRO-3 frees it after the backward only if a tensor that gets a gradient is among `hidden`.
        """
        module, scale = self.module(), self.scale()

        def forward(*hidden: Tensor) -> Any:
            return function(Head(module.weight, module.bias, scale), *hidden)

        module.forward = forward  # type: ignore[method-assign, assignment]
        try:
            return module(*hidden)
        finally:
            del module.forward


def head_divergence(
    student: ModelHead,
    student_hidden: Tensor,
    teacher: ModelHead,
    teacher_hidden: Tensor,
    divergence: Divergence,
    exchanged: tuple[int, int] | None,
    options: HeadOptions,
) -> Tensor:
    """Return the divergence of the student's next-token distributions from the teacher's, (M,), nats.

    As the loss of distillation the student is trained; in an RLT reward with the exact KL nobody is.

    Args:
        student: The student's head; it may be the teacher's too.
        student_hidden: The student's states before M tokens, (M, H_S).
        teacher: The teacher's head, which gets no gradient.
        teacher_hidden: The teacher's states before the same tokens, (M, H_T).
        divergence: Which divergence.
        exchanged: Two words that change places in the teacher's distribution, such as the first tokens of
            the two models' closing tags.
        options: How the heads are computed.
    """

    def with_student(student_head: Head, student_hidden: Tensor) -> Tensor:
        def with_teacher(teacher_head: Head, teacher_hidden: Tensor, student_hidden: Tensor) -> Tensor:
            sides = student_hidden, student_head, teacher_hidden, teacher_head
            return linear_divergence(
                *sides, divergence, exchanged, options.logits_mib, bool(options.compiled)
            )

        if teacher.module() is not student.module():
            return teacher.run(with_teacher, teacher_hidden, student_hidden)
        # One module computes one forward at a time, and its weight is there already.
        return with_teacher(student_head._replace(scale=teacher.scale()), teacher_hidden, student_hidden)

    return student.run(with_student, student_hidden)


def logit_scale(model: Any, temperature: float) -> LogitScale:
    """Return what the architecture does to its logits, and the temperature that divides them afterwards."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return LogitScale(temperature, scale or 1 / (divisor or 1), cap)


def ask(run: Callable[..., Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(model, *arguments)`, called through `run`; the result need not be a tensor.

    The hooks of ZeRO-3 look for tensors in what a forward returns, and fail on a plain string or function.
    """
    return run(lambda model: (function(model, *arguments),))[0]


def computing_dtype(model: Any) -> torch.dtype:
    """Return the type in which a model's layers multiply, with regard to autocast."""
    parameter = next(model.parameters())
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
