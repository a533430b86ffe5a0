"""`rlt plan`: each formula by hand, what sharding divides, the command line, and one real run."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import full
from commands import ROOT, rlt
from plans import GPU, MODEL, SETUP, SHAPE, STEP
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlt_lightning.callbacks import Checkpoint
from rlt_lightning.commands import plan as planner
from rlt_lightning.commands.plan import (
    LiveBytes,
    PlannedWorkers,
    Setup,
    Shape,
    find_problem,
    list_devices,
    read_sharding,
    trace_activations,
)
from rlt_lightning.models.load import meta_model
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.numerics.divergence import Divergence, linear_divergence
from rlt_lightning.numerics.head import Head
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.types import InputError

WORKER = PlannedWorkers(
    num_gpus=4, tensor_parallel_size=2, weight_bytes=2, gpu_memory_utilization=0.9, push_bytes=4,
    only_adapter=False, bucket_bytes=64, colocated=False, sleeps=False,
)  # fmt: skip


def phases(setup: Setup) -> dict[str, planner.Phase]:
    return {phase.name: phase for phase in planner.list_phases(setup)}


def problem(setup: Setup) -> str:
    return find_problem(setup, list(planner.list_phases(setup))) or ""


def half(setup: Setup) -> Setup:
    """As DeepSpeed holds it with bf16: weights in 2 bytes; gradients, masters and moments in 4."""
    policy = replace(MODEL, weight_bytes=2, product_bytes=2)
    return replace(setup, policy=policy, students=(policy,), grad_bytes=4)


def on(setup: Setup, sharding: str, num_processes: int = 4) -> Setup:
    step = replace(setup.step, num_processes=num_processes)
    return replace(setup, sharding=sharding, step=step)  # type: ignore[arg-type]


def test_cache_of_the_engine_stores_a_prompt_once() -> None:
    # 8 rows of 10 tokens, 4 prompts of 8; 12 numbers of 4 bytes a token; half of one of 6 layers is copied.
    drawing = 8 * 32 * 10
    sampled = 8 * 10 * (1 + 0.5 / 6)
    assert planner.count_kv_bytes(SETUP) == pytest.approx((sampled + 4 * 8) * 48 + drawing)
    assert planner.count_kv_bytes(replace(SETUP, hf_sequences=3)) == pytest.approx(
        (3 * 10 * (1 + 0.5 / 6) + 3 * 8) * 48 + 3 * 320
    )
    under_autocast = replace(SETUP, policy=replace(MODEL, kv_bytes=2))
    assert planner.count_kv_bytes(under_autocast) == pytest.approx((sampled + 4 * 8) * 24 + drawing)
    # With transformers' cache every row repeats its prompt, and one of 6 layers exists twice.
    repeated = replace(SETUP, policy=replace(MODEL, uses_slots=False))
    assert planner.count_kv_bytes(repeated) == pytest.approx(8 * 18 * (1 + 1 / 6) * 48 + drawing)


def test_packed_weights_are_counted_where_the_engine_packs_them() -> None:
    long = replace(SETUP, step=replace(STEP, completion_length=64))
    on_cpu = replace(long, device=replace(GPU, name="cpu"))
    assert planner.list_generate_parts(on_cpu, {})["packed weights"] == 400  # 100 weights of 4 bytes
    others = [long, replace(on_cpu, hf_sequences=3), replace(on_cpu, step=STEP), on(on_cpu, "zero3")]
    for setup in others:
        assert "packed weights" not in planner.list_generate_parts(setup, {})


@pytest.mark.parametrize(
    ("sharding", "weights", "grads", "states", "buckets"),
    [  # bytes of 100 weights on 4 processes; DeepSpeed steps fp32 copies of 2-byte weights: 3 * 4 per weight
        ("ddp", 400, 400, 800, 400),
        ("fsdp2", 100, 100, 200, 0),
        ("zero1", 200, 400, 300, 400),
        ("zero2", 200, 100, 300, 2 * 30 * 4),
        ("zero3", 50, 100, 300, 30 * 4),
    ],
)
def test_each_strategy_divides_what_it_shards(
    sharding: str, weights: float, grads: float, states: float, buckets: float
) -> None:
    setup = on(half(SETUP) if sharding.startswith("zero") else SETUP, sharding)
    assert planner.count_weight_bytes(setup, setup.policy, frozen=False) == weights
    assert planner.count_gradient_bytes(setup) == grads
    assert planner.count_optimizer_bytes(setup) == states
    assert planner.count_bucket_bytes(setup) == buckets


CPU = replace(GPU, name="cpu")
EIGHT_BIT = replace(MODEL, states_8bit=1)


def test_fsdp2_keeps_whole_gradients_where_they_fit() -> None:
    # 4 processes. Runtime, and shards of three models, are not free.
    sharded = on(SETUP, "fsdp2")
    fits = replace(sharded, device=replace(GPU, memory=50 + 3 * 100 + 4 * 400))
    assert planner.keeps_whole_gradients(fits, "auto")
    assert not planner.keeps_whole_gradients(
        replace(fits, device=replace(GPU, memory=fits.device.memory - 1)), "auto"
    )
    assert planner.keeps_whole_gradients(replace(fits, device=replace(GPU, memory=1)), False)
    assert not planner.keeps_whole_gradients(fits, True)
    assert not planner.keeps_whole_gradients(on(SETUP, "ddp"), False)
    # In shards: outside the blocks, and a block twice. Whole: all but the shard, and a block.
    gathered = (
        planner.count_gathered_bytes(setup, MODEL, backward=True)
        - planner.count_gathered_bytes(setup, MODEL, backward=False)
        for setup in (sharded, replace(sharded, keeps_whole=True))
    )
    assert tuple(gathered) == (4 * 40 + 2 * 4 * 10, 400 - 100 + 4 * 10)


@pytest.mark.parametrize(
    ("options", "sharding", "expected"),
    [  # bytes: 100 weights of 4, the largest tensor has 20; 4 processes, where it says so
        ({}, "whole", 400),  # a GPU: the roots of all second moments at a time
        ({}, "ddp", 400),
        ({}, "fsdp2", 100),
        ({"device": CPU}, "whole", 2 * 20 * 4),  # a CPU: of one tensor, twice
        ({"device": CPU}, "fsdp2", 2 * 20 * 4 / 4),
        ({}, "zero1", 2 * 25 * 4),  # and the gradients, in a flat tensor
        ({"device": CPU}, "zero1", 3 * 25 * 4),
        ({"sub_group_numel": 10}, "zero2", 2 * 25 * 4),  # stage 3 alone goes by sub-groups
        ({"sub_group_numel": 10}, "zero3", 2 * 10 * 4),
        ({}, "zero3", 2 * 25 * 4),
        ({"offload_optimizer": True}, "zero3", 0),  # stepped in main memory, in one pass
        ({"policy": EIGHT_BIT}, "whole", 0),  # one kernel does all in place
        ({"policy": EIGHT_BIT, "device": CPU}, "whole", 5 * 20 * 4),
    ],
)
def test_a_step_allocates_what_its_optimizer_computes(
    options: dict[str, Any], sharding: str, expected: float
) -> None:
    setup = replace(SETUP if sharding == "whole" else on(SETUP, sharding), **options)
    assert planner.count_workspace_bytes(setup) == expected


def test_frozen_models_and_states_can_wait_on_the_host() -> None:
    offloaded = replace(SETUP, offload_frozen=True)
    assert planner.count_weight_bytes(offloaded, MODEL, frozen=True) == 0
    assert planner.list_host_parts(offloaded) == {"student weights": 400, "reference weights": 400}
    train = next(p for p in planner.list_phases(offloaded) if p.name == "train")
    score = next(p for p in planner.list_phases(offloaded) if p.name == "score")
    assert (train.device["student weights"], score.device["student weights"]) == (0, 400)
    states = replace(on(half(SETUP), "zero3"), offload_optimizer=True)
    host = planner.list_host_parts(states)
    assert host["optimizer states"] == 300
    assert planner.count_gradient_bytes(states) == 0
    assert planner.count_weight_bytes(replace(states, offload_parameters=True), MODEL, frozen=False) == 0
    assert planner.list_host_parts(replace(states, offload_parameters=True))["weights"] == 3 * 200 / 4


def test_models_are_loaded_whole_unless_they_are_sharded() -> None:
    # 100 weights of the policy and the reference in 4 bytes, of the student in 2; the largest tensor has 20.
    # FSDP2 and ZeRO-3 have shards of 4 processes and one tensor whole, ZeRO-3 in half precision.
    student = replace(MODEL, weight_bytes=2, product_bytes=2, loaded_bytes=2)
    mixed = replace(SETUP, students=(student,))
    deepspeed = replace(half(mixed), students=(student,))
    for setup, weights, gathered in (
        (mixed, (400, 400, 200), 0),
        (on(mixed, "ddp"), (400, 400, 200), 0),
        (on(mixed, "fsdp2"), (100, 100, 50), 80),
        (on(deepspeed, "zero3"), (50, 50, 50), 40),
        (replace(on(deepspeed, "zero3"), offload_parameters=True), (0, 0, 0), 40),
        (replace(mixed, offload_frozen=True), (400, 0, 0), 0),
        (replace(mixed, shares_base=True), (400, 0, 200), 0),
    ):
        found = planner.list_start_parts(setup)
        names = ("policy weights", "reference weights", "student weights")
        assert tuple(found[name] for name in names) == weights, setup.sharding
        assert (found.get("gathered", 0), found["runtime"]) == (gathered, 50)
    # ZeRO-2 loads in fp32: 400 + 400 + 200. Then the policy has 200 and a master of 4 * 100 / 4; ZeRO-1 also
    # has its gradients and their buffer, 400 each, while the reference still has 400.
    assert planner.list_start_parts(on(deepspeed, "zero2"))["policy weights"] == 400
    zero1 = planner.list_start_parts(on(deepspeed, "zero1"))
    assert [zero1[name] for name in names] == [200, 400, 200]
    assert [zero1[name] for name in ("optimizer states", "gradients", "gradient buckets")] == [100, 400, 400]


def test_four_bits_are_made_in_main_memory() -> None:
    in_4_bits = replace(MODEL, nf4_numel=60, nf4_bytes=35, shape=replace(SHAPE, trained=10))
    on_gpu = replace(SETUP, policy=in_4_bits, students=(), shares_base=True)
    found = [planner.list_start_parts(replace(on_gpu, device=device)) for device in (GPU, CPU)]
    # 30 weights in 4 bytes stay beside those in 4 bits, and 10 of the adapter.
    assert [parts["policy weights"] for parts in found] == [35 + 4 * 30 + 4 * 10, 400]


def test_an_adapter_costs_its_own_weights_and_its_reference_none(llama: str) -> None:
    model = meta_model(llama)
    before = Shape.from_model(model)
    add_adapter(model, LoRA(rank=2, alpha=2.0, targets=["q_proj"]), seed=0)
    shape = Shape.from_model(model)
    per_layer = 2 * sum(model.model.layers[0].self_attn.q_proj.base_layer.weight.shape)  # rank (in + out)
    assert shape.trained == shape.num_blocks * per_layer == shape.weights - before.weights
    assert shape.head_trained == 0
    policy = replace(MODEL, shape=replace(SHAPE, trained=10, largest_trained=5, head_trained=0))
    lora = replace(SETUP, policy=policy, shares_base=True)
    assert planner.count_gradient_bytes(lora) == 4 * 10
    assert planner.count_optimizer_bytes(lora) == 2 * 4 * 10
    [train] = [phase for phase in planner.list_phases(lora) if phase.name == "train"]
    assert train.device["reference weights"] == 0
    # A reference that moves is a model of its own, without the adapter's 10 weights.
    assert planner.list_lasting_parts(replace(lora, shares_base=False))["reference weights"] == 4 * 90
    whole, adapter = replace(WORKER, bucket_bytes=10**9), replace(WORKER, only_adapter=True)
    assert [planner.count_pushed_bytes(lora, worker) for worker in (whole, adapter)] == [400, 40]


def test_head_needs_what_its_trace_shows() -> None:
    with FakeTensorMode():
        head = nn.Linear(64, 8192, bias=False)
        hidden, targets = torch.empty(8192, 64, requires_grad=True), torch.zeros(8192, dtype=torch.long)
        with LiveBytes(head) as live:
            log_probs, _ = linear_log_probs(
                hidden, Head(head.weight), targets, logits_mib=8, with_entropy=True
            )
            forward, live.peak = live.peak, live.now
            log_probs.sum().backward()
    shape = replace(SHAPE, hidden_size=64, num_words=8192, head_trained=64 * 8192)
    model = replace(MODEL, shape=shape)
    setup = replace(SETUP, policy=model, logits_bytes=8 * 2**20)
    states = 8192 * 64 * 4  # were there before
    assert 0.75 < forward / (planner.count_head_forward(setup, model, 8192) - states) <= 1
    assert 0.75 < live.peak / (planner.count_head_backward(setup, 8192) - states) <= 1


def test_rows_are_full_or_as_long_as_the_longest_sequence() -> None:
    # 4 prompts of 8 tokens and 2 completions of 10: 4 * 28 = 112 tokens where a prompt is shared.
    assert STEP.row_tokens == 40
    assert replace(STEP, micro_batch_tokens=1000).row_tokens == 112
    assert replace(STEP, micro_batch_tokens=16).row_tokens == 18
    assert replace(STEP, layout="single").row_tokens == 18
    assert replace(STEP, num_processes=4, micro_batch_tokens=1000).row_tokens == 28


TEACHER = replace(MODEL, shape=replace(SHAPE, hidden_size=6))
DISTILLING = replace(SETUP, students=(), with_reference=False, teacher=TEACHER, compares_words=True)


def test_a_teacher_reads_each_row_before_the_policy() -> None:
    assert [phase.name for phase in planner.list_phases(DISTILLING)] == [
        "start",
        "generate",
        "train",
        "step",
        "checkpoint",
    ]
    train = {phase.name: phase for phase in planner.list_phases(DISTILLING)}["train"].device
    single = next(
        phase.device
        for phase in planner.list_phases(replace(DISTILLING, teacher=None))
        if phase.name == "train"
    )
    assert train["teacher weights"] == 400
    # Hidden states of the 32 scored tokens of a row of 40, six numbers each, and three more tiles.
    assert train["head"] - single["head"] == 32 * 6 * 4 + 3 * 16
    sampled = replace(DISTILLING, compares_words=False)
    assert planner.count_head_backward(sampled, 32) == planner.count_head_backward(SETUP, 32)
    of_itself = replace(DISTILLING, teacher=MODEL, is_policy_teacher=True)
    assert all(phase.device["teacher weights"] == 0 for phase in planner.list_phases(of_itself))


def test_a_large_teacher_s_forward_may_be_the_peak() -> None:
    large = replace(TEACHER, activations=replace(MODEL.activations, forward=10**5))
    train = next(p for p in planner.list_phases(replace(DISTILLING, teacher=large)) if p.name == "train")
    assert train.device["activations"] == 10**5
    assert train.device["gradients"] == 400  # of rows before


def test_a_teacher_is_sharded_and_may_wait_on_the_host() -> None:
    sharded = on(DISTILLING, "fsdp2")
    parts = next(p for p in planner.list_phases(sharded) if p.name == "train").device
    assert parts["teacher weights"] == 400 / 4
    # Its weights outside the blocks, 40 of 4 bytes, are whole while both heads meet.
    assert parts["gathered"] == planner.count_gathered_bytes(sharded, MODEL, backward=True) + 160
    offloaded = replace(DISTILLING, offload_frozen=True)
    weights = {p.name: p.device["teacher weights"] for p in planner.list_phases(offloaded)}
    assert weights == {"start": 0, "generate": 0, "train": 400, "step": 0, "checkpoint": 0}
    assert planner.list_host_parts(offloaded)["teacher weights"] == 400
    large = replace(DISTILLING, teacher=replace(TEACHER, shape=replace(SHAPE, weights=10**4)))
    assert "--model.offload_frozen true" in problem(large)


@pytest.mark.full
def test_two_heads_need_what_their_trace_shows() -> None:
    shape = replace(SHAPE, hidden_size=64, num_words=8192, head_trained=64 * 8192)
    model = replace(MODEL, shape=shape)
    setup = replace(DISTILLING, policy=model, teacher=model, logits_bytes=8 * 2**20)
    states = 2 * 8192 * 64 * 4  # of both, were there before
    parts = []
    for options in (Divergence(), Divergence("forward"), Divergence("jsd"), Divergence(top_k=10)):
        with FakeTensorMode():
            heads = nn.Linear(64, 8192, bias=False), nn.Linear(64, 8192, bias=False).requires_grad_(False)
            hidden = torch.empty(8192, 64, requires_grad=True), torch.empty(8192, 64)
            with LiveBytes(nn.ModuleList(heads)) as live:
                sides = hidden[0], Head(heads[0].weight), hidden[1], Head(heads[1].weight)
                linear_divergence(*sides, options, logits_mib=8).sum().backward()
        parts.append(live.peak / (planner.count_head_backward(setup, 8192) - states))
    # The plan takes the most that any divergence needs.
    assert min(parts) > 0.5
    assert 0.75 < max(parts) <= 1


def read_prompts(page: str) -> tuple[int, int]:
    """Return the longest prompt of the sampled model, and of the models that score."""
    text = " ".join(page.split())
    found = re.search(r"prompts of up to (\d+) tokens .* read prompts, with solutions, of up to (\d+) ", text)
    assert found is not None, page
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("options", "role"),
    [
        full(["--model.teacher=miniature"], "teacher miniature"),
        (["--model.teacher=null"], "teacher miniature"),  # a copy of the student
        full(["--model.teacher=null", "--model.teacher_weights=live"], None),
        (["--model.teacher=null", "--config=add/lora", "--model.estimator=sampled"], None),
    ],
)
def test_on_policy_distillation_is_planned_with_its_teacher(
    options: list[str], role: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    found = rlt("plan", "--config=laptop/opd", *options, f"--plan.json={file}")
    assert found.returncode == 0, found.stderr
    plan = json.loads(file.read_text())
    assert list(plan["phases"]) == ["start", "generate", "train", "step", "checkpoint"]
    weights = plan["phases"]["train"]["device"]["teacher weights"]
    assert weights == (0 if role is None else plan["phases"]["train"]["device"]["policy weights"])
    assert ("  teacher miniature" in found.stdout) == (role is not None)
    # A view holds the solution, which the student does not see.
    prompt, view = read_prompts(found.stdout)
    assert view > prompt


@pytest.mark.parametrize(
    ("scorer", "part"),
    [
        ("policy", None),
        full("reference", "reference weights"),
        full("miniature-teacher", "student weights"),
    ],
)
def test_likelihood_rewards_are_planned_with_their_scorer(
    scorer: str, part: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    options = [f"--model.student={scorer}", "--data.force_format=true", f"--plan.json={file}"]
    found = rlt("plan", "--config=laptop/likelihood", *options)
    assert found.returncode == 0, found.stderr
    plan = json.loads(file.read_text())
    assert {"generate", "score", "train"} <= set(plan["phases"])
    device = plan["phases"]["score"]["device"]
    for name in ("reference weights", "student weights"):
        assert device.get(name, 0) == (device["policy weights"] if name == part else 0), name
    # The solution comes behind the thought: the policy's prompt does not hold it.
    prompt, with_solution = read_prompts(found.stdout)
    assert with_solution > prompt


def test_an_offloaded_reference_comes_back_to_score() -> None:
    scored = replace(SETUP, scorer="reference", with_reference=False, offload_frozen=True)
    named = phases(scored)
    # 100 weights of 4 bytes wait on the host.
    assert named["score"].host["reference weights"] == 400
    assert named["score"].device["reference weights"] == 400
    assert named["train"].device["reference weights"] == 0
    with_adapter = phases(replace(scored, shares_base=True)).values()
    assert {phase.device.get("reference weights", 0) for phase in with_adapter} == {0}


@pytest.mark.full
def test_solutions_that_are_trained_on_lengthen_the_rows(tmp_path: Path) -> None:
    found = {}
    for weight in (0, 1):
        file = tmp_path / f"{weight}.json"
        short = ["--model.micro_batch_tokens=1", "--plan.completion_length=8", f"--plan.json={file}"]
        plan = rlt("plan", "--config=laptop/likelihood", f"--model.answer_weight={weight}", *short)
        assert plan.returncode == 0, plan.stderr
        phases = json.loads(file.read_text())["phases"]
        found[weight] = [phases[name]["device"]["activations"] for name in ("score", "train")]
    [[scores, trains], [_, with_solutions]] = found.values()
    assert found[0][0] == found[1][0] == scores
    assert with_solutions > 1.1 * trains


def test_published_shapes_have_the_published_number_of_weights(tmp_path: Path) -> None:
    for family in yaml.safe_load(planner.SHAPES.read_text()):
        for size in family["sizes"]:
            (tmp_path / "config.json").write_text(json.dumps(family["config"] | size["config"]))
            model = meta_model(str(tmp_path))
            assert sum(p.numel() for p in model.parameters()) == size["parameters"], size["names"]


def test_disk_holds_the_checkpoints_that_are_kept_and_the_next() -> None:
    # 100 weights of 4 bytes with two moments: a checkpoint of 1,200 bytes; two are kept, one is written.
    shape = replace(SHAPE, weights=100, trained=100)
    setup = replace(SETUP, policy=replace(MODEL, shape=shape, weight_bytes=4), samples=True)
    parts = planner.list_disk_parts(setup, Checkpoint(every_n_train_steps=5, save_top_k=2), num_steps=10)
    rows = 10 * setup.step.prompts * setup.step.group_size
    text = rows * (4 * setup.step.mean_completion_length + 2000)
    assert parts == {"3 checkpoints": 3600.0, "model": 400.0, "rollouts.jsonl": text}
    every = planner.list_disk_parts(setup, Checkpoint(5, save_top_k=-1), 12)
    assert every["3 checkpoints"] == 3600  # of steps 5, 10 and 12
    none = planner.list_disk_parts(setup, Checkpoint(save_top_k=0), 10)
    assert none == {"model": 400.0, "rollouts.jsonl": text}


@pytest.mark.parametrize(("every", "num_steps"), [(None, 10), (5, -1)])
def test_disk_counts_no_checkpoints_of_unknown_number(every: int | None, num_steps: int) -> None:
    # A checkpoint every 10 minutes, or of an epoch whose rows nobody has counted.
    setup = replace(SETUP, policy=replace(MODEL, shape=replace(SHAPE, weights=100, trained=100)))
    parts = planner.list_disk_parts(setup, Checkpoint(every, save_top_k=-1), num_steps)
    assert parts["each of all checkpoints"] == 1200


def test_what_does_not_fit_is_named_with_a_remedy() -> None:
    tuning = replace(
        SETUP, students=(), with_reference=False, hf_sequences=0, device=replace(GPU, memory=2000)
    )
    line = problem(on(tuning, "ddp"))
    assert line.startswith("does not fit: ")
    assert "Largest: activations" in line or "Largest: optimizer" in line
    assert "--model.gradient_checkpointing true" in line
    assert "--config hardware/fsdp2" in line
    assert not problem(replace(SETUP, device=replace(GPU, memory=20_000)))


def test_a_worker_on_the_same_gpu_takes_its_part_of_it() -> None:
    workers = {sleeps: replace(WORKER, colocated=True, sleeps=sleeps) for sleeps in (False, True)}
    plans = {sleeps: phases(replace(SETUP, worker=worker)) for sleeps, worker in workers.items()}
    taken = {
        sleeps: {name: phase.device.get("vLLM worker", 0.0) for name, phase in plan.items()}
        for sleeps, plan in plans.items()
    }
    assert taken[False]["train"] == taken[False]["push"] == taken[True]["push"] == 9000
    assert taken[True]["train"] == planner.ASLEEP
    assert taken[True]["start"] == taken[False]["start"] == 0  # workers start when models are loaded
    assert "sleeping worker" not in plans[True]["start"].host  # it drops its weights
    with_adapter = phases(replace(SETUP, worker=replace(workers[True], only_adapter=True)))
    assert with_adapter["start"].host["sleeping worker"] == 100 * 2 / 2  # its weights, by two GPUs


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with nothing but the configuration of a Llama of 3 blocks."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    return str(folder)


def test_shape_counts_a_model_that_has_no_weights(llama: str) -> None:
    shape = Shape.from_model(meta_model(llama))
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64  # q and o, k and v, the MLP, two norms
    assert (shape.block, shape.num_blocks, shape.outside) == (block, 3, 2 * 100 * 64 + 64)
    assert shape.weights == shape.trained == 3 * block + shape.outside
    assert shape.kv_per_token == 2 * 3 * 2 * 16


def test_activations_are_those_that_autograd_keeps(llama: str) -> None:
    # Numbers per token in a block of a Llama, H = 64: input, normalised and output of two norms, 6 H, and
    # a root each; queries and output of the attention, 2 H, keys and values, H, log-sum-exps, 4; gate, silu,
    # up and product of the MLP, 4 * 160. Four bytes each.
    kept = {n: trace_activations(meta_model(blocks_of(llama, n)), 128, prefix=32).kept for n in (3, 7)}
    assert kept[7] - kept[3] == 4 * 128 * (9 * 64 + 2 + 4 + 4 * 160) * 4


def test_gradient_checkpointing_keeps_a_block_s_input_alone(llama: str) -> None:
    kept = {
        n: trace_activations(meta_model(blocks_of(llama, n)), 128, prefix=32, checkpointing=True).kept
        for n in (3, 7)
    }
    assert kept[7] - kept[3] == 4 * 128 * 64 * 4


def test_autocast_keeps_copies_of_matrices_only(llama: str) -> None:
    found = trace_activations(meta_model(llama), 128, autocast=True)
    assert found.copies == 3 * 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    assert trace_activations(meta_model(llama, "bfloat16"), 128, autocast=True).copies == 0


def blocks_of(folder: str, number: int) -> str:
    """The same configuration with another number of blocks."""
    other = Path(folder).with_name(f"llama-{number}")
    other.mkdir(exist_ok=True)
    config = json.loads((Path(folder) / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "layer_types"}
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": number}))
    return str(other)


def test_frozen_models_in_shards_are_not_planned_in_main_memory() -> None:
    overlay = ("--config", "hardware/zero3_8gpu", "--model.offload_frozen", "true")
    done = rlt("plan", "--config", "recipe_7b/rlt", *overlay)
    assert done.returncode == 2
    assert "model.offload_frozen is for whole models" in done.stderr


def test_devices_and_strategies_are_read_as_the_trainer_would() -> None:
    for devices, ids in ((3, [0, 1, 2]), ("3", [0, 1, 2]), ("0,2", [0, 2]), ([1, 5], [1, 5]), ("auto", [0])):
        assert list_devices(devices, True) == ids
    assert read_sharding("auto", 1) == ("whole", {})
    assert read_sharding("auto", 2) == ("ddp", {})
    settings = {"stage": 1, "offload_optimizer": True}
    named = {"class_path": "rlt_lightning.strategies.DeepSpeed", "init_args": settings}
    assert read_sharding(named, 8) == ("zero1", settings)
    assert read_sharding("deepspeed_stage_2", 8) == ("zero2", {"stage": 2})
    with pytest.raises(InputError, match=r"trainer.strategy must be one of"):
        read_sharding("fsdp", 8)
    with pytest.raises(InputError, match=r"at least one process"):
        read_sharding("auto", 0)


@pytest.mark.full
def test_an_8_gpu_config_is_planned_anywhere_and_leaves_nothing(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    runs = set((ROOT / "runs").glob("*"))
    models = [f"--model.teacher={llama}", f"--model.student={llama}"]
    command = ["plan", "--config=configs/recipe_7b/rlt.yaml", "--config=configs/hardware/zero3.yaml", *models]
    found = rlt(*command, "--trainer.devices=8", f"--plan.json={file}")
    assert found.returncode == 0, found.stderr
    assert "8 x H100" in found.stdout
    assert "zero3" in found.stdout
    assert "fits: " in found.stdout
    plan = json.loads(file.read_text())
    assert plan["fits"]
    assert plan["peak_bytes"] == max(phase["total"] for phase in plan["phases"].values())
    assert set((ROOT / "runs").glob("*")) == runs  # no run folder
    small = rlt(*command, "--trainer.devices=8", "--plan.device_gib=1")
    assert small.returncode == 1
    assert "does not fit: " in small.stdout


def test_mistakes_are_told_in_one_line(llama: str) -> None:
    for option in (
        "--plan.device=GTX",
        "--plan.prompt_length=0",
        "--trainer.strategy=fsdp",
        "--model.groupsize=3",
    ):
        found = rlt("plan", "--config=configs/laptop/rlt.yaml", option)
        assert found.returncode == 2, option
        assert len(found.stderr.strip().splitlines()) == 1, found.stderr
        assert found.stderr.startswith("rlt: error: ")


@pytest.mark.slow
def test_a_real_run_peaks_where_the_plan_says(smollm2: str, tmp_path: Path) -> None:
    arguments = ["--config=research/configs/correctness_warmup.yaml", "--data.source=word_sums"]
    # Blocks that are freed go back at once: resident memory is then what is in use.
    exact = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    assert rlt("plan", *arguments, f"--plan.json={tmp_path / 'plan.json'}").returncode == 0
    run = [f"--output_dir={tmp_path / 'run'}", "--trainer.max_steps=2", "--export.enabled=false"]
    fit = rlt("fit", *arguments, *run, "--checkpoint.every_n_train_steps=100", fresh=True, **exact)
    assert fit.returncode == 0, fit.stderr[-2000:]
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        measured = float(list(csv.DictReader(file))[-1]["perf/train_peak_gib"])
    phases = json.loads((tmp_path / "plan.json").read_text())["phases"]
    predicted = max(phases[name]["total"] for name in ("train", "step"))  # the metric covers both
    assert predicted / 2**30 == pytest.approx(measured, rel=0.15)
