"""HFEngine's own cache and drawing, against the slow and obvious sampling that they replace."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import rlt
from fits import small_fit
from plain_engine import PlainEngine
from sampling import sample_groups
from samplings import SAMPLINGS, assert_same, started
from tiny import CHAINS

from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.engines.hf import draw
from rlt_lightning.engines.slots import attend, choose_decoder, decode_attention
from rlt_lightning.models.attention import register_segment_attention
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion, InputError

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


def tiny_llama() -> Any:
    """A two-layer model with random weights large enough that its distributions are not flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    register_segment_attention()
    config = AutoConfig.for_model("llama", initializer_range=0.3, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="rlt_segments").eval()


def test_a_cache_that_forgets_the_prompt_is_found(miniature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(query: Any, own: Any, shared: Any, scale: float) -> Any:
        return decode_attention(query, own, (0 * shared[0], 0 * shared[1], shared[2]), scale)

    monkeypatch.setattr("rlt_lightning.engines.slots.decode_attention", forgetful)
    for dtype in ("float32", "bfloat16"):
        model = load_model(miniature, dtype).eval()
        assert choose_decoder(model, model.__call__) == "padded"


def test_a_model_without_right_log_probs_is_refused() -> None:
    model = tiny_llama()

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
    asked: Any = (random_prompts([5, 12], 300), Sampling(0.8, max_completion_length=12), 2, "", [1, 2])
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
    checked(engine)
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


def test_attention_by_products_equals_the_kernel_of_a_cpu() -> None:
    query, key, value = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    bias = torch.zeros(3, 1, 1, 9)
    bias[1, ..., 4:] = -torch.inf
    output, lse = attend(query, key, value, bias, 0.3)
    wider = torch.cat([value, value], dim=-1)  # not the keys' size: the kernel does not take it
    both, other_lse = attend(query, key, wider, bias, 0.3)
    torch.testing.assert_close(both, torch.cat([output, output], dim=-1))
    torch.testing.assert_close(other_lse, lse)


END = "<|end_of_explanation|>"


@pytest.fixture(scope="module")
def engine(miniature: str) -> HFEngine:
    return started(HFEngine, load_model(miniature), load_tokenizer(miniature))


def prompts_of(engine: HFEngine) -> list[list[int]]:
    questions = ["What is 3 + 4?", "Name the capital of France, and say in one sentence where it lies."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    return engine.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)


def token_ids(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in groups for completion in group]


def test_a_completion_depends_on_its_seed_and_not_on_its_neighbours(engine: HFEngine) -> None:
    prompts, sampling = prompts_of(engine), Sampling(max_completion_length=10)
    together = sample_groups(engine, prompts, sampling, 2, END, [5, 6])
    alone = sample_groups(engine, prompts[1:], sampling, 2, END, [6])
    assert token_ids([together[1]]) == token_ids(alone)
    in_turns = started(HFEngine, engine.model, engine.tokenizer, 2)
    assert token_ids(sample_groups(in_turns, prompts, sampling, 2, END, [5, 6])) == token_ids(together)
    other = sample_groups(engine, prompts, sampling, 2, END, [7, 8])
    assert token_ids(other) != token_ids(together)
    assert token_ids([together[0]])[0] != token_ids([together[0]])[1]  # one group, two streams


def test_sampling_stops_with_the_token_in_which_the_end_tag_ends(engine: HFEngine) -> None:
    # Greedy decoding repeats itself: it ends where a piece of the first answer is the stop string.
    prompt, greedy = prompts_of(engine)[1], Sampling(temperature=0, max_completion_length=8)
    [[free]] = sample_groups(engine, [prompt], greedy, 1, END, [0])
    text = engine.tokenizer.decode(free.token_ids[:4])
    [[stopped]] = sample_groups(engine, [prompt], greedy, 1, text[-6:], [0])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert text[-6:] in engine.tokenizer.decode(stopped.token_ids)
    assert text[-6:] not in engine.tokenizer.decode(stopped.token_ids[:-1])


def test_an_end_tag_whose_last_character_spans_tokens_is_seen(engine: HFEngine) -> None:
    for tag in ("⟦/解⟧", "【终】", "«fin»"):
        watcher = StopWatcher(engine.tokenizer, tag, set())
        ids = engine.tokenizer("So it is done." + tag, add_special_tokens=False).input_ids
        reasons = [watcher.finish_reason(ids[: n + 1]) for n in range(len(ids))]
        assert reasons == ["length"] * (len(ids) - 1) + ["stop"]


def test_draw_follows_the_truncated_distribution() -> None:
    # p = 0.5, 0.3, 0.2; top_k 2 leaves 0.625 and 0.375. 4000 even spaced numbers make the counts exact to
    # one.
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(4000, 3)
    uniforms = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    history = torch.zeros(4000, 1, dtype=torch.long)
    tokens, _, log_probs = draw(logits, history, uniforms, Sampling(temperature=1, top_k=2))
    assert Counter(tokens.tolist()) == {0: 2500, 1: 1500}
    assert log_probs[0] == pytest.approx(math.log(0.5))  # of the full distribution
    tokens, *_ = draw(logits, history, uniforms, Sampling(temperature=1, top_p=0.4))
    assert set(tokens.tolist()) == {0}
    tokens, *_ = draw(logits, history, uniforms, Sampling(temperature=1, min_p=0.5))
    assert set(tokens.tolist()) == {0, 1}
    # Temperature 0.5 squares: 0.25, 0.09, 0.04 of 0.38.
    tokens, _, log_probs = draw(logits, history, uniforms, Sampling(temperature=0.5))
    assert Counter(tokens.tolist())[0] == pytest.approx(4000 * 25 / 38, abs=1)
    assert log_probs[0] == pytest.approx(math.log(25 / 38))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0}])
def test_rows_without_a_token_are_never_drawn(options: dict[str, Any]) -> None:
    logits = torch.tensor([[0.3, 0.2, 0.5]]).log().expand(100, 3)  # the last row has no token
    uniforms = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    drawn = draw(logits, torch.zeros(100, 0, dtype=torch.long), uniforms, Sampling(**options), num_ids=2)
    assert set(drawn.token_ids) <= {0, 1}
    if not options:
        assert drawn.log_probs[0] < math.log(0.4)  # of all words, as the trainer's


def test_a_student_with_fewer_rows_reads_a_padded_teacher(miniature: str, tmp_path: Path) -> None:
    teacher, size = load_model(miniature), len(load_tokenizer(miniature))
    teacher.resize_token_embeddings(size + 32)
    with torch.no_grad():
        weight = teacher.get_input_embeddings().weight  # tied: such a row would be sampled most
        weight[size:] = 2 * weight[:size].mean(0) + weight[size - 32 : size]
    teacher.save_pretrained(tmp_path / "teacher")
    load_tokenizer(miniature).save_pretrained(tmp_path / "teacher")
    words = [*CHAINS, f"--model.student={miniature}", "--trainer.max_steps=1"]
    result = rlt(*small_fit(str(tmp_path / "teacher"), tmp_path / "run", *words))
    assert result.returncode == 0, result.stderr
