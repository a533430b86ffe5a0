"""Small random models of many families are scored and sampled like a plain eager forward, or refused.

The first families differ most and run in `make test`; the others run in `make test-all`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from commands import ROOT
from families import FAMILIES, build
from sampling import sample_groups
from tiny import StrictEntry
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.packed import compute_log_probs, disable_dropout, verify_layout
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.types import InputError

KINDS = [
    "deepseek_v32",  # an indexer chooses keys
    "deepseek_v3",  # values are narrower than keys
    "seed_oss",  # dropout in functions
    "falcon_h1",  # attention beside a state, and a multiplier of the head
    "gemma4_text",  # windows, and layers with other heads
    "llama4_text",  # chunks, and a temperature of positions
    "phi3, longrope",  # a longer text turns all positions otherwise
    "minimax",  # a cache of its own
    "gemma2",  # scores with a cap, which transformers' sdpa may leave out
    "llama, dynamic",  # transformers turns its positions by the texts before
]
CASES = [*KINDS, *(full(name) for name in FAMILIES if name not in KINDS)]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts" / "models_page.py")
assert spec is not None
assert spec.loader is not None
models_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models_page)


def build_pair(name: str, folder: Path) -> tuple[Any, Any]:
    """Return the model as a run loads it, and transformers' plainest."""
    build(name, folder)
    attention = FAMILIES[name].reference
    return (
        load_model(str(folder)).train(),  # as in a run: what is random in training must be off
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval(),
    )


def draw_texts(*lengths: int) -> list[list[int]]:
    """Draw words of which none comes twice: Doge's layers choose among equal scores as rounding decides."""
    words = torch.randperm(490, generator=torch.Generator().manual_seed(3)) + 4
    return [text.tolist() for text in words[: sum(lengths)].split(lengths)]


def log_probs_by_eager(model: Any, token_ids: list[int], start: int) -> Tensor:
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    return logits.gather(1, ids[0, start:, None]).squeeze(1)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_family_is_scored_as_its_eager_forward(name: str, tmp_path: Path) -> None:
    layout = FAMILIES[name].layout
    model, plain = build_pair(name, tmp_path)
    disable_dropout(model)
    if layout == "refused":
        with pytest.raises(InputError, match=r"it draws random numbers in training|rope_type dynamic"):
            verify_layout(StrictEntry(model), name, "auto")
        return
    assert verify_layout(StrictEntry(model), name, "auto") == layout
    prefix, *rests = draw_texts(40, 90, 20, 33)
    sequences = [ScoredSequence(prefix, rest, [False] * 40 + [True] * len(rest)) for rest in rests]
    together = ((0, 1, 2),) if layout == "auto" else ((0,), (1,), (2,))
    rows = [((i,),) for i in range(3)] if layout == "single" else [together]
    packed = [PackedSequences.from_sequences(sequences, row, torch.device("cpu")) for row in rows]
    ours = torch.cat([compute_log_probs(model, row)[0] for row in packed])
    expected = torch.cat([log_probs_by_eager(plain, prefix + rest, 40) for rest in rests])
    torch.testing.assert_close(ours, expected, atol=3e-5, rtol=0)


def sample_greedily(model: Any, prompt: list[int], number: int) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens and their log-probs, each by a forward of all tokens before it."""
    ids, log_probs = list(prompt), []
    for _ in range(number):
        last = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        ids.append(int(last.argmax()))
        log_probs.append(float(last.max()))
    return ids[len(prompt) :], log_probs


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_family_is_sampled_as_its_eager_forward(name: str, tmp_path: Path, miniature: str) -> None:
    family = FAMILIES[name]
    model, plain = build_pair(name, tmp_path)
    tokenizer = load_tokenizer(miniature)
    tokenizer.decode = lambda *args, **options: ""  # the model has words that the tokenizer lacks
    engine = HFEngine()
    engine.start(model, tokenizer, tmp_path)
    # Padding beside short prompts; one prompt crosses what a layer sees at a time, one is longer.
    prompts = draw_texts(3, 20, 40, 20)
    asked: Any = (prompts, Sampling(0, max_completion_length=9), 2, "", [1, 2, 3, 4])
    if family.decoder == "refused":
        with pytest.raises(InputError, match="rope_type dynamic"):
            sample_groups(engine, *asked)
        return
    groups = sample_groups(engine, *asked)
    assert engine.decoder == family.decoder
    for prompt, group in zip(prompts, groups, strict=True):
        assert group[0].token_ids == group[1].token_ids
        tokens, log_probs = sample_greedily(plain, prompt, len(group[0].token_ids))
        assert group[0].token_ids == tokens
        assert group[0].log_probs == pytest.approx(log_probs, abs=family.tolerance)


@pytest.mark.parametrize("name", ["phi3, longrope", "minimax", "llama", "llama, dynamic"])
def test_the_page_has_a_familys_row(name: str) -> None:
    row, refused = models_page.describe(name)
    assert all(f"{line}\n" in models_page.PAGE.read_text() for line in [row, *refused])


@pytest.mark.full
def test_the_page_is_what_its_script_writes() -> None:
    assert models_page.PAGE.read_text() == models_page.write_page()
