"""How a transformers model runs a packed row, and how its head turns hidden states into log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from rlt_lightning.attention import SEGMENT_ATTENTION
from rlt_lightning.numerics.kl import linear_exact_kl
from rlt_lightning.numerics.log_probs import LogitScale, linear_log_probs
from rlt_lightning.numerics.packing import Layout, PackedSequences, ScoredSequence
from rlt_lightning.types import InputError

# From best to worst. "auto" and "shared_prefix" need our attention, "packed" needs the architecture to see
# where sequences end, "single" works for every model.
FALLBACKS: dict[Layout, list[Layout]] = {
    "auto": ["auto", "packed", "single"],
    "shared_prefix": ["shared_prefix"],
    "packed": ["packed", "single"],
    "single": ["single"],
}


FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, KeyError)


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


def verified_layout(
    run: Callable[..., Any], name: str, wanted: Layout, attention_chosen: bool = False
) -> Layout:
    """Return the best layout in which this model's packed log-probs equal its own, one by one.

    Warns where that is not the one that was wanted.

    Args:
        run: The way into the model: run(function, *arguments) is function(model, *arguments).
        name: How the user calls it.
        wanted: The layout to begin with.
        attention_chosen: Whether the user chose its attn_implementation; one that cannot share prefixes is
            then no cause for a warning.

    Raises:
        InputError: If none is right, or "shared_prefix" was asked for and is not.
    """
    candidates = FALLBACKS[wanted]
    architecture, attention = run(lambda model: (type(model).__name__, model.config._attn_implementation))
    if attention != SEGMENT_ATTENTION and attention_chosen and wanted == "auto":
        candidates = candidates[1:]  # nothing is lost that was asked for
    faults: list[str] = []
    for layout in candidates:
        fault = run(known_fault, layout) or run(layout_fault, layout)
        if fault is None:
            if faults:
                rank_zero_warn(
                    f"'{name}' ({architecture}) runs with layout '{layout}', which is slower: with "
                    f"'{candidates[0]}' {faults[0]}."
                )
            return layout
        faults.append(fault)
    raise InputError(
        f"The log-probs of '{name}' ({architecture}) with layout '{candidates[-1]}' must equal its "
        f"own, but {faults[-1]}. "
        + ("Use model.layout auto." if wanted == "shared_prefix" else "Use a Llama, Qwen2 or Qwen3 model.")
    )


def known_fault(model: Any, layout: Layout) -> str | None:
    """What is wrong with a layout that no short sequence shows; None if nothing is known."""
    config = model.config.get_text_config()
    if layout in ("auto", "shared_prefix") and model.config._attn_implementation != SEGMENT_ATTENTION:
        return f"its attention ('{model.config._attn_implementation}') does not share prefixes"
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    if layout != "single" and any(r.get("rope_type") in ("longrope", "dynamic") for r in by_layer):
        return "the longest sequence of a row would decide how positions of the others are turned"
    return None


@torch.no_grad()
def layout_fault(model: Any, layout: Layout) -> str | None:
    """Compare log-probs in this layout with the model's own, on random tokens; say what is wrong, if any."""
    generator = torch.Generator().manual_seed(0)
    num_words = min(1000, model.config.get_text_config().vocab_size)
    prefix, *rests = (torch.randint(num_words, (n,), generator=generator).tolist() for n in (5, 7, 4, 9))
    sequences = [ScoredSequence(prefix, rest, [False] + [True] * (4 + len(rest))) for rest in rests]
    device = next(model.parameters()).device

    def own(token_ids: list[int]) -> Tensor:
        ids = torch.tensor([token_ids], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)

    apart = ((0,), (1,), (2,))
    together = ((0, 1), (2,)) if layout in ("auto", "shared_prefix") else apart

    def ours(*rows: tuple[tuple[int, ...], ...]) -> Tensor:
        packed = [PackedSequences.from_sequences(sequences, families, device) for families in rows]
        return torch.cat([log_probs_of(model, row)[0] for row in packed])

    try:
        theirs = [own(sequence.prefix + sequence.rest) for sequence in sequences]
        changed = own([*sequences[0].prefix, *sequences[0].rest[:-1], (rests[0][-1] + 1) % num_words])
        singly = ours(*[(family,) for family in apart])
        packed = singly if layout == "single" else ours(together)
    except FORWARD_ERRORS as error:  # it takes no positions, segments or 4-D mask, or lacks something
        return f"its forward fails ({str(error).splitlines()[0][:120]})"
    # In half precision single log-probs differ by rounding, most where the head rounds; leaks show in means.
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    distance = torch.max if exact else torch.mean
    bounds = (1e-3, 1e-3, 1e-3) if exact else (0.05, 0.2, 0.03)  # nats
    differences = (
        (theirs[0][:-1] - changed[:-1], "its own change by {:.2g} nats with a token that comes later"),
        (singly - torch.cat(theirs), "they differ by {:.2g} nats even one by one"),
        (packed - singly, "they differ by {:.2g} nats"),
    )
    for (difference, fault), bound in zip(differences, bounds, strict=True):
        if not (size := distance(difference.abs()).item()) <= bound:  # NaN is a fault too
            return fault.format(size)
    return None
