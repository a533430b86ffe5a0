"""The check of a model's layout at the start finds wrong attention, and takes no rounding for a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from tiny import StrictEntry
from torch import Tensor
from trainers import bare_trainer

from rlt_lightning.datamodules import TeacherSFTData
from rlt_lightning.models.load import load_model
from rlt_lightning.models.packed import find_difference, verify_layout
from rlt_lightning.modules import SFTModule, policy
from rlt_lightning.numerics.attention import Segments, looped_attention
from rlt_lightning.types import InputError


@pytest.mark.full
def test_the_check_has_the_runs_precision(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def watched(run: Any, *arguments: Any) -> str:
        seen.append(run(lambda model: model.lm_head(torch.zeros(1, model.config.hidden_size)).dtype))
        return verify_layout(run, *arguments)

    monkeypatch.setattr(policy, "verify_layout", watched)
    data = TeacherSFTData(tokenizer=tiny_model, num_embedded_rows=2, prompts_per_step=2)
    for precision, expected in (("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)):
        bare_trainer(tmp_path, precision=precision).fit(SFTModule(pretrained=tiny_model), datamodule=data)
        assert seen.pop() == expected


def test_weights_with_nan_are_named(tiny_model: str):
    model = load_model(tiny_model)
    model.lm_head.weight.data[3, 3] = torch.nan
    with pytest.raises(InputError, match=r"must be finite, but are not: its weights hold NaN or infinity"):
        verify_layout(StrictEntry(model), "tiny", "shared_prefix")


def fault(exact: bool = False, **sizes: float) -> str | None:
    zeros = dict.fromkeys(("again", "later", "plain", "neighbour", "packed"), 0.0)
    return find_difference({name: torch.full((9,), n) for name, n in (zeros | sizes).items()}, exact)


def test_rounding_of_a_deep_model_is_no_fault_and_a_small_leak_is():
    # 28 layers in bf16: ours and the model's own differ by 0.06 nats already where nothing is packed.
    assert fault(plain=0.06, packed=0.05) is None
    assert fault(plain=0.01, packed=0.05) == "they differ by 0.05 nats"
    leak = fault(plain=0.06, packed=0.05, neighbour=0.01)
    assert leak == "they change by 0.01 nats with the tokens of another sequence"
    assert fault(plain=0.3) == "they differ by 0.3 nats even one by one"
    # However much a model rounds, 0.3 nats are a wrong prefix.
    assert fault(plain=0.19, packed=0.3) == "they differ by 0.3 nats"
    assert fault(plain=0.19, packed=0.09) is None
    assert fault(exact=True, packed=0.002) == "they differ by 0.002 nats"


def leaking(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, *_: Any) -> Tensor:
    """Attends to the sequence before."""
    whole = Segments((0, segments.boundaries[-1]))
    return looped_attention(query, key, value, whole, scale)


def forgetful(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, *_: Any) -> Tensor:
    """Does not attend to the prefix."""
    return looped_attention(query, key, value, Segments(segments.boundaries), scale)


def lopsided(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, *_: Any) -> Tensor:
    """Gives prefix and continuation equal weights."""
    ours = looped_attention(query, key, value, segments, scale)
    return ours.lerp(forgetful(query, key, value, segments, scale), 0.5)


@pytest.mark.parametrize("wrong", [leaking, forgetful, lopsided])
@pytest.mark.parametrize("name", ["miniature", full("smollm2-135m")])
def test_wrong_attention_is_found_in_half_precision(wrong: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    model = StrictEntry(load_model(name, "bfloat16"))
    assert verify_layout(model, name, "shared_prefix") == "shared_prefix"
    monkeypatch.setattr("rlt_lightning.models.attention.segment_attention", wrong)
    with pytest.raises(InputError, match="with layout 'shared_prefix' must equal its own"):
        verify_layout(model, name, "shared_prefix")
