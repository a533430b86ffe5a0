"""Packed sequences against one sequence at a time, through tiny random models of three families."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlt_lightning.numerics import PackedSequences, from_padded, head_log_probs, pack_by_tokens, to_padded

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SEQUENCES = [[5, 9, 3, 60, 2], [7], [1, 1, 8, 30, 31, 32, 33], [4, 4]]
SCORE_MASKS = [
    [False, False, True, True, True],
    [False],
    [False, True, False, True, True, False, True],
    [False, True],
]


def tiny_model(family: str, gradient_checkpointing: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    model = model_class(config).train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def packed_log_probs(model: PreTrainedModel, sequences: list, score_masks: list) -> Tensor:
    packed = PackedSequences.from_lists(sequences, score_masks)
    hidden = model.model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
    ).last_hidden_state[0]
    return head_log_probs(hidden[packed.predictors], model.lm_head, packed.targets, 0.7, chunk_size=4)[0]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family, gradient_checkpointing):
    model = tiny_model(family, gradient_checkpointing)
    weights = torch.randn(sum(map(sum, SCORE_MASKS)))

    def gradients(log_probs: Tensor) -> Tensor:
        model.zero_grad()
        (log_probs @ weights).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    packed = packed_log_probs(model, SEQUENCES, SCORE_MASKS)
    packed_gradients = gradients(packed)
    one_by_one = []
    for sequence, score_mask in zip(SEQUENCES, SCORE_MASKS, strict=True):
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0] / 0.7
        log_probs = logits.log_softmax(dim=1)
        one_by_one += [log_probs[t - 1, sequence[t]] for t, scored in enumerate(score_mask) if scored]
    torch.testing.assert_close(packed, torch.stack(one_by_one), rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_gradients, gradients(torch.stack(one_by_one)), rtol=1e-5, atol=1e-5)


def test_packed_row_by_hand():
    packed = PackedSequences.from_lists([[10, 11, 12], [20, 21]], [[False, True, True], [False, True]])
    assert packed.input_ids.tolist() == [[10, 11, 12, 20, 21]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.scored.tolist() == [1, 2, 4]
    assert packed.predictors.tolist() == [0, 1, 3]
    assert packed.targets.tolist() == [11, 12, 21]
    assert packed.sequence_of_scored.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("sequence", "score_mask", "message"),
    [
        ([1, 2], [True, True], "cannot be scored"),
        ([], [], "sequence 1 has 0 tokens"),
        ([1, 2], [False], "2 tokens and 1 mask values"),
    ],
)
def test_sequences_that_cannot_be_packed_are_named(sequence, score_mask, message):
    with pytest.raises(ValueError, match=message):
        PackedSequences.from_lists([[1, 2], sequence], [[False, True], score_mask])


def test_bins_by_hand():
    # Longest first: 20 stays alone, 6 opens a bin, 5 the next, 4 joins 6, 3 joins 5, 2 joins 5 + 3.
    assert pack_by_tokens([2, 3, 4, 5, 6, 20], max_tokens=10) == [[5], [4, 2], [3, 1, 0]]
    assert pack_by_tokens([], max_tokens=10) == []
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        pack_by_tokens([1], max_tokens=0)


def test_bins_hold_every_sequence_once_and_do_not_overflow():
    lengths = torch.randint(1, 60, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    bins = pack_by_tokens(lengths, max_tokens=50)
    assert sorted(index for members in bins for index in members) == list(range(100))
    for members in bins:
        assert len(members) == 1 or sum(lengths[index] for index in members) <= 50


def test_padding_and_back():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    padded, token_mask = to_padded(values, [1, 0, 3])
    assert padded.tolist() == [[1, 0, 0], [0, 0, 0], [2, 3, 4]]
    assert token_mask.tolist() == [[True, False, False], [False] * 3, [True] * 3]
    assert torch.equal(from_padded(padded, token_mask), values)
    (padded * torch.tensor([[1.0, 9, 9], [9, 9, 9], [2, 3, 4]])).sum().backward()
    assert values.grad.tolist() == [1, 2, 3, 4]


def test_padding_of_nothing_and_of_a_wrong_count():
    padded, token_mask = to_padded(torch.zeros(0), [0, 0])
    assert padded.shape == token_mask.shape == (2, 0)
    with pytest.raises(ValueError, match="must sum to the 3 values"):
        to_padded(torch.zeros(3), [1, 1])
