"""Check at the start of a run which layout of packed rows a model computes correctly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from rlt_lightning.models.announce import announce_check
from rlt_lightning.models.attention import SEGMENT_ATTENTION
from rlt_lightning.models.packed import ask, computing_dtype, log_probs_of
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


def verified_layout(
    run: Callable[..., Any], name: str, wanted: Layout, attention_chosen: bool = False
) -> Layout:
    """Return the best layout in which this model's packed log-probs equal its own, one by one.

    It warns if that is not the wanted layout.

    Args:
        run: Calls the model: run(function, *arguments) is function(model, *arguments).
        name: The user's name for the model.
        wanted: The layout to try first.
        attention_chosen: Whether the user chose the attn_implementation; there is then no warning if it
            cannot share prefixes.

    Raises:
        InputError: If no layout is right, or "shared_prefix" was asked for and is wrong.
    """
    candidates = FALLBACKS[wanted]
    architecture, attention = run(lambda model: (type(model).__name__, model.config._attn_implementation))
    if attention != SEGMENT_ATTENTION and attention_chosen and wanted == "auto":
        # The user's own choice rules out shared prefixes: nothing to warn of.
        candidates = candidates[1:]
    ask(run, lambda model: announce_check(name, model))
    faults: list[str] = []
    for layout in candidates:
        fault = ask(run, known_fault, layout) or ask(run, layout_fault, layout)
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
    """Return a known fault of a layout that no short sequence shows, or None."""
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
    """Compare log-probs in this layout with the model's own on random tokens; return the fault, or None."""
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

    def ours(*rows: tuple[tuple[int, ...], ...], of: list[ScoredSequence] = sequences) -> Tensor:
        packed = [PackedSequences.from_sequences(of, families, device) for families in rows]
        return torch.cat([log_probs_of(model, row)[0] for row in packed])

    try:
        theirs = [own(sequence.prefix + sequence.rest) for sequence in sequences]
        changed = own([*sequences[0].prefix, *sequences[0].rest[:-1], (rests[0][-1] + 1) % num_words])
        singly = ours(*[(family,) for family in apart])
        packed = singly if layout == "single" else ours(together)
        # The first sequence has other tokens; the rows are equally long, so nothing is rounded differently.
        others = [sequences[0]._replace(rest=[(token + 1) % num_words for token in rests[0]]), *sequences[1:]]
        beside_others = packed if layout == "single" else ours(together, of=others)
    except FORWARD_ERRORS as error:
        # The model takes no positions, segments or 4-D mask, or lacks something.
        return f"its forward fails ({str(error).splitlines()[0][:120]})"
    differences = Differences(
        later=theirs[0][:-1] - changed[:-1],
        own=singly - torch.cat(theirs),
        neighbour=(packed - beside_others)[len(theirs[0]) :],
        packed=packed - singly,
    )
    return differences.fault(exact=computing_dtype(model) in (torch.float32, torch.float64))


class Differences(NamedTuple):
    """Differences of log-probs that ought to be equal, nats."""

    later: Tensor  # of the model's own, with another last token
    own: Tensor  # between ours one by one and the model's own
    neighbour: Tensor  # of ours in a row, with other tokens in the sequence before
    packed: Tensor  # between ours in a row and one by one

    def fault(self, exact: bool) -> str | None:
        """Return the first difference that is no rounding, or None.

        In half precision single log-probs differ by rounding, most where the model's own head rounds, so
        means are compared. How much a model rounds shows in `own`, whose two sides compute the same in two
        ways; `packed` may be rounded as much, up to 0.1 nats: a wrong prefix shows only there. Rounding does
        not show in `neighbour`: only a leak between sequences changes it.
        """
        size = torch.max if exact else torch.mean
        sizes = [size(difference.abs()).item() if len(difference) else 0.0 for difference in self]
        bounds = [1e-3] * 4 if exact else [0.05, 0.2, 0.005, min(max(0.03, 2 * sizes[1]), 0.1)]  # nats
        faults = (
            "its own change by {:.2g} nats with a token that comes later",
            "they differ by {:.2g} nats even one by one",
            "they change by {:.2g} nats with the tokens of another sequence",
            "they differ by {:.2g} nats",
        )
        for found, bound, text in zip(sizes, bounds, faults, strict=True):
            if not found <= bound:  # NaN is a fault too
                return text.format(found)
        return None
