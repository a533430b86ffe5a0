"""How a transformers model runs a packed row, and how its head turns hidden states into log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlt_lightning.models.attention import SEGMENT_ATTENTION
from rlt_lightning.numerics.head import LogitScale
from rlt_lightning.numerics.kl import linear_exact_kl
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.types import InputError


@dataclass(frozen=True)
class HeadOptions:
    """How log-probs are computed from hidden states; no choice changes a result.

    Args:
        logits_mib: Memory for logits at a time, MiB; None: 8 on a CPU, else 512.
        compiled: Fuse the head's arithmetic with torch.compile.
    """

    logits_mib: int | None = None
    compiled: bool = False


def scored_hidden_states(model: Any, packed: PackedSequences) -> Tensor:
    """Run the transformer without its head; return the states that predict the scored tokens, (M, H)."""
    options: dict[str, Any] = {"input_ids": packed.input_ids, "use_cache": False}
    if len(packed.segments.boundaries) > 2:  # a single sequence goes through any model as it is
        # No cache: with one, transformers attends across packed sequences.
        options["position_ids"] = packed.position_ids
        if model.config._attn_implementation == SEGMENT_ATTENTION:
            # transformers leaves a mask of four dimensions alone, and nobody reads this one: without it, a
            # dense L x L mask would be made of the positions.
            no_mask = torch.empty(1, 1, 1, 0, device=packed.input_ids.device)
            options |= {"segments": packed.segments, "attention_mask": no_mask}
    return model.base_model(**options).last_hidden_state[0, packed.predictors]


def log_probs_of(
    model: Any,
    packed: PackedSequences,
    temperature: float = 1.0,
    head: HeadOptions = HeadOptions(),
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the scored tokens and, if asked for, the entropies behind them, (M,) each, nats."""
    hidden = scored_hidden_states(model, packed)  # (M, H)
    return head_log_probs(model, hidden, packed.targets, temperature, head, with_entropy)


def states_and_log_probs(
    model: Any, packed: PackedSequences, temperature: float, head: HeadOptions
) -> tuple[Tensor, Tensor]:
    """The states that predict the scored tokens, (M, H), and their log-probs, (M,), nats."""
    hidden = scored_hidden_states(model, packed)
    return hidden, head_log_probs(model, hidden, packed.targets, temperature, head)[0]


def sequence_log_probs(model: Any, token_ids: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs of one sequence's tokens but the first, (len(token_ids) - 1,), nats, without gradient."""
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
    """Log-probs of the targets and, if asked for, entropies, (M,) each, from hidden states (M, H)."""
    scale = logit_scale(model, temperature)

    def function(weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        block_options = options.logits_mib, options.compiled, with_entropy
        return linear_log_probs(hidden, weight, bias, targets, scale, *block_options)

    return through_head(model, function, hidden)


def head_exact_kl(
    teacher: Any,
    teacher_hidden: Tensor,
    teacher_temperature: float,
    student: Any,
    student_hidden: Tensor,
    student_temperature: float,
    options: HeadOptions,
) -> Tensor:
    """KL of two models' next-token distributions over the whole vocabulary, (M,), from hidden states."""
    scales = logit_scale(teacher, teacher_temperature), logit_scale(student, student_temperature)

    def compare(weight: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
        def with_student(
            student_weight: Tensor, student_bias: Tensor | None, student_hidden: Tensor
        ) -> Tensor:
            own = student_hidden, student_weight, student_bias
            return linear_exact_kl(hidden, weight, bias, *own, *scales, options.logits_mib)

        return through_head(student, with_student, student_hidden)

    return through_head(teacher, compare, teacher_hidden)


def through_head(model: Any, function: Callable[..., Any], hidden: Tensor) -> Any:
    """Run `function(weight, bias, hidden)` as the forward of the model's language-model head.

    Calling the module, rather than reading its weight, lets whatever shards the weight (ZeRO-3, FSDP2) gather
    it before, and again before the backward pass: one gathering each, however many blocks are computed.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"The language-model head of {type(model).__name__} must be a linear layer, but is a "
            f"{type(head).__name__}. Use a model whose head is not wrapped or quantised."
        )
    head.forward = lambda hidden: function(head.weight, head.bias, hidden)  # type: ignore[method-assign, assignment]
    try:
        return head(hidden)
    finally:
        del head.forward


def logit_scale(model: Any, temperature: float) -> LogitScale:
    """What the architecture does to its logits before they are divided by the temperature."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return LogitScale(temperature, scale or 1 / (divisor or 1), cap)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
