"""HFEngine's own cache and drawing, against the slow and obvious sampling that they replace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT
from plain_engine import PlainEngine, draw_plainly
from sampling import sample_groups
from samplings import SAMPLINGS, assert_same, started

from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.engines.hf import draw
from rlt_lightning.engines.slots import Prompts, attend, choose_decoder, decode_attention
from rlt_lightning.models.attention import register_segment_attention
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.types import InputError

WORDS = 512


def checked(engine: HFEngine) -> None:
    """Let the engine check its cache, as it does when it samples for the first time."""
    sample_groups(engine, random_prompts([3], 300), Sampling(max_completion_length=1), 1, "", [0])


class Calls:
    """Counts the model's calls and keeps their inputs."""

    def __init__(self, model: Any) -> None:
        self.inputs: list[dict[str, Any]] = []
        model.register_forward_pre_hook(lambda _, args, inputs: self.inputs.append(inputs), with_kwargs=True)


def random_prompts(lengths: list[int], num_words: int = WORDS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, num_words, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_tokens_equal_those_of_plain_sampling(miniature: str, name: str) -> None:
    model, tokenizer = load_model(miniature), load_tokenizer(miniature)
    sampling, prompts = SAMPLINGS[name], random_prompts([3, 17, 9, 30], len(tokenizer))
    asked: tuple[Any, ...] = (prompts, sampling, 3, "", [1, 2, 3, 4], [24, 5, 16, 1])
    theirs = sample_groups(started(PlainEngine, model, tokenizer), *asked)
    for max_sequences in (64, 5, 2):  # all at once; more than a group; less than a group
        assert_same(sample_groups(started(HFEngine, model, tokenizer, max_sequences), *asked), theirs)


def tiny(kind: str, attention: str = "rlt_segments", **changes: Any) -> Any:
    """A two-layer model with random weights large enough that its distributions are not flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    register_segment_attention()
    config = AutoConfig.for_model(kind, **settings | changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


# Architecture, changes of its configuration, and how it is sampled.
ARCHITECTURES = {
    "llama": ("llama", {}, "slots"),
    "qwen2": ("qwen2", {}, "slots"),
    "qwen3": ("qwen3", {"head_dim": 16}, "slots"),
    "one key head": ("llama", {"num_key_value_heads": 1}, "slots"),
    "a window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "padded",
    ),
    "a window in all layers": ("mistral", {"sliding_window": 8}, "padded"),
    "soft caps": (
        "gemma2",
        {"attention": "eager", "sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8},
        "padded",
    ),
    "an attention of transformers": ("qwen2", {"attention": "sdpa"}, "padded"),
}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_architectures_sample_the_same_tokens(miniature: str, name: str) -> None:
    kind, changes, decoder = ARCHITECTURES[name]
    model, tokenizer = tiny(kind, **changes), load_tokenizer(miniature)
    model.generation_config.eos_token_id = 7
    tokenizer.decode = lambda *args, **options: ""  # the model has words that the tokenizer lacks
    assert choose_decoder(model, lambda **inputs: model(**inputs)) == decoder
    asked: tuple[Any, ...] = (random_prompts([2, 30, 11]), Sampling(1.0), 3, "", [1, 2, 3], [40, 9, 25])
    theirs = sample_groups(started(PlainEngine, model, tokenizer), *asked)
    for max_sequences in (64, 4):
        assert_same(sample_groups(started(HFEngine, model, tokenizer, max_sequences), *asked), theirs)


def test_a_cache_that_forgets_the_prompt_is_found(miniature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(query: Any, own: Any, shared: Any, scale: float) -> Any:
        return decode_attention(query, own, (0 * shared[0], 0 * shared[1], shared[2]), scale)

    monkeypatch.setattr("rlt_lightning.engines.slots.decode_attention", forgetful)
    for dtype in ("float32", "bfloat16"):
        model = load_model(miniature, dtype).eval()
        assert choose_decoder(model, model.__call__) == "padded"


def test_a_model_without_right_log_probs_is_refused() -> None:
    model = tiny("llama")

    def call(**inputs: Any) -> Any:
        output = model(**inputs)
        output.logits += torch.randn(output.logits.shape)
        return output

    with pytest.raises(InputError, match="LlamaForCausalLM does not: even without a cache"):
        choose_decoder(model, call)


def test_adapted_models_sample_the_same_tokens(miniature: str) -> None:
    model, tokenizer = load_model(miniature), load_tokenizer(miniature)
    add_adapter(model, LoRA(rank=2), seed=0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    asked: tuple[Any, ...] = (
        random_prompts([5, 12], 300),
        Sampling(0.8, max_completion_length=12),
        2,
        "",
        [1, 2],
    )
    ours = started(HFEngine, model.train(), tokenizer)
    assert_same(sample_groups(ours, *asked), sample_groups(started(PlainEngine, model, tokenizer), *asked))
    assert ours.decoder == "slots"
    assert model.training


def test_half_precision_is_stored_in_half_precision(miniature: str) -> None:
    model, tokenizer = load_model(miniature), load_tokenizer(miniature)
    engine, calls = started(HFEngine, model, tokenizer), Calls(model)
    sampling = Sampling(0.8, max_completion_length=9)
    with torch.autocast("cpu", torch.bfloat16):
        [[completion]] = sample_groups(engine, random_prompts([6], 300), sampling, 1, "", [1])
        logits = model(torch.tensor([random_prompts([6], 300)[0] + completion.token_ids])).logits[0, 5:-1]
    assert engine.decoder == "slots"
    slots = [call["slots"] for call in calls.inputs if "slots" in call][-1]
    stored = [*slots.row_slots.values(), *slots.prompt_slots.values()]
    assert {states.dtype for pair in stored for states in pair} == {torch.bfloat16}
    expected = (logits.float() / 0.8).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])
    difference = (expected[:, 0] - torch.tensor(completion.log_probs)).abs()
    assert difference.mean() < 0.02, difference


def test_a_prompt_is_run_and_stored_once_and_places_are_filled(miniature: str) -> None:
    model, tokenizer = load_model(miniature), load_tokenizer(miniature)
    engine = started(HFEngine, model, tokenizer, 4)
    sample_groups(
        engine, random_prompts([3], 300), Sampling(max_completion_length=1), 1, "", [0]
    )  # its first check
    calls, prompts = Calls(model), random_prompts([50, 60, 40], 300)
    groups = sample_groups(engine, prompts, Sampling(0.7), 3, "", [1, 2, 3], [30, 12, 20])
    runs = [call["input_ids"].shape[1] for call in calls.inputs if "packed_row" in call]
    assert sum(runs) == 150  # tokens of prompts: each once
    steps = [call for call in calls.inputs if "slots" in call]
    widths = [len(call["input_ids"]) for call in steps]
    sampled = sum(len(completion.token_ids) - 1 for group in groups for completion in group)
    assert sum(widths) == sampled  # no row is computed in vain
    assert max(widths) == 4
    # A place never stays empty while a completion waits: widths fall only at the end.
    assert widths[widths.index(4) :] == sorted(widths[widths.index(4) :], reverse=True)
    shapes = {tuple(pair.keys.shape) for pair in steps[-1]["slots"].row_slots.values()}
    assert {(shape[0], shape[2]) for shape in shapes} == {(4, 30)}


def test_slots_grow_and_keep_their_content(tiny_model: str) -> None:
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    asked: tuple[Any, ...] = (random_prompts([4, 9]), Sampling(1.0, max_completion_length=300), 1, "", [1, 2])
    assert_same(
        sample_groups(started(HFEngine, model, tokenizer), *asked),
        sample_groups(started(PlainEngine, model, tokenizer), *asked),
    )


def test_a_finished_rank_calls_as_often_as_the_others(miniature: str) -> None:
    # Two ranks take turns: this one has nothing to sample, the other three more calls.
    model, tokenizer = load_model(miniature), load_tokenizer(miniature)
    others, asked = iter([True, True, True, False]), []

    def on_any_rank(flag: bool) -> bool:
        asked.append(flag)
        return flag or next(others)

    engine = started(HFEngine, model, tokenizer)
    checked(engine)
    engine.use_sharded_model(lambda function: function(model), on_any_rank)
    calls = Calls(model)
    assert sample_groups(engine, [], Sampling(), 2, "", []) == []
    assert asked == [False] * 4
    assert len(calls.inputs) == 3
    asked.clear()
    calls.inputs.clear()
    others = iter([False])
    sample_groups(engine, random_prompts([3, 4], 300), Sampling(max_completion_length=5), 2, "", [1, 2])
    assert asked == [True] * len(calls.inputs) + [False]  # the ranks meet before every call


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_draw_equals_plain_drawing(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 3000, generator=generator) * 4
    history = torch.randint(3000, (200, 9), generator=generator)
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    drawn = draw(logits, history, uniforms, SAMPLINGS[name])
    plain_tokens, plain_log_probs = draw_plainly(logits, history, uniforms, SAMPLINGS[name])
    assert torch.equal(drawn.tokens, plain_tokens)
    assert drawn.token_ids == plain_tokens.tolist()
    log_probs = torch.tensor(drawn.log_probs)
    torch.testing.assert_close(log_probs, plain_log_probs, atol=5e-6, rtol=0)


def test_shared_prompts_are_attended_to_as_if_repeated() -> None:
    generator = torch.Generator().manual_seed(0)
    normal: Callable[..., torch.Tensor] = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    query, keys, values = normal(4, 6, 8), normal(4, 2, 5, 8), normal(4, 2, 5, 8)
    prompt_keys, prompt_values = normal(2, 2, 7, 8), normal(2, 2, 7, 8)
    prompt_of = [1, 0, 1, 1]
    own_lengths, prompt_lengths = [5, 2, 3, 1], [7, 4]

    def bias(lengths: list[int], width: int) -> torch.Tensor:
        hidden = torch.arange(width) >= torch.tensor(lengths)[:, None]
        return torch.zeros(len(lengths), width).masked_fill(hidden, -torch.inf)[:, None, None]

    prompts = Prompts(torch.tensor([3, 0, 4, 5]), 3, bias(prompt_lengths, 7))
    own = keys, values, bias(own_lengths, 5)
    found = decode_attention(query, own, (prompt_keys, prompt_values, prompts), 0.3)
    for row, prompt in enumerate(prompt_of):
        first, last = prompt_lengths[prompt], own_lengths[row]
        k = torch.cat([prompt_keys[prompt, :, :first], keys[row, :, :last]], dim=1)
        v = torch.cat([prompt_values[prompt, :, :first], values[row, :, :last]], dim=1)
        k, v = (t.repeat_interleave(3, dim=0) for t in (k, v))
        weights = (torch.einsum("hd,hld->hl", query[row], k) * 0.3).softmax(-1)
        torch.testing.assert_close(found[row], torch.einsum("hl,hld->hd", weights, v))


def test_attention_by_products_equals_the_kernel_of_a_cpu() -> None:
    query, key, value = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    bias = torch.zeros(3, 1, 1, 9)
    bias[1, ..., 4:] = -torch.inf
    output, lse = attend(query, key, value, bias, 0.3)
    wider = torch.cat([value, value], dim=-1)  # not the keys' size: the kernel does not take it
    both, other_lse = attend(query, key, wider, bias, 0.3)
    torch.testing.assert_close(both, torch.cat([output, output], dim=-1))
    torch.testing.assert_close(other_lse, lse)


@pytest.mark.full
@pytest.mark.parametrize("batching", ["false", "true"])
def test_the_benchmark_compares_all_sides(tmp_path: Path, batching: str) -> None:
    root = ROOT
    command = [sys.executable, str(root / "benchmarks/generate.py"), "--model=miniature", "--sequences=1,4"]
    command += [
        "--length=4",
        "--prompt_length=12",
        "--rounds=1",
        "--vllm=none",
        f"--output={tmp_path}/g.json",
    ]
    command += [f"--continuous_batching={batching}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    results = json.loads((tmp_path / "g.json").read_text())
    assert results["sequences"]["4"]["same_completions"] == 4
    sides = {"ours", "plain", "transformers"} | ({"continuous batching"} if batching == "true" else set())
    assert set(results["sequences"]["4"]["sides"]) == sides
    assert printed.splitlines()[-1].startswith("generate to_plain=")
    assert "vLLM is left out" in printed
