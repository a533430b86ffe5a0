"""Run packed rows through a transformers model, check that it does so correctly, compute log-probs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from rlt_lightning.models.attention import (
    SEGMENT_ATTENTION,
    PackedRow,
    get_attention,
    set_attention,
    supports_sdpa,
)
from rlt_lightning.numerics.divergence import Divergence, linear_divergence
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.numerics.packing import Layout, PackedSequences, ScoredSequence
from rlt_lightning.types import InputError, first_line

# Names of a layer's probabilities of dropout, which its forward may read, and of noise on its input.
NOISE = re.compile("dropout|layerdrop|input_jitter")
# Names in a configuration of how many tokens a layer attends to.
LIMITS = ("sliding_window", "attention_chunk_size", "index_topk", "keep_window_size")
FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, KeyError)


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
        if get_attention(model) == SEGMENT_ATTENTION:
            # transformers takes a mask of four dimensions as it is, and nobody reads this one: without it,
            # transformers would build a dense L x L mask from the positions.
            no_mask = torch.empty(1, 1, 1, 0, device=packed.input_ids.device)
            options |= {"packed_row": PackedRow(packed.segments), "attention_mask": no_mask}
    base = model.base_model
    if base is model:  # Llama 4's class gives its base another name than it has
        base = next(part for part in model.children() if part is not model.get_output_embeddings())
    hidden = base(**options).last_hidden_state[0, packed.predictors]
    # ModernBERT has further layers before the linear one, under the name that this has elsewhere.
    head = getattr(model, "lm_head", None)
    return hidden if head in (None, model.get_output_embeddings()) else head(hidden)


def compute_log_probs(
    model: Any,
    packed: PackedSequences,
    temperature: float = 1.0,
    head: HeadOptions = HeadOptions(),
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of the scored tokens and, if asked for, the entropies there, (M,) each, nats."""
    hidden = scored_hidden_states(model, packed)  # (M, H)
    return head_log_probs(model, hidden, packed.targets, temperature, head, with_entropy)


def sequence_log_probs(model: Any, token_ids: list[int], temperature: float = 1.0) -> Tensor:
    """Return log-probs of a sequence's tokens but the first, (len(token_ids) - 1,), nats, no gradient."""
    sequence = ScoredSequence([], token_ids, [False] + [True] * (len(token_ids) - 1))
    with torch.no_grad():
        packed = PackedSequences.from_sequences([sequence], device=next(model.parameters()).device)
        return compute_log_probs(model, packed, temperature)[0]


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
    """The language-model head of a model, at a temperature; see `LogitScale` for `exchanged`."""

    model: Any
    temperature: float
    exchanged: tuple[int, int] | None = None

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
        """Return the function from the layer's output to logits."""
        return logit_scale(self.model, self.temperature)._replace(exchanged=self.exchanged)

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
        options: How the heads are computed.
    """

    def with_student(student_head: Head, student_hidden: Tensor) -> Tensor:
        def with_teacher(teacher_head: Head, teacher_hidden: Tensor, student_hidden: Tensor) -> Tensor:
            sides = student_hidden, student_head, teacher_hidden, teacher_head
            return linear_divergence(*sides, divergence, options.logits_mib, bool(options.compiled))

        if teacher.module() is not student.module():
            return teacher.run(with_teacher, teacher_hidden, student_hidden)
        # One module computes one forward at a time, and its weight is there already.
        return with_teacher(student_head._replace(scale=teacher.scale()), teacher_hidden, student_hidden)

    return student.run(with_student, student_hidden)


def logit_scale(model: Any, temperature: float) -> LogitScale:
    """Return the architecture's change of its logits, and the temperature that divides them afterwards."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or getattr(
        config, "lm_head_multiplier", None
    )  # Cohere, Falcon-H1
    divisor = getattr(config, "logits_scaling", None)  # Granite
    names = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"  # Gemma 2, …, xLSTM
    caps = (getattr(config, name, None) for name in names)
    return LogitScale(temperature, scale or 1 / (divisor or 1), next(filter(None, caps), None))


def call_model(run: Callable[..., Any], function: Callable[..., Any], *arguments: Any) -> Any:
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
    """Switch off random numbers of training mode: dropout, and jitter of a layer's input."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and NOISE.search(name):
                setattr(module, name, 0.0)


# The check of a layout at the start of a run


def verify_layout(run: Callable[..., Any], name: str, wanted: Layout) -> Layout:
    """Return a layout in which this model's packed log-probs equal those without packing, one by one.

    Only our attention shares a row between sequences. "single", by the model's attention, works for every
    model: if the wanted layout does not, this warns and returns "single".

    Args:
        run: Calls the model: run(function, *arguments) is function(model, *arguments).
        name: The user's name for the model.
        wanted: The layout to try first.

    Raises:
        InputError: If no layout is right, or "shared_prefix" was asked for and is wrong, or see
            `require_fixed_positions` and `layout_fault`.
    """
    call_model(run, require_fixed_positions)
    architecture, attention = run(lambda model: (type(model).__name__, get_attention(model)))
    candidates: list[tuple[str, Layout]] = [(attention, wanted)]
    if wanted != "shared_prefix":
        theirs = [attention] if attention != SEGMENT_ATTENTION else []
        theirs += call_model(run, list_own_attentions)
        candidates += [(own, "single") for own in dict.fromkeys(theirs)]
    faults: list[str] = []
    for attention, layout in candidates:
        call_model(run, set_attention, attention)
        fault = call_model(run, known_fault, layout) or call_model(run, layout_fault, layout)
        if fault is None:
            if faults:
                rank_zero_warn(
                    f"'{name}' ({architecture}) runs with layout '{layout}' and attention '{attention}', "
                    f"which is slower: with '{wanted}' {faults[0]}."
                )
            return layout
        faults.append(fault)
    raise InputError(
        f"The log-probs of '{name}' ({architecture}) with layout '{layout}' must equal its own, but "
        f"{faults[-1]}. Set model.layout to auto, or use a Llama, Qwen2 or Qwen3 model."
    )


def list_own_attentions(model: Any) -> list[str]:
    """Return the names of the model's attentions that compute any mask, the fastest first."""
    return ["sdpa", "eager"] if supports_sdpa(type(model)) else ["eager"]


def known_fault(model: Any, layout: Layout) -> str | None:
    """Return a known fault of a layout that no short sequence shows, or None."""
    if layout == "single":
        return None
    if get_attention(model) != SEGMENT_ATTENTION:
        return f"its attention ('{get_attention(model)}') would mix sequences of a row"
    return find_position_fault(model)


def find_longest_reach(config: Any, most: int = 2304) -> int:
    """Return the most tokens, up to `most`, that a layer attends to where that is limited; 0 if it is not."""
    limits = (getattr(config, name, None) or 0 for name in LIMITS)
    return max((limit for limit in limits if limit <= most), default=0)


def find_position_fault(model: Any) -> str | None:
    """Return why a sequence's neighbours in a row or a batch would change its positions, or None."""
    config = model.config.get_text_config()
    if has_longrope(config):
        return "the longest sequence would decide how positions of the others are turned"
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4
        return "what stands before a sequence would count in the temperature of its attention"
    return None


def require_fixed_positions(model: Any) -> None:
    """Refuse a model whose scores depend on which texts it ran before.

    Raises:
        InputError: If it has dynamic scaling: transformers keeps the factors of the longest text so far.
    """
    config = model.config.get_text_config()
    # Hunyuan calls a fixed factor, alpha, dynamic.
    if any(r.get("rope_type") == "dynamic" and not r.get("alpha") for r in list_rope_parameters(config)):
        raise InputError(
            f"Positions must not depend on which texts ran before, but those of {type(model).__name__} do by "
            "rope_type dynamic. Set it to default in the model's config.json, which changes nothing up to "
            f"{config.max_position_embeddings} tokens, or use another model."
        )


def has_longrope(config: Any) -> bool:
    """Return whether a long text turns all its positions by other factors than a short one."""
    return any(rope.get("rope_type") == "longrope" for rope in list_rope_parameters(config))


def list_rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return how positions are turned; an entry for each kind of layers, where a model has several."""
    rope = getattr(config, "rope_parameters", None) or {}
    return list(rope.values()) if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]


@torch.no_grad()
def layout_fault(model: Any, layout: Layout) -> str | None:
    """Compare log-probs of random tokens in this layout and one by one; return the fault, or None.

    Raises:
        InputError: If the model's log-probs are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    num_words = min(1000, model.config.get_text_config().vocab_size)
    device = next(model.parameters()).device
    prefix, *rests = (torch.randint(num_words, (n,), generator=generator).tolist() for n in (5, 7, 4, 9))
    scored = [len(prefix) + len(rest) - 1 for rest in rests]  # all but the first
    sequences = [
        ScoredSequence(prefix, rest, [False] + [True] * last)
        for rest, last in zip(rests, scored, strict=True)
    ]
    attention = get_attention(model)

    def score_plainly(token_ids: list[int], last: int) -> Tensor:
        """Return the log-probs of the last tokens by transformers' plainest attention."""
        ids = torch.tensor([token_ids], device=device)
        set_attention(model, "eager")
        try:
            logits = model(input_ids=ids, use_cache=False).logits[0, -last - 1 : -1].float()
        finally:
            set_attention(model, attention)
        return logits.log_softmax(-1).gather(1, ids[0, -last:, None]).squeeze(1)

    apart = ((0,), (1,), (2,))
    together = apart if layout == "packed" else ((0, 1), (2,))

    def ours(*rows: tuple[tuple[int, ...], ...], of: list[ScoredSequence] = sequences) -> Tensor:
        packed = [PackedSequences.from_sequences(of, families, device) for families in rows]
        return torch.cat([compute_log_probs(model, row)[0] for row in packed])

    try:
        theirs = [score_plainly(prefix + rest, last) for rest, last in zip(rests, scored, strict=True)]
        again = score_plainly(prefix + rests[0], scored[0])
        changed = score_plainly([*prefix, *rests[0][:-1], (rests[0][-1] + 1) % num_words], scored[0])
        singly = ours(*[(family,) for family in apart])
        packed = singly if layout == "single" else ours(together)
        # The first sequence has other tokens; the rows are equally long, so nothing is rounded differently.
        others = [sequences[0]._replace(rest=[(token + 1) % num_words for token in rests[0]]), *sequences[1:]]
        beside_others = packed if layout == "single" else ours(together, of=others)
    except FORWARD_ERRORS as error:
        # The model takes no positions, segments or 4-D mask, or lacks something.
        return f"its forward fails ({first_line(error)})"
    if not torch.cat(theirs).isfinite().all():
        raise InputError(
            f"The log-probs of '{model.config.name_or_path}' must be finite, but are not: its weights hold "
            f"NaN or infinity, or overflow in {computing_dtype(model)}. Load others, or set another dtype."
        )
    # Of log-probs that ought to be equal.
    differences = {
        "again": theirs[0] - again,
        "later": theirs[0][:-1] - changed[:-1],
        "plain": singly - torch.cat(theirs),
        "neighbour": (packed - beside_others)[len(theirs[0]) :],
        "packed": packed - singly,
    }
    return find_difference(differences, exact=computing_dtype(model) in (torch.float32, torch.float64))


def find_difference(differences: dict[str, Tensor], exact: bool) -> str | None:
    """Return the first difference that is no rounding, or None.

    In half precision single log-probs differ by rounding, most where the model's head rounds, so means
    are compared. How much a model rounds shows in `plain`, whose two sides compute the same in two ways;
    `packed` may be rounded as much, up to 0.1 nats: a wrong prefix shows only there. Rounding does not show
    in `neighbour`: only a leak between sequences changes it.
    """
    size = torch.max if exact else torch.mean
    sizes = {name: size(d.abs()).item() if len(d) else 0.0 for name, d in differences.items()}
    faults = {  # the bound in half precision, nats, and the fault
        "again": (
            0.01,
            "its own change by {:.2g} nats from one forward to the next: it draws random numbers in training",
        ),
        "later": (0.05, "its own change by {:.2g} nats with a token that comes later"),
        "plain": (0.2, "they differ by {:.2g} nats even one by one"),
        "neighbour": (0.005, "they change by {:.2g} nats with the tokens of another sequence"),
        "packed": (min(max(0.03, 2 * sizes["plain"]), 0.1), "they differ by {:.2g} nats"),
    }
    for name, (bound, text) in faults.items():
        if not sizes[name] <= (1e-3 if exact else bound):  # NaN is a fault too
            return text.format(sizes[name])
    return None
