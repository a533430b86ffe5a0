"""Packed rows: built as by hand; through tiny models of several families they equal single sequences."""

import types
from typing import Any

import pytest
import torch
from families import build
from tiny import StrictEntry
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlt_lightning.models.attention import SEGMENT_ATTENTION, PackedRow, packed_attention
from rlt_lightning.models.load import load_model
from rlt_lightning.models.packed import HeadOptions, compute_log_probs, verify_layout
from rlt_lightning.numerics.attention import Segments, SharedPrefix, looped_attention, segment_attention
from rlt_lightning.numerics.packing import (
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    micro_batches,
    split_to,
    to_padded,
)
from rlt_lightning.types import InputError

OWN = ("llama", "qwen2", "qwen3", "cohere", "mistral, windows", "gemma2")  # our attention is right for them
WINDOWS = ("mistral, windows", "gemma2")
LEAKING = (
    "bloom",  # its positions are no argument of the forward
    "mamba",  # its state runs from one sequence into the next
    "lfm2",  # convolutions over neighbouring tokens
)
PREFIX = [5, 9, 3, 60, 2]
SEQUENCES = [
    ScoredSequence(PREFIX, [7, 8, 1], [False, False, False, True, True] + [True] * 3),
    ScoredSequence([], [1, 1, 8, 30, 31, 32, 33], [False, True, False, True, True, False, True]),
    ScoredSequence(PREFIX, [7], [False, False, False, True, True, True]),
    ScoredSequence(PREFIX, [], [False, False, False, True, True]),
    ScoredSequence([], [6], [False]),
]
LAYOUTS = {
    "shared_prefix": [((0, 2, 3), (1,), (4,))],
    "packed": [((0,), (2,), (3,), (1,), (4,))],
    "single": [((i,),) for i in (0, 2, 3, 1, 4)],
}


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory):
    """A folder of a random model of every family; windows are shorter than sequences, and than a prefix."""
    folders = {}
    for family in (*OWN, *LEAKING):
        folders[family] = str(tmp_path_factory.mktemp("model"))
        build(family, folders[family], **({"sliding_window": 4} if family in WINDOWS else {}))
    return folders


def log_probs_in(model: PreTrainedModel, layout: str) -> Tensor:
    rows = [PackedSequences.from_sequences(SEQUENCES, families) for families in LAYOUTS[layout]]
    return torch.cat([compute_log_probs(model, row, 0.7, HeadOptions(1))[0] for row in rows])


def log_probs_one_by_one(model: PreTrainedModel) -> Tensor:
    found = []
    for prefix, rest, mask in (SEQUENCES[i] for i in (0, 2, 3, 1, 4)):
        tokens = prefix + rest
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] / 0.7
        log_probs = logits.log_softmax(dim=1)
        found += [log_probs[t - 1, tokens[t]] for t, is_scored in enumerate(mask) if is_scored]
    return torch.stack(found)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", OWN)
def test_every_layout_equals_one_by_one(family, layout, gradient_checkpointing, tiny_models):
    model = load_model(tiny_models[family], "float64").train()
    assert model.config._attn_implementation == SEGMENT_ATTENTION
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = log_probs_one_by_one(load_model(tiny_models[family], "float64", "eager").train())
    log_probs = log_probs_in(model, layout)
    rounding = 1e-5  # of rotations and norms, which transformers computes in fp32
    torch.testing.assert_close(log_probs, expected, atol=rounding, rtol=0)

    weights = torch.randn(len(expected), dtype=torch.float64)
    (log_probs @ weights).backward()
    slow = load_model(tiny_models[family], "float64", "eager").train()
    (log_probs_one_by_one(slow) @ weights).backward()
    for (name, ours), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= rounding * theirs.grad.norm(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", LEAKING)
def test_leaks_are_found_in_every_precision(family, dtype, tiny_models):
    model = StrictEntry(load_model(tiny_models[family], dtype))
    with pytest.warns(UserWarning, match=r"runs with layout 'single'"):
        assert verify_layout(model, family, "packed") == "single"


def test_positions_that_depend_on_the_longest_sequence_are_not_packed(tiny_models, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    factors = {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 4.0, 8.0] * 2}
    config = LlamaConfig.from_pretrained(tiny_models["llama"], rope_parameters=rope | factors)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"'single' .* which is slower: with 'auto' the longest sequence"):
        assert verify_layout(StrictEntry(load_model(str(tmp_path))), "long", "auto") == "single"


def test_attention_that_cannot_share_is_named_as_the_cause(tiny_models):
    model = load_model(tiny_models["llama"], attn_implementation="sdpa")
    with pytest.raises(InputError, match=r"\('sdpa'\) would mix sequences of a row. Set model.layout"):
        verify_layout(StrictEntry(model), "llama", "shared_prefix")


def test_logits_that_are_scaled_in_an_unknown_way_are_refused(tiny_models, monkeypatch):
    model = load_model(tiny_models["llama"])
    forward = type(model).forward

    def doubled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(type(model), "forward", doubled)
    with pytest.raises(InputError, match="with layout 'single' must equal its own"):
        verify_layout(StrictEntry(model), "llama", "auto")


def test_no_mask_of_the_whole_row_is_made(tiny_models, monkeypatch):
    model = load_model(tiny_models["qwen2"])
    seen = []
    layer = type(model.model.layers[0])
    forward = layer.forward

    def watched(self, *args, **kwargs):
        seen.append(kwargs["attention_mask"])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", watched)
    log_probs_in(model, "shared_prefix")
    assert [mask.numel() for mask in seen] == [0, 0, 0]


@pytest.mark.parametrize(
    ("window", "cap"), [(None, None), (4, None), (1, None), (9, None), (4, 0.5), (None, 0.5), (99, None)]
)
def test_attention_is_one_by_one_attention_in_value_and_gradient(window, cap):
    torch.manual_seed(0)
    segments = Segments((0, 5, 12, 15, 20, 30, 31, 40), (SharedPrefix(5, 12, 20), SharedPrefix(20, 30, 40)))
    shapes = [(heads, 40, 8) for heads in (6, 2, 2)]
    query, key, value = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes)
    expected = torch.zeros(6, 40, 8, dtype=torch.float64)
    prefix_of = {12: (5, 12), 15: (5, 12), 30: (20, 30), 31: (20, 30)}
    for start, end in [(0, 5), (5, 12), (12, 15), (15, 20), (20, 30), (30, 31), (31, 40)]:
        for head in range(6):
            for t in range(start, end):
                seen = [*range(*prefix_of.get(start, (0, 0))), *range(start, t + 1)]
                seen = seen if window is None else seen[-window:]
                scores = 0.3 * key[head // 3, seen] @ query[head, t]
                scores = scores if cap is None else cap * (scores / cap).tanh()
                expected[head, t] = scores.softmax(0) @ value[head // 3, seen]
    gradient = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), gradient)
    strided = [t.detach().mT.contiguous().mT.requires_grad_() for t in (query, key, value)]
    torch.testing.assert_close(segment_attention(*strided, segments, 0.3, window, cap), expected)
    for attention in (segment_attention, looped_attention):
        output = attention(query, key, value, segments, 0.3, window, cap)
        torch.testing.assert_close(output, expected)
        gradients = torch.autograd.grad(output, (query, key, value), gradient)
        torch.testing.assert_close(gradients, expected_gradients)


def test_a_window_that_nobody_tells_is_refused():
    layer: Any = torch.nn.Module()
    kinds = ["full_attention", "sliding_attention"]
    layer.config = types.SimpleNamespace(sliding_window=4, layer_types=kinds)
    states, row = torch.zeros(1, 1, 3, 8), PackedRow(Segments((0, 3)))
    layer.layer_idx = 0
    assert packed_attention(layer, states, states, states, None, packed_row=row)[0].shape == (1, 3, 1, 8)
    layer.layer_idx = 1
    with pytest.raises(ValueError, match="does not pass a layer's sliding window"):
        packed_attention(layer, states, states, states, None, packed_row=row)
    cache: Any = object()  # asked for nothing
    with pytest.raises(ValueError, match="knows neither windows nor soft caps"):
        packed_attention(layer, states, states, states, None, slots=cache, sliding_window=4)


def test_packed_row_by_hand():
    sequences = [
        ScoredSequence([10, 11], [12], [False, True, True]),
        ScoredSequence([], [20, 21], [False, True]),
        ScoredSequence([10, 11], [13, 14], [False, True, False, True]),
    ]
    packed = PackedSequences.from_sequences(sequences, ((0, 2), (1,)))
    assert packed.input_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 1]]
    assert packed.segments == Segments((0, 2, 3, 5, 7), (SharedPrefix(0, 2, 5),))
    assert packed.predictors.tolist() == [0, 1, 0, 3, 5]
    assert packed.targets.tolist() == [11, 12, 11, 14, 21]
    plain = PackedSequences.from_sequences(sequences[:2])
    assert plain.input_ids.tolist() == [[10, 11, 12, 20, 21]]
    assert plain.segments == Segments((0, 3, 5))


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (ScoredSequence([], [1, 2], [True, True]), "cannot be scored"),
        (ScoredSequence([], [], []), "sequence 1 has 0 tokens"),
        (ScoredSequence([1], [2], [False]), "2 tokens and 1 mask values"),
    ],
)
def test_sequences_that_cannot_be_packed_are_named(sequence, message):
    with pytest.raises(ValueError, match=message):
        PackedSequences.from_sequences([ScoredSequence([], [1, 2], [False, True]), sequence])
    other = ScoredSequence([3], [2], [False, True])
    with pytest.raises(ValueError, match="must share their prefix"):
        PackedSequences.from_sequences([other, ScoredSequence([1], [2], [False, True])], ((0, 1),))


def test_rows_by_hand():
    # Longest first: 20 stays alone, 6 opens a row, 5 the next, 4 joins 6, 3 joins 5, 2 joins 5 + 3.
    lengths = [SequenceLengths(None, 0, length) for length in (2, 3, 4, 5, 6, 20)]
    rows = micro_batches(lengths, max_tokens=10)
    assert [row.indices for row in rows] == [[5], [3, 1, 0], [4, 2]]
    assert [row.num_tokens for row in rows] == [20, 10, 10]
    assert micro_batches([], max_tokens=10) == []
    assert [len(row.indices) for row in micro_batches(lengths, 100, "single")] == [1] * 6
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        micro_batches(lengths, max_tokens=0)


def test_families_share_their_prefix_where_it_pays():
    # A prefix of 30 tokens, four continuations of 10: 70 tokens together, 160 apart.
    group = [SequenceLengths("a", 30, 10)] * 4
    assert micro_batches(group, 100) == [MicroBatch(((0, 1, 2, 3),), 70)]
    assert [row.num_tokens for row in micro_batches(group, 100, "packed")] == [80, 80]
    # A row of 55 tokens holds the prefix and two of them, and each row computes the prefix.
    assert micro_batches(group, 55) == [MicroBatch(((0, 1),), 50), MicroBatch(((2, 3),), 50)]
    # Saving one token of a thousand is not worth a second attention call, unless it is asked for.
    long = [SequenceLengths("a", 1, 500)] * 2
    assert micro_batches(long, 2000)[0].num_tokens == 1002
    assert micro_batches(long, 2000, "shared_prefix")[0].num_tokens == 1001


@pytest.mark.parametrize("layout", ["auto", "shared_prefix", "packed"])
def test_rows_hold_every_sequence_once_and_do_not_overflow(layout):
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, 30, (100,), generator=draw).tolist()
    lengths = [SequenceLengths(i // 8, 20, length) for i, length in enumerate(drawn)]
    rows = micro_batches(lengths, 60, layout)
    assert sorted(index for row in rows for index in row.indices) == list(range(100))
    assert [row.num_tokens for row in rows] == sorted((row.num_tokens for row in rows), reverse=True)
    sequences = [
        ScoredSequence([e.prefix] * 20, [0] * e.num_rest, [False] * (20 + e.num_rest)) for e in lengths
    ]
    for row in rows:
        assert row.num_tokens <= 60
        assert PackedSequences.from_sequences(sequences, row.families).input_ids.shape == (1, row.num_tokens)
    assert micro_batches(lengths, 60, layout) == rows


def test_a_rank_with_fewer_rows_halves_its_largest():
    lengths = [SequenceLengths("a", 10, 5)] * 3 + [SequenceLengths("b", 0, 4)]
    [row] = micro_batches(lengths, 1000)
    assert row == MicroBatch(((0, 1, 2), (3,)), 29)
    assert split_to([row], 2, lengths) == [MicroBatch(((0, 1, 2),), 25), MicroBatch(((3,),), 4)]
    three = split_to([row], 3, lengths)
    assert three == [MicroBatch(((0, 2),), 20), MicroBatch(((1,),), 15), MicroBatch(((3,),), 4)]
    singles = [row.indices for row in split_to([row], 9, lengths)]
    assert singles == [[0], [1], [2], [3]]  # no more than there are


def test_padding():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    padded, token_mask = to_padded(values, [1, 0, 3])
    assert padded.tolist() == [[1, 0, 0], [0, 0, 0], [2, 3, 4]]
    assert token_mask.tolist() == [[True, False, False], [False] * 3, [True] * 3]
    (padded * torch.tensor([[1.0, 9, 9], [9, 9, 9], [2, 3, 4]])).sum().backward()
    assert values.grad.tolist() == [1, 2, 3, 4]


def test_padding_of_nothing_and_of_a_wrong_count():
    padded, token_mask = to_padded(torch.zeros(0), [0, 0])
    assert padded.shape == token_mask.shape == (2, 0)
    with pytest.raises(ValueError, match="must sum to the 3 values"):
        to_padded(torch.zeros(3), [1, 1])
