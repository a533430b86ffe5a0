"""The vLLM engine against fake servers: its requests, its checks of answers, and what it does on failures."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, nullcontext
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import full
from commands import rlt, wait_until
from fake_worker import (
    END,
    FakeTokenizer,
    FakeWorker,
    fake_vllm,
    join_gloo,
    made_up,
    receive_gloo,
    worker_of,
)
from fleets import (  # noqa: F401
    PROMPTS,
    SAMPLING,
    SEEDS,
    WEIGHTS,
    assert_each_prompt_once,
    generate,
    generate_until_lost,
    launched,
    servers_of,
    start,
    start_engine,
    token_ids,
    undisturbed,
)
from safetensors.torch import load_file
from sampling import sample_groups
from torch import Tensor

from rlt_lightning.engines import (
    AdapterPush,
    DiskPush,
    Engine,
    EngineError,
    GlooPush,
    Launch,
    NCCLPush,
    NoPush,
    Sampling,
    VLLMEngine,
    WorkersLost,
    build_requests,
    fleet,
    sample_all,
)
from rlt_lightning.engines.base import find_disagreement
from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.engines.launch import LocalServer
from rlt_lightning.engines.nccl import SyncClient, WeightSource, find_common_dtype
from rlt_lightning.engines.push import Staging, split_pieces
from rlt_lightning.engines.threads import run_in_background as run_in_thread
from rlt_lightning.models.load import load_model
from rlt_lightning.models.lora import LoRA, add_adapter, list_adapter_weights
from rlt_lightning.models.weights import gather_in_groups
from rlt_lightning.types import Completion, InputError

pytestmark = pytest.mark.filterwarnings("ignore:Lost vLLM worker")
TRAINER_SCORES = [-1.0, -2.0, -3.0]


# What is asked and what comes back


def test_a_request_holds_the_token_ids_and_every_sampling_field(start: Any) -> None:
    worker = FakeWorker()
    sampling = Sampling(0.6, 0.9, 40, 0.05, 1.1, max_completion_length=5)
    engine = start(worker, max_sequences=1)
    sample_groups(engine, [[3, 1, 4]], sampling, 4, END, [2**62 + 17])  # the seed is cut to 62 bits
    assert worker.bodies == [
        {
            "model": "teacher",
            "prompt": [3, 1, 4],
            "seed": 17 + number,
            "max_tokens": 5,
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "stop": [END],
            "stop_token_ids": [2, 5],
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
        }
        for number in range(4)
    ]


def test_completions_come_in_order_with_their_seed_worker_log_probs_and_ending(start: Any) -> None:
    worker = FakeWorker()
    engine = start(worker)
    assert isinstance(engine, Engine)
    groups = generate(engine, 3)
    for prompt, seed, group in zip(PROMPTS, SEEDS, groups, strict=True):
        made = [made_up(prompt, seed + i, 6, ("stop", "eos", "length")) for i in range(3)]
        assert group == [
            Completion(c["token_ids"], c["logprobs"]["token_logprobs"], c["ending"], seed + i, worker.url)
            for i, c in enumerate(made)
        ]
    endings = {completion.finish_reason for group in groups for completion in group}
    assert endings == {"stop", "eos", "length"}


def test_log_probs_are_none_where_they_are_not_those_of_the_policy(start: Any) -> None:
    truncated = generate(start(FakeWorker()), sampling=Sampling(top_p=0.9, max_completion_length=6))
    engine = start(FakeWorker(raw_log_probs=True), log_probs="trainer")
    assert not engine.reports_log_probs
    for groups in (truncated, generate(engine)):
        assert token_ids(groups) == undisturbed()
        assert {completion.log_probs for group in groups for completion in group} == {None}


def test_raw_log_probs_are_refused_before_anything_is_sampled(start: Any) -> None:
    worker = FakeWorker(raw_log_probs=True, score=lambda ids: TRAINER_SCORES)
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        start(worker).verify([1, 2, 3, 4], {0: TRAINER_SCORES})
    assert worker.bodies == []


def test_prompts_go_to_the_worker_with_the_fewest_in_work(start: Any) -> None:
    fast, slow = FakeWorker(gate=Event()), FakeWorker(gate=Event())
    engine = start(slow, fast, max_sequences=4)

    def let_the_fast_one_finish() -> None:
        assert fast.gate is not None
        assert slow.gate is not None
        wait_until(lambda: fast.in_work == slow.in_work == 4)
        fast.gate.set()
        wait_until(lambda: len(fast.delivered) == 12)
        slow.gate.set()

    ended = run_in_thread(let_the_fast_one_finish)
    assert token_ids(generate(engine)) == undisturbed()
    ended.result()
    assert_each_prompt_once(fast, slow)
    assert len(slow.delivered) == 4  # its four slots, once
    assert (fast.most_in_work, slow.most_in_work) == (4, 4)


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_sent(start: Any) -> None:
    worker = FakeWorker()
    engine = start(worker)
    with pytest.raises(InputError, match="--max-model-len of 2048 tokens, but need 2049"):
        sample_groups(engine, [[1], [1] * 1049], Sampling(max_completion_length=1000), 1, END, [0, 0])
    assert worker.bodies == []


def test_the_api_key_comes_from_the_environment_and_is_never_told(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", "s3cret")
    worker = FakeWorker(api_key="s3cret")
    engine = start(worker, api_key_env="OUR_KEY")
    assert token_ids(generate(engine)) == undisturbed()
    worker.always = "400"
    with pytest.raises(EngineError) as refused:
        generate(engine)
    monkeypatch.setenv("OUR_KEY", "0ther")
    with pytest.raises(
        EngineError, match="environment variable that the engine's api_key_env names"
    ) as wrong:
        start(FakeWorker(api_key="s3cret"), api_key_env="OUR_KEY")
    assert not any(key in f"{error.value!r}" for error in (refused, wrong) for key in ("s3cret", "0ther"))


def test_a_worker_without_dev_routes_is_refused_with_the_variable_to_set(start: Any) -> None:
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        start(FakeWorker(dev_mode=False))


@pytest.mark.parametrize("path", ["/v1/models", full("/get_world_size"), full("/collective_rpc")])
def test_a_server_that_answers_something_else_is_an_engine_error(start: Any, path: str) -> None:
    with pytest.raises(EngineError, match=re.escape("http://127.0.0.1:")):
        start(FakeWorker(broken={path: {"data": [{}]}}), recovery_timeout_s=0.6)


@pytest.mark.parametrize("path", ["/version", "/get_world_size", "/collective_rpc", "/v1/models"])
def test_a_greeting_that_fails_inside_the_server_ends_at_once(start: Any, path: str) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"{path} was refused with status 500"):
        start(FakeWorker(broken={path: 500}), recovery_timeout_s=600)
    assert time.monotonic() - began < 300  # not after the deadline


def test_a_server_that_is_not_well_yet_is_waited_for(start: Any) -> None:
    worker = FakeWorker(broken={"/health": 503})
    recovers = run_in_thread(lambda: (wait_until(lambda: len(worker.calls) > 1), worker.broken.clear()))
    assert token_ids(generate(start(worker))) == undisturbed()
    recovers.result()


def test_a_greeting_asks_nothing_about_the_servers_machine(start: Any) -> None:
    worker = FakeWorker(broken={"/server_info": 500})  # as without pip, nvidia-smi or a free GPU
    start(worker)
    assert "GET /server_info" not in worker.calls


def test_two_minors_of_vllm_are_taken_and_others_refused_by_name(start: Any) -> None:
    for version in ("0.32.0+cpu", "0.33.1"):
        [worker] = start(FakeWorker(vllm_version=version)).fleet.workers
        assert worker.version == version
    for version in ("0.31.0", "0.34.0", "0.3.2", "dev"):
        with pytest.raises(EngineError, match=rf"must be vLLM 0\.32 or 0\.33, but is {version}: "):
            start(FakeWorker(vllm_version=version), recovery_timeout_s=0.6)


def test_a_server_without_a_version_is_refused_at_once(start: Any) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"must send its version, but sent \{\} .* is vLLM 0\.32"):
        start(FakeWorker(broken={"/version": {}}), recovery_timeout_s=600)
    assert time.monotonic() - began < 300  # not after the deadline


def test_another_served_model_is_refused_by_name(start: Any) -> None:
    with pytest.raises(EngineError, match="must serve the model 'mine', but serves teacher"):
        start(FakeWorker(), served_model="mine")


# Faults


FAULTS = ("500", "garbage", "choices", "nan", "lengths", "abort", "drop")


def test_a_failed_answer_of_whatever_kind_is_asked_for_again(start: Any) -> None:
    worker = FakeWorker(faults=(*FAULTS, "", *FAULTS))
    assert token_ids(generate(start(worker, max_retries=14))) == undisturbed()
    assert_each_prompt_once(worker)
    assert len(worker.bodies) == 16 + 2 * 7


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_always_fails_is_lost_and_the_other_finishes(start: Any, fault: str) -> None:
    bad, good = FakeWorker(always=fault), FakeWorker(delay_s=0.01)
    engine = start(bad, good, max_sequences=4)
    assert token_ids(generate(engine)) == undisturbed()
    assert_each_prompt_once(good)
    assert engine.fleet.serving == [engine.fleet.workers[1]]
    assert engine.policy_version == 0  # all that serve are current


@pytest.mark.parametrize("fault", ["hang", "die"])
def test_a_worker_that_hangs_or_dies_is_lost_by_the_call_timeout(start: Any, fault: str) -> None:
    bad, good = FakeWorker(faults=("", fault), delay_s=0.01), FakeWorker(delay_s=0.01)
    engine = start(bad, good, max_sequences=4, call_timeout_s=3.0)
    assert token_ids(generate(engine)) == undisturbed()
    assert list(engine.fleet.down) == [bad.url]
    reason = "must be answered within 3 s, but was not" if fault == "hang" else "failed (Connect"
    assert reason in engine.fleet.down[bad.url]
    assert Counter(map(str, good.delivered + bad.delivered)) >= Counter(map(str, PROMPTS * 2))


def test_a_completion_that_never_ends_costs_its_worker(start: Any) -> None:
    late, good = FakeWorker(gate=Event()), FakeWorker()
    engine = start(late, good, max_sequences=4, request_timeout_s=1.0)
    assert token_ids(generate(engine)) == undisturbed()
    assert list(engine.fleet.down) == [late.url]
    assert "within 1 s" in engine.fleet.down[late.url]


def test_requests_that_always_take_too_long_end_the_run(start: Any) -> None:
    engine = start(FakeWorker(gate=Event()), request_timeout_s=0.2, max_restarts=0)
    with pytest.raises(EngineError, match=r"within 0\.2 s") as ended:
        generate(engine)
    assert not isinstance(ended.value, WorkersLost)


def test_a_certain_text_may_come_for_every_seed(start: Any) -> None:
    def certain(prompt: list[int], temperature: float) -> list[float]:
        return [-1e-3] * (len(prompt) - 1)

    worker = FakeWorker(sampled=certain, draw=lambda body: ([11, 12, 13, 14, 15, 16], "length"))
    assert {tuple(ids) for group in token_ids(generate(start(worker), 8)) for ids in group} == {
        (11, 12, 13, 14, 15, 16)
    }


@pytest.mark.parametrize("fault", ["/health", full("/collective_rpc"), full("/weight_info")])
def test_a_worker_is_lost_if_one_sign_of_life_fails(start: Any, fault: str) -> None:
    # The server may answer while its engine is dead: /health then says 503, or a model worker is not heard.
    bad, good = FakeWorker(gate=Event()), FakeWorker(delay_s=0.01)
    engine = start(bad, good, call_timeout_s=4.0)  # it is looked at every second
    bad.broken[fault] = 503
    assert token_ids(generate(engine)) == undisturbed()
    assert list(engine.fleet.down) == [bad.url]
    assert "503" in engine.fleet.down[bad.url]


def test_a_lost_worker_costs_no_computing_time_while_the_others_sample(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = FakeWorker(faults=("die",)), FakeWorker(gate=Event())
    engine = start(bad, good)
    waits: list[int] = []
    wait = asyncio.wait

    def counted(tasks: Any, **options: Any) -> Any:
        waits.append(len(tasks))
        return wait(tasks, **options)

    def open_the_gate() -> None:
        wait_until(lambda: bool(engine.fleet.down))
        time.sleep(0.3)  # time to turn in circles, thousands of times
        assert good.gate is not None
        good.gate.set()

    monkeypatch.setattr(asyncio, "wait", counted)
    ended = run_in_thread(open_the_gate)
    assert token_ids(generate(engine)) == undisturbed()
    ended.result()
    assert len(waits) <= 2 * 16  # once for each completion, and for each loss


def test_answers_of_a_worker_that_was_restarted_meanwhile_are_dropped(start: Any) -> None:
    fickle, steady = FakeWorker(faults=("restart",)), FakeWorker(delay_s=0.02)
    engine = start(fickle, steady, max_sequences=1, step=3)
    groups = generate(engine)
    assert token_ids(groups) == undisturbed()
    assert {completion.worker for group in groups for completion in group} == {steady.url}
    assert len(fickle.bodies) == 1  # and none after it was found out
    engine.health()
    assert (engine.fleet.down, engine.policy_version) == ({}, -1)
    engine.update_weights(WEIGHTS, 3)
    assert engine.policy_version == 3
    assert fickle.version == steady.version
    assert token_ids(generate(engine)) == undisturbed()
    assert len(fickle.bodies) > 1


def test_a_restart_between_two_steps_is_found_by_health(start: Any) -> None:
    worker = FakeWorker()
    engine = start(worker)
    worker.restart()
    engine.health()
    assert engine.policy_version == -1
    engine.update_weights(WEIGHTS, 0)
    assert token_ids(generate(engine)) == undisturbed()


def test_when_the_only_worker_is_lost_its_finished_part_is_kept_and_the_rest_follows(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(faults=("",) * 6 + ("die",), delay_s=0.01)
    engine = start(worker, max_sequences=1)  # one completion at a time
    finished = generate_until_lost(engine, match=worker.url)
    assert sorted(finished) == list(range(6))
    assert engine.policy_version == -1

    worker.restart()
    greetings = 0
    greet = engine.fleet._greet

    async def greet_and_open(lost: Any) -> None:
        nonlocal greetings
        await greet(lost)
        greetings += 1
        if greetings == 1:
            wait_until(lambda: worker.server is None)
            worker.open()

    monkeypatch.setattr(engine.fleet, "_greet", greet_and_open)
    engine.health()  # greets it in vain, and waits
    assert greetings > 1
    assert engine.policy_version == -1
    engine.update_weights(WEIGHTS, 0)
    rest = sample_groups(engine, PROMPTS[3:], SAMPLING, 2, END, SEEDS[3:])
    whole = [[finished[i], finished[i + 1]] for i in range(0, 6, 2)]
    assert token_ids([*whole, *rest]) == undisturbed()
    assert_each_prompt_once(worker)


def test_a_worker_that_never_comes_back_ends_the_run_with_its_address_and_advice(start: Any) -> None:
    worker = FakeWorker(faults=("die",))
    engine = start(worker, recovery_timeout_s=0.5)
    with pytest.raises(WorkersLost):
        generate(engine)
    with pytest.raises(EngineError, match=rf"{worker.url} must answer within 0.5 s.*--resume true"):
        engine.health()


def test_a_worker_that_is_not_there_at_the_start_is_an_engine_error(start: Any) -> None:
    worker = FakeWorker()
    worker.close()
    with pytest.raises(EngineError, match=worker.url):
        start(worker, recovery_timeout_s=0.6)


def test_a_refused_request_is_not_sent_again(start: Any) -> None:
    worker = FakeWorker(always="400")
    engine = start(worker, max_sequences=1)
    with pytest.raises(EngineError, match="refused with status 400"):
        generate(engine)
    assert len(worker.bodies) == 1


def test_workers_that_are_lost_again_and_again_end_the_run(start: Any) -> None:
    worker = FakeWorker(always="500")
    engine = start(worker, max_restarts=2, max_retries=0)
    for _ in range(2):
        with pytest.raises(WorkersLost):
            generate(engine)
        engine.health()
        engine.update_weights(WEIGHTS, 0)
    with pytest.raises(EngineError, match=f"{worker.url} was lost 3 times in a row") as ended:
        generate(engine)
    assert not isinstance(ended.value, WorkersLost)


def test_losses_are_not_forgiven_until_a_group_is_whole(start: Any) -> None:
    worker = FakeWorker(faults=("", "500") * 3)  # half a group each time
    engine = start(worker, max_restarts=2, max_retries=0, max_sequences=1)
    for _ in range(2):
        with pytest.raises(WorkersLost):
            generate(engine)
        engine.health()
        engine.update_weights(WEIGHTS, 0)
    with pytest.raises(EngineError, match="was lost 3 times in a row"):
        generate(engine)


def test_a_whole_group_forgives_earlier_losses(start: Any) -> None:
    worker = FakeWorker(faults=("", "", "500") * 3, delay_s=0.01)
    engine = start(worker, max_restarts=1, max_retries=0, max_sequences=1)
    for _ in range(3):
        with pytest.raises(WorkersLost):
            generate(engine)
        engine.health()
        engine.update_weights(WEIGHTS, 0)
    assert token_ids(generate(engine)) == undisturbed()


# Weights and versions


def test_a_failed_push_loses_that_worker_alone(start: Any) -> None:
    bad, good = FakeWorker(), FakeWorker()
    engine = start(bad, good)
    bad.broken["/update_weights"] = 500
    engine.update_weights(WEIGHTS, 1)
    assert list(engine.fleet.down) == [bad.url]
    assert engine.policy_version == 1
    assert good.version == engine.fleet.version_name != bad.version
    assert token_ids(generate(engine)) == undisturbed()
    assert bad.bodies == []


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update", "/reset_prefix_cache"])
def test_a_worker_whose_push_failed_serves_again_after_the_next(start: Any, path: str) -> None:
    worker = FakeWorker()  # it goes on paused, as vLLM does: requests wait until /resume
    engine = start(worker)
    worker.broken[path] = 500
    engine.update_weights(WEIGHTS, 1)
    assert engine.policy_version == -1
    worker.broken.clear()
    engine.health()
    engine.update_weights(WEIGHTS, 1)
    assert engine.policy_version == 1
    assert token_ids(generate(engine)) == undisturbed()


def test_a_worker_that_another_trainer_left_paused_is_taken_into_service(start: Any) -> None:
    worker = FakeWorker()
    worker.serving.clear()
    worker.updating = True  # and in the middle of a push
    assert token_ids(generate(start(worker))) == undisturbed()


@pytest.mark.parametrize("with_another", [True, full(False)])
def test_a_pause_that_comes_late_does_not_stop_a_run_for_ever(start: Any, with_another: bool) -> None:
    # The first push gives the pause up. The worker obeys it later, while it samples.
    late, other = FakeWorker(gate=Event()), FakeWorker(gate=Event())
    workers = [late, other] if with_another else [late]
    engine = start(*workers, max_sequences=1, call_timeout_s=4.0)  # it is looked at every second
    obey = Event()
    late.held["/pause"] = obey
    engine.push.timeout_s = 2.0
    engine.update_weights(WEIGHTS, 1)
    assert "must be answered within 2 s" in engine.fleet.down[late.url]
    engine.push.timeout_s = 60.0
    engine.health()
    engine.update_weights(WEIGHTS, 1)
    assert engine.policy_version == 1

    def pause_late() -> None:
        wait_until(lambda: late.in_work == 1)
        obey.set()
        wait_until(lambda: not late.serving.is_set())
        for worker in workers:
            assert worker.gate is not None
            worker.gate.set()

    paused = run_in_thread(pause_late)
    if with_another:
        assert token_ids(generate(engine, 1)) == undisturbed(1)
    else:
        with pytest.raises(WorkersLost):
            generate(engine, 1)
    paused.result()
    assert "paused" in engine.fleet.down[late.url]
    engine.health()
    engine.update_weights(WEIGHTS, 1)  # the next push lets it serve again
    assert token_ids(generate(engine, 1)) == undisturbed(1)
    assert engine.fleet.down == {}


def test_a_push_goes_to_every_worker_in_this_order(start: Any) -> None:
    worker = FakeWorker()
    engine = start(worker, step=None)
    worker.calls.clear()
    engine.update_weights(WEIGHTS, 7)
    assert [call.removeprefix("POST /") for call in worker.calls] == [
        "pause",
        "collective_rpc",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "resume",
    ]
    assert engine.policy_version == 7
    assert worker.version.endswith("-000007")


def test_weights_that_another_run_left_are_not_trusted(start: Any) -> None:
    worker = FakeWorker()
    first = start(worker, step=4)
    second = start(worker, step=None)
    assert first.fleet.version_name[:-7] != second.fleet.version_name[:-7]
    second.health()
    assert second.policy_version == -1
    with pytest.raises(WorkersLost):
        generate(second)
    second.update_weights(WEIGHTS, 4)
    first.health()  # the first one is no longer served by it
    assert first.policy_version == -1


def test_verify_accepts_the_trainers_log_probs_and_refuses_others(start: Any) -> None:
    good = FakeWorker(score=lambda ids: [score - 4e-4 for score in TRAINER_SCORES])
    other = FakeWorker(score=lambda ids: [score - 6e-4 for score in TRAINER_SCORES])
    engine = start(good, other)
    with pytest.raises(EngineError, match=f"{other.url} must hold the trainer's weights of step 0"):
        engine.verify([1, 2, 3, 4], {0: TRAINER_SCORES})
    other.dtype = "bfloat16"  # one step of rounding is larger than in float32
    start(good, other).verify([1, 2, 3, 4], {0: TRAINER_SCORES})


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"push": GlooPush(dtype="bfloat16")}, torch.float32), ({}, torch.bfloat16)],
    ids=["pushed_in_bfloat16", "trained_in_bfloat16"],
)
def test_the_coarser_of_trainer_and_worker_bounds_a_difference(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    with FakeWorker(score=lambda ids: [score - 0.05 for score in TRAINER_SCORES]) as worker:
        engine = VLLMEngine([worker.url], **options)
        start_engine(engine, tmp_path, dtype)
        engine.fleet.workers[0].state = fleet.State.CURRENT
        engine.verify([1, 2, 3, 4], {0: TRAINER_SCORES})
        assert not engine.unverified
        with pytest.raises(EngineError, match=r"at most 0\.1 is rounding"):
            engine.verify([1, 2, 3, 4], {0: [score - 0.2 for score in TRAINER_SCORES]})
        engine.close()


def test_verify_tells_that_a_worker_holds_an_earlier_step(start: Any) -> None:
    engine = start(FakeWorker(score=lambda ids: TRAINER_SCORES), step=6)
    with pytest.raises(EngineError, match="those of step 5: later pushes have not arrived"):
        engine.verify([1, 2, 3, 4], {5: TRAINER_SCORES, 6: [-1.1, -2.0, -3.0]})


@pytest.mark.parametrize("answer", [500, {}, {"choices": [{"prompt_logprobs": [None]}]}, b"<html>"])
def test_a_worker_that_cannot_score_is_lost(start: Any, answer: Any) -> None:
    bad, good = FakeWorker(), FakeWorker(score=lambda ids: TRAINER_SCORES)
    engine = start(bad, good)
    bad.broken["/v1/completions"] = answer
    engine.verify([1, 2, 3, 4], {0: TRAINER_SCORES})
    assert list(engine.fleet.down) == [bad.url]


def test_disagreement_by_hand() -> None:
    # Distances are means of |difference|: 0.3 / 2 to the latest.
    scores, latest = [-1.0, -2.0], [-1.3, -2.0]
    assert find_disagreement(scores, {4: latest}, bound=0.15 + 1e-9) is None
    assert "0.15 nats per token" in str(find_disagreement(scores, {4: latest}, bound=0.14))
    # An earlier step at 0.03 is more than four times as near, one at 0.05 is not; the bound allows both.
    near, not_so_near = [-1.06, -2.0], [-1.1, -2.0]
    told = str(find_disagreement(scores, {3: near, 4: latest}, bound=1.0))
    assert "0.15 from those of step 4 and by 0.03 from those of step 3" in told.replace("nats per token ", "")
    assert find_disagreement(scores, {3: not_so_near, 4: latest}, bound=1.0) is None
    assert find_disagreement([math.nan, -2.0], {4: latest}, bound=1.0) is not None


# Pushes


def sent_as(tensor: Tensor, dtype: torch.dtype, piece_bytes: int) -> list[Tensor]:
    """The bytes of each piece as they are sent, one after the other."""
    staging = Staging(piece_bytes)
    return [staging.fill(piece, dtype).wait().clone() for piece in split_pieces(tensor, dtype, piece_bytes)]


def test_pieces_hold_the_same_bytes_and_copy_nothing_they_need_not() -> None:
    tensor = torch.randn(2, 5)
    cut = sent_as(tensor, torch.float32, 16)
    assert [len(piece) for piece in cut] == [16, 16, 8]
    assert torch.equal(torch.cat(cut).view(torch.float32), tensor.view(-1))
    second = list(split_pieces(tensor, torch.float32, 16))[1]
    assert Staging(16).fill(second, torch.float32).data.data_ptr() == tensor.data_ptr() + 16
    halved = sent_as(tensor, torch.bfloat16, 6)
    assert [len(piece) for piece in halved] == [6, 6, 6, 2]
    assert torch.equal(torch.cat(halved).view(torch.bfloat16), tensor.bfloat16().view(-1))
    turned = torch.cat(sent_as(tensor.T, torch.float32, 1000)).view(torch.float32)
    assert torch.equal(turned, tensor.T.reshape(-1))
    assert [len(piece) for piece in split_pieces(torch.tensor(3.0), torch.float32, 1)] == [
        1
    ]  # never half a number


def test_a_piece_is_filled_while_the_one_before_is_sent() -> None:
    staging = Staging(4)
    first, second, third = (torch.full((2,), value) for value in (1.0, 2.0, 3.0))
    sent = staging.fill(first, torch.bfloat16)
    assert sent.copied
    following = staging.fill(second, torch.bfloat16)
    assert sent.wait().view(torch.bfloat16).tolist() == [1.0, 1.0]  # it may still be on its way
    assert staging.fill(third, torch.bfloat16).data.data_ptr() == sent.data.data_ptr()
    assert following.wait().view(torch.bfloat16).tolist() == [2.0, 2.0]


def test_a_gloo_push_fills_a_buffer_while_the_other_is_on_its_way(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: dict[str, Any] = {}
    worker = gloo_worker("one", received, lambda f, *a: f(*a))
    push = GlooPush(bucket_mib=1, timeout_s=60.0, dtype="bfloat16")
    engine = start(worker, push=push, step=None)
    in_flight: list[int] = []
    fill = Staging.fill

    def counted(self: Staging, piece: Tensor, dtype: torch.dtype) -> Any:
        in_flight.append(len(push.in_flight))
        return fill(self, piece, dtype)

    monkeypatch.setattr(Staging, "fill", counted)
    weights = [(str(i), torch.randn(300_000 + i)) for i in range(4)]  # each of 600 kB on its way
    weights.append(("large", torch.randn(1_300_001)))  # 2.6 MB: three pieces
    engine.update_weights(weights, 3)
    assert engine.policy_version == 3
    assert in_flight == [0, *[1] * 6]
    for name, tensor in weights:
        assert torch.equal(received["one"][name], tensor.bfloat16()), name


def test_gathered_groups_keep_order_and_bound_and_let_a_large_tensor_go_alone() -> None:
    sizes = [2, 2, 3, 9, 1, 4]  # floats; at most 5 of them, 20 bytes, in a group
    tensors = [(str(i), torch.full((size,), float(i))) for i, size in enumerate(sizes)]
    groups = [[int(tensor[0]) for tensor in group] for group in gather_in_groups(tensors, 20)]
    assert groups == [[0, 1], [2], [3], [4, 5]]
    assert [len(group) for group in gather_in_groups(tensors, 0)] == [1] * 6
    assert list(gather_in_groups([], 20)) == []


def test_a_disk_push_writes_whole_folders_and_deletes_the_one_before(start: Any, tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    def load(info: dict[str, str]) -> None:
        assert not list(tmp_path.rglob("*.tmp"))
        files = sorted(Path(info["folder"]).glob("*.safetensors"))
        seen.append({name: tensor for file in files for name, tensor in load_file(file).items()})

    engine = start(FakeWorker(on_update=load))
    engine.update_weights([(name, tensor + 1) for name, tensor in WEIGHTS], 1)
    engine.update_weights([("turned", WEIGHTS[0][1].T)], 2)
    for tensors, change in zip(seen, (0, 1), strict=False):
        assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
            name: (t.dtype, (t + change).tolist()) for name, t in WEIGHTS
        }
    assert seen[2]["turned"].tolist() == WEIGHTS[0][1].T.tolist()
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == [engine.fleet.version_name]


def test_a_disk_push_leaves_alone_what_it_has_not_written(start: Any, tmp_path: Path) -> None:
    precious = tmp_path / "pushed" / "my-datasets" / "row.json"
    precious.parent.mkdir(parents=True)
    precious.write_text("{}")
    engine = start(FakeWorker())
    engine.update_weights(WEIGHTS, 1)
    assert precious.exists()


def test_a_folder_that_cannot_be_written_is_an_engine_error(start: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = start(FakeWorker(), push=DiskPush(folder=str(tmp_path / "file")), step=None)
    with pytest.raises(EngineError, match="must be written to"):
        engine.update_weights(WEIGHTS, 0)


@pytest.mark.full
def test_an_adapter_is_loaded_by_its_version_and_the_one_before_dropped(
    tiny_model: str, tmp_path: Path
) -> None:
    model = load_model(tiny_model)
    add_adapter(model, LoRA(rank=2, alpha=4.0), seed=0)
    tensors = list_adapter_weights(dict(model.named_parameters()))
    push = AdapterPush(folder=str(tmp_path / "pushed"))
    with FakeWorker() as worker, closing(VLLMEngine([worker.url], push=push)) as engine:
        engine.start(model, FakeTokenizer(), tmp_path)
        for step in (3, 4):
            engine.update_weights(tensors, step)
            [adapter] = worker.adapters
            assert adapter == worker.version
            worker.bodies.clear()
            assert token_ids(generate(engine)) == undisturbed()
            assert {body["model"] for body in worker.bodies} == {adapter}
        [folder] = (tmp_path / "pushed").iterdir()
        pushed = load_file(folder / "adapter_model.safetensors")
        assert pushed.keys() == dict(tensors).keys()
        assert all(torch.equal(pushed[name], tensor) for name, tensor in tensors)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (2, 4.0)  # the worker scales by their ratio


def gloo_worker(name: str, received: dict[str, Any], call: Callable[..., Any]) -> FakeWorker:
    """A fake that takes weights over gloo, where `call` lets the functions run."""

    def update(info: dict[str, Any]) -> None:
        received[name] = call(receive_gloo, name, info)

    return FakeWorker(on_init=lambda info: call(join_gloo, name, info), on_update=update)


def test_a_gloo_push_arrives_in_another_process_and_outlives_its_death(start: Any) -> None:
    received: dict[str, Any] = {}
    big = torch.randn(300_000)  # 1.2 MB: two pieces
    weights = [*WEIGHTS, ("big", big), ("scalar", torch.tensor(2.5))]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        there = gloo_worker("there", received, lambda f, *a: pool.submit(f, *a).result())
        here = gloo_worker("here", received, lambda f, *a: f(*a))
        engine = start(there, here, push=GlooPush(bucket_mib=1, timeout_s=60.0), step=None)
        for step in range(2):  # they meet once
            engine.update_weights(weights, step)
            assert engine.policy_version == step
            for name in ("there", "here"):
                assert received[name].keys() == dict(weights).keys()
                for key, tensor in weights:
                    assert received[name][key].dtype == tensor.dtype
                    assert torch.equal(received[name][key], tensor)
        assert there.calls.count("POST /init_weight_transfer_engine") == 1

        for process in pool._processes.values():
            process.kill()
        engine.update_weights(weights, 2)
        assert list(engine.fleet.down) == [there.url]
        assert engine.policy_version == 2


def test_a_gloo_push_may_travel_in_another_type(start: Any) -> None:
    received: dict[str, Any] = {}
    worker = gloo_worker("one", received, lambda f, *a: f(*a))
    start(worker, push=GlooPush(timeout_s=60.0, dtype="bfloat16")).update_weights(WEIGHTS, 1)
    assert torch.equal(received["one"]["a.weight"], WEIGHTS[0][1].bfloat16())


class TornNCCL:
    """Stands for vLLM's trainer-side code: drives workers by a SyncClient; NCCL may break off midway."""

    def __init__(self, push: NCCLPush, workers: list[WorkerClient]) -> None:
        self.client = SyncClient(push, workers)
        self.breaks = False
        self.source: Any = None

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"names": [name for name, _ in self.source]})
        if self.breaks:
            raise RuntimeError("NCCL communicator was aborted")
        self.client.finish_weight_update()

    def shutdown(self) -> None: ...


def test_workers_of_a_torn_nccl_push_sample_only_after_a_whole_one(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlt_lightning.engines.nccl.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr("rlt_lightning.engines.nccl.build_source", lambda bucket, dtype: list(bucket))
    stream = SimpleNamespace(synchronize=lambda: None)
    for name, value in (
        ("is_available", True),
        ("current_device", 0),
        ("set_device", None),
        ("current_stream", stream),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    updates: list[list[str]] = []
    workers = [FakeWorker(on_update=lambda info: updates.append(info["names"])) for _ in range(2)]
    push = NCCLPush(timeout_s=10.0)
    push.bucket_bytes = 24  # the first tensor fills a bucket
    groups: list[list[str]] = []

    def form_group(members: list[WorkerClient]) -> None:
        if push.engine is None:
            groups.append([worker.url for worker in members])
            push.engine = TornNCCL(push, members)

    monkeypatch.setattr(push, "form_group", form_group)
    engine = start(*workers, push=push, step=1)
    assert updates == [["a.weight"]] * 2 + [["b.bias"]] * 2  # one update, in parts
    assert token_ids(generate(engine)) == undisturbed()
    push.engine.breaks = True
    updates.clear()
    engine.update_weights(WEIGHTS, 2)
    assert updates == [["a.weight"]] * 2  # what follows is not sent
    assert len(engine.fleet.down) == 2
    engine.health()  # they answer again
    assert engine.policy_version == -1
    with pytest.raises(WorkersLost):
        generate(engine)
    assert not any(worker.serving.is_set() for worker in workers)  # paused: other clients wait too
    for worker in workers:
        worker.calls.clear()
    engine.update_weights(WEIGHTS, 2)
    assert engine.policy_version == 2
    assert len(groups) == 2
    assert token_ids(generate(engine)) == undisturbed()
    for worker in workers:
        begun = [call for call in worker.calls if call.startswith("POST")][:3]
        # The extension forgets the layers that were half loaded, whichever backend loaded them.
        assert begun == ["POST /pause", "POST /collective_rpc", "POST /start_weight_update"]


def test_nccl_sends_the_workers_type_if_it_is_narrower() -> None:
    tensor, token = torch.randn(3, 5), torch.arange(4)
    sent = dict(WeightSource([("a", tensor), ("b", token)], torch.bfloat16).named_parameters())
    assert {name: out.dtype for name, out in sent.items()} == {"a": torch.bfloat16, "b": torch.int64}
    assert torch.equal(sent["a"].full_tensor(), tensor.bfloat16())
    assert torch.equal(sent["b"].full_tensor(), token)
    assert sent["a"].shape == (3, 5)
    same = dict(WeightSource([("a", tensor.bfloat16())], torch.float32).named_parameters())
    assert same["a"].full_tensor().dtype == torch.bfloat16  # a worker in fp32 gets no more than there is
    assert dict(WeightSource([("a", tensor)], None).named_parameters())["a"].dtype == torch.float32


def test_nccl_asks_all_workers_for_their_type() -> None:
    workers = [WorkerClient(f"http://a:{port}") for port in (1, 2)]
    for worker in workers:
        worker.dtype = "bfloat16"
    assert find_common_dtype(workers) == torch.bfloat16
    workers[0].dtype = "float16"
    assert find_common_dtype(workers) is None


def test_the_first_gloo_push_to_many_workers_reaches_all(start: Any) -> None:
    received: dict[str, Any] = {}
    workers = [gloo_worker(f"w{i}", received, lambda f, *a: f(*a)) for i in range(6)]
    engine = start(*workers, push=GlooPush(timeout_s=60.0))
    assert engine.fleet.down == {}
    assert sorted(received) == [f"w{i}" for i in range(6)]


def test_an_address_that_is_not_ours_is_an_engine_error(start: Any) -> None:
    with pytest.raises(EngineError, match="203"):
        start(gloo_worker("one", {}, lambda f, *a: f(*a)), push=GlooPush(timeout_s=2.0, host="203.0.113.7"))


def test_a_worker_that_refuses_the_weights_says_why(start: Any) -> None:
    worker = gloo_worker("one", {}, lambda f, *a: f(*a))
    worker.broken["/update_weights"] = 500
    engine = start(worker, push=GlooPush(timeout_s=2.0), step=None)
    engine.update_weights([("big", torch.zeros(30_000_000))], 1)
    assert "/update_weights was refused with status 500" in engine.fleet.down[worker.url]


def test_a_group_of_tensors_is_let_go_before_the_next_is_gathered() -> None:
    tensors = [(str(i), torch.zeros(1000)) for i in range(4)]
    seen: list[list[Tensor]] = []
    for group in gather_in_groups(tensors, 4000):
        assert all(earlier == [] for earlier in seen)
        seen.append(group)
    assert len(seen) == 4


def test_a_key_that_no_header_takes_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "geheim\u00fc")
    with pytest.raises(InputError, match="must be printable ASCII") as refused:
        VLLMEngine(["http://127.0.0.1:1"])
    assert "geheim" not in str(refused.value)


def test_a_token_outside_the_vocabulary_is_garbage(start: Any) -> None:
    worker = FakeWorker()
    engine = start(worker)
    engine.vocab_size = 50  # the fake's tokens are all larger
    with pytest.raises(WorkersLost, match="not in the vocabulary"):
        generate(engine)


def test_what_workers_hold_is_unknown_after_closing(start: Any) -> None:
    engine = start(FakeWorker())
    assert engine.policy_version == 0
    engine.close()
    assert engine.policy_version == -1
    assert engine.unverified


# Workers with weights of their own


def test_a_plain_server_is_asked_only_what_every_server_answers(start: Any) -> None:
    worker = FakeWorker(dev_mode=False, score=lambda ids: TRAINER_SCORES)
    engine = start(worker, push=NoPush())
    assert engine.policy_version == 0
    assert engine.unverified
    engine.verify([1, 2, 3, 4], {0: TRAINER_SCORES})
    assert not engine.unverified
    assert token_ids(generate(engine)) == undisturbed()
    engine.health()
    routes = {call.partition(" ")[2] for call in worker.calls}
    assert routes == {"/health", "/v1/models", "/v1/completions"}


def test_a_plain_server_with_another_model_is_found(start: Any) -> None:
    engine = start(FakeWorker(dev_mode=False, score=lambda ids: [-1.0, -2.0, -4.0]), push=NoPush())
    with pytest.raises(EngineError, match=r"differ by 0.33 nats per token .* It serves another model"):
        engine.verify([1, 2, 3, 4], {0: TRAINER_SCORES})


def test_training_with_workers_that_are_pushed_nothing_is_refused(start: Any) -> None:
    engine = start(FakeWorker(dev_mode=False), push=NoPush())
    engine.update_weights(WEIGHTS, 0)  # a worker that came back
    with pytest.raises(InputError, match=r"the trainer's have changed. Train with .*GlooPush"):
        engine.update_weights(WEIGHTS, 1)


@pytest.mark.parametrize("raw", [True, False])
def test_a_plain_server_needs_no_local_model(raw: bool, start: Any, tmp_path: Path) -> None:
    endings = ("eos", "length")
    worker = FakeWorker(dev_mode=False, endings=endings, raw_log_probs=raw)
    engine = VLLMEngine([worker.url], push=NoPush())
    engine.start(None, FakeTokenizer(), tmp_path)
    assert engine.policy_version == 0
    groups = sample_groups(engine, PROMPTS, SAMPLING, 2, "", SEEDS)
    assert token_ids(groups) == undisturbed(endings=endings)
    for completion in (completion for group in groups for completion in group):
        # Raw ones are not those of the temperature that the completion was sampled at.
        assert (completion.log_probs is None) == raw
    assert {(len(body["stop"]), len(body["stop_token_ids"])) for body in worker.bodies} == {(0, 0)}
    engine.close()
    worker.close()
    assert engine.policy_version == -1


def test_a_plain_server_that_dies_is_waited_for_and_asked_for_the_rest(start: Any) -> None:
    worker = FakeWorker(dev_mode=False, faults=("",) * 6 + ("die",))
    options = {"max_sequences": 1, "max_retries": 0}
    engine = start(worker, step=None, push=NoPush(), **options)
    with pytest.raises(WorkersLost):  # the trainer must say which weights it takes them to hold
        sample_all(engine, build_requests(PROMPTS, SEEDS, 2), SAMPLING, END)
    engine.close()
    engine.start(None, FakeTokenizer(), Path())

    def reopen() -> None:
        wait_until(lambda: worker.server is None)
        worker.open()

    reopened = run_in_thread(reopen)
    assert token_ids(sample_all(engine, build_requests(PROMPTS, SEEDS, 2), SAMPLING, END)) == undisturbed()
    reopened.result()
    assert_each_prompt_once(worker)


def test_a_plain_server_can_be_launched(tmp_path: Path) -> None:
    launch = Launch(executable=fake_vllm(tmp_path), model="a/folder", start_deadline_s=120.0)
    engine = VLLMEngine(launch=launch, push=NoPush())
    try:
        engine.start(None, FakeTokenizer(), tmp_path)
        [server] = servers_of(engine)
        assert "a/folder" in server.command
        assert not [word for word in server.command if "transfer" in word or "extension" in word]
        assert token_ids(generate(engine)) == undisturbed()
        assert server.process is not None
        os.killpg(server.process.pid, signal.SIGKILL)
        assert (
            token_ids(sample_all(engine, build_requests(PROMPTS, SEEDS, 2), SAMPLING, END)) == undisturbed()
        )
    finally:
        engine.close()


@pytest.mark.full
def test_validation_takes_plain_servers_and_training_does_not(tiny_model: str, tmp_path: Path) -> None:
    with worker_of(tiny_model, dev_mode=False) as worker:
        options = ["--config=tests/rlt.yaml", "--config=configs/add/vllm.yaml"]
        options += [f"--rollouts.engine.init_args.urls=[{worker.url}]"]
        options += ["--rollouts.engine.init_args.push=rlt_lightning.engines.NoPush"]
        options += [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}", "--data.val_rows=2"]
        options += ["--rollouts.sampling.max_completion_length=4", "--data.num_embedded_rows=8"]
        result = rlt("validate", *options, f"--output_dir={tmp_path / 'validate'}")
        assert result.returncode == 0, result.stderr
        assert worker.delivered
        result = rlt("fit", *options, "--trainer.max_steps=2", f"--output_dir={tmp_path / 'fit'}")
        assert result.returncode == 2
        assert "NoPush leaves workers the weights that they serve" in result.stderr
        assert {call.partition(" ")[2] for call in worker.calls} == {
            "/health",
            "/v1/models",
            "/v1/completions",
        }


def test_what_a_plain_server_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs workers that are pushed weights"):
        VLLMEngine(["http://127.0.0.1:1"], push=NoPush(), sleep=True)
    with pytest.raises(InputError, match=r"push is GlooPush. Set it to rlt_lightning.engines.NoPush"):
        VLLMEngine(["http://127.0.0.1:1"]).start(None, None, tmp_path)
    with pytest.raises(InputError, match=r"launch.model must name what the workers load"):
        VLLMEngine(launch=Launch(), push=NoPush()).start(None, None, tmp_path)


def test_every_prompt_may_have_a_limit_of_its_own(start: Any) -> None:
    worker = FakeWorker(endings=("length",))
    engine = start(worker)
    limits = [1, 2, 3, 4, 5, 6, 7, 2045]
    groups = sample_groups(engine, PROMPTS, SAMPLING, 1, END, SEEDS, limits)
    assert [len(completion.token_ids) for (completion,) in groups] == limits
    with pytest.raises(InputError, match="need 2049"):
        sample_groups(engine, PROMPTS, SAMPLING, 1, END, SEEDS, [*limits[:-1], 2046])


# Workers that are launched

TREE = (  # a worker with a child of its own that does not listen to SIGTERM
    "import os, signal, subprocess, sys, time\n"
    "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)'\n"
    "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "print('pids', os.getpid(), child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_in(log: Path) -> list[int]:
    """Those of worker and child, once they are there."""
    wait_until(lambda: log.exists() and bool(re.search(r"pids \d+ \d+", log.read_text())))
    found = re.findall(r"pids (\d+) (\d+)", log.read_text())
    return [int(pid) for pid in found[-1]]


def test_the_waits_for_weights_name_their_size(
    start: Any, miniature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    engine = launched(tmp_path, model=miniature)
    start_engine(engine, tmp_path)
    engine.close()
    assert f"starting `fake-vllm serve {miniature}` (0.7 MB; log: {tmp_path}" in capfd.readouterr().err
    waits: list[str] = []
    monkeypatch.setattr(fleet, "waiting_for", lambda what, *_: waits.append(what) or nullcontext())
    worker = FakeWorker()
    start(worker, step=None).update_weights([("a", torch.zeros(1000, 1000))], 3)
    assert waits[-1] == f"vLLM worker {worker.url} to take the weights of step 3 (4.0 MB) by DiskPush"


def test_stop_ends_a_server_with_all_that_it_started(tmp_path: Path) -> None:
    server = LocalServer([sys.executable, "-c", TREE], {}, tmp_path / "worker.log")
    server.start()
    pids = pids_in(server.log)
    assert all(map(alive, pids))
    assert server.find_error() is None
    server.stop()
    wait_until(lambda: not any(map(alive, pids)))
    server.stop()  # safe twice


def test_a_killed_server_can_be_started_again(tmp_path: Path) -> None:
    server = LocalServer([sys.executable, "-c", TREE], {}, tmp_path / "worker.log")
    server.start()
    first = pids_in(server.log)
    server.kill()
    wait_until(lambda: not any(map(alive, first)))
    server.start()
    wait_until(lambda: pids_in(server.log) != first)
    second = pids_in(server.log)
    assert all(map(alive, second))
    server.stop()
    wait_until(lambda: not any(map(alive, second)))


@pytest.mark.full
def test_a_killed_trainer_takes_its_server_with_it(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    trainer = (
        "import sys, time; from pathlib import Path; from rlt_lightning.engines.launch import LocalServer\n"
        "LocalServer([sys.executable, '-c', sys.argv[1]], {}, Path(sys.argv[2])).start(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", trainer, TREE, str(log)])
    wait_until(lambda: log.exists() or process.poll() is not None)
    pids = pids_in(log)
    assert all(map(alive, pids))
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, pids)))


def test_a_server_that_ended_tells_its_last_error(tmp_path: Path) -> None:
    code = "print('ValueError: too early'); print('OSError: no such model'); print('bye')"
    server = LocalServer([sys.executable, "-c", code], {}, tmp_path / "worker.log")
    server.start()
    wait_until(lambda: server.find_error() is not None)
    assert server.find_error() == f"OSError: no such model (log: {server.log})"
    server.stop()


def test_a_launched_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    engine = launched(tmp_path, num_workers=2)
    start_engine(engine, tmp_path)
    try:
        engine.update_weights(WEIGHTS, 0)
        assert token_ids(generate(engine)) == undisturbed()
        first, second = servers_of(engine)
        assert first.process is not None
        os.killpg(first.process.pid, signal.SIGKILL)
        assert token_ids(generate(engine)) == undisturbed()
        assert list(engine.fleet.down) == [engine.fleet.workers[0].url]

        def recovers() -> bool:
            engine.health()
            return not engine.fleet.down

        wait_until(recovers)
        assert engine.policy_version == -1
        engine.update_weights(WEIGHTS, 0)
        assert engine.policy_version == 0
        groups = [server.process.pid for server in (first, second) if server.process]
    finally:
        engine.close()
    wait_until(lambda: not any(map(alive, groups)))


def test_a_server_of_somebody_else_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    with FakeWorker() as stranger:
        launch = Launch(executable=fake_vllm(tmp_path), port=stranger.port, start_deadline_s=120.0)
        engine = VLLMEngine(launch=launch, push=DiskPush(folder=str(tmp_path / "weights")))
        with pytest.raises(EngineError, match=r"must serve the model 'teacher-|must start, but ended"):
            start_engine(engine, tmp_path)
        assert stranger.bodies == []


def test_the_key_of_a_launched_worker_is_not_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    engine = launched(tmp_path)
    start_engine(engine, tmp_path)  # the fake refuses calls without it
    [server] = servers_of(engine)
    assert "s3cret" not in " ".join(server.command)
    engine.close()
