"""The vLLM engine against fake servers: its requests, its checks of answers, and what it does on failures."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Event
from typing import Any

import pytest
import torch
from cases import full
from commands import wait_until
from fake_worker import END, FakeTokenizer, FakeWorker, join_gloo, made_up, receive
from fleets import (  # noqa: F401
    PROMPTS,
    SAMPLING,
    SEEDS,
    WEIGHTS,
    assert_each_prompt_once,
    generate,
    generate_until_lost,
    launched,
    processes_of,
    start,
    start_engine,
    token_ids,
    undisturbed,
)
from kills import is_alive
from sampling import sample_groups
from torch import Tensor

from rlt_lightning.engines import (
    Engine,
    EngineError,
    GlooPush,
    IPCPush,
    Launch,
    NoPush,
    Sampling,
    VLLMEngine,
    WeightPush,
    WorkersLost,
)
from rlt_lightning.engines.base import find_disagreement
from rlt_lightning.engines.launch import start_server, stop_server
from rlt_lightning.engines.push import BucketPush
from rlt_lightning.engines.threads import run_in_background as run_in_thread
from rlt_lightning.models.weights import gather_in_groups
from rlt_lightning.types import Completion, InputError
from rlt_lightning.worker.ipc import open_buffer

pytestmark = pytest.mark.filterwarnings("ignore:Lost vLLM worker")
TRAINER_SCORES = [-1.0, -2.0, -3.0]


# What is asked and what comes back


def test_a_request_forbids_rows_without_a_token(start: Any) -> None:
    worker = FakeWorker()
    engine = start(worker)
    assert engine.spare == {}
    engine.close()
    engine.num_ids = 49150  # of 49152 rows
    start_engine(engine, Path())
    engine.update_weights(WEIGHTS, 0)
    sample_groups(engine, [[3, 1, 4]], Sampling(max_completion_length=5), 1, END, [7])
    assert worker.bodies[0]["logit_bias"] == {"49150": -100, "49151": -100}


def test_a_request_holds_the_token_ids_and_every_sampling_field(start: Any) -> None:
    worker = FakeWorker()
    sampling = Sampling(0.6, 0.9, 40, 0.05, 1.1, max_completion_length=5)
    engine = start(worker, max_sequences=1)
    sample_groups(engine, [[3, 1, 4]], sampling, 4, END, [2**62 + 17])  # the seed is cut to 62 bits
    expected = {
        "model": "teacher",
        "prompt": [3, 1, 4],
        "max_tokens": 5,
        "stop": [END],
        "stop_token_ids": [2, 5],
    }
    expected |= {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    expected |= {"skip_special_tokens": False, "logprobs": 0, "return_token_ids": True}
    assert worker.bodies == [expected | {"seed": 17 + number} for number in range(4)]


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


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_sent(start: Any) -> None:
    worker = FakeWorker()
    engine = start(worker)
    with pytest.raises(InputError, match="--max-model-len of 2048 tokens, but need 2049"):
        sample_groups(engine, [[1], [1] * 1049], Sampling(max_completion_length=1000), 1, END, [0, 0])
    assert worker.bodies == []


def test_the_api_key_is_never_told(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", "s3cret")
    worker = FakeWorker(api_key="s3cret")
    engine = start(worker, api_key_env="OUR_KEY")
    assert token_ids(generate(engine)) == undisturbed()
    worker.always = "400"
    with pytest.raises(EngineError) as refused:
        generate(engine)
    monkeypatch.setenv("OUR_KEY", "0ther")
    with pytest.raises(EngineError, match="was refused with status 401") as wrong:
        start(FakeWorker(api_key="s3cret"), api_key_env="OUR_KEY")
    assert not any(key in f"{error.value!r}" for error in (refused, wrong) for key in ("s3cret", "0ther"))


def test_a_worker_without_dev_routes_is_refused_with_the_variable_to_set(start: Any) -> None:
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        start(FakeWorker(dev_mode=False))


def test_a_greeting_that_fails_inside_the_server_ends_at_once(start: Any) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match="/collective_rpc was refused with status 500"):
        start(FakeWorker(broken={"/collective_rpc": 500}), recovery_timeout_s=600)
    assert time.monotonic() - began < 300  # not after the deadline


def test_a_server_that_is_not_well_yet_is_waited_for(start: Any) -> None:
    worker = FakeWorker(broken={"/health": 503})
    recovers = run_in_thread(lambda: (wait_until(lambda: len(worker.calls) > 1), worker.broken.clear()))
    assert token_ids(generate(start(worker))) == undisturbed()
    recovers.result()


# Faults


FAULTS = ("500", "nan", "drop")


def recover(engine: VLLMEngine, step: int = 0) -> None:
    """Do what a run does when workers are lost."""
    engine.health()
    assert engine.policy_version == -1
    engine.update_weights(WEIGHTS, step)
    assert engine.policy_version == step


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_answer_ends_the_sampling_of_all(start: Any, fault: str) -> None:
    bad, good = FakeWorker(faults=("", fault)), FakeWorker(delay_s=0.01)
    engine = start(bad, good, max_sequences=4)
    found = generate_until_lost(engine, match=bad.url)
    assert engine.policy_version == -1
    recover(engine)
    whole = undisturbed()
    assert all(completion.token_ids == whole[i // 2][i % 2] for i, completion in found.items())
    assert token_ids(generate(engine)) == whole


@pytest.mark.parametrize("fault", ["hang", "die"])
def test_a_worker_that_hangs_or_dies_is_lost_by_the_call_timeout(start: Any, fault: str) -> None:
    bad, good = FakeWorker(faults=("", fault)), FakeWorker(delay_s=0.01)
    engine = start(bad, good, max_sequences=4, call_timeout_s=3.0)
    reason = "must be answered within 3 s, but was not" if fault == "hang" else r"failed \("
    generate_until_lost(engine, match=f"{bad.url}.*{reason}")


def test_a_second_loss_in_one_iteration_ends_the_run(start: Any) -> None:
    worker = FakeWorker(faults=("", "500", "500"))  # the second one has half of a request's completions
    engine = start(worker, max_sequences=1)
    generate_until_lost(engine)
    recover(engine)
    message = f"lost twice in one iteration.*{worker.url}.*--resume true"
    with pytest.raises(EngineError, match=message) as ended:
        generate(engine)
    assert not isinstance(ended.value, WorkersLost)


@pytest.mark.parametrize("fault", ["/health", full("/collective_rpc"), full("/weight_info")])
def test_a_worker_is_lost_if_one_sign_of_life_fails(start: Any, fault: str) -> None:
    # The server may answer while its engine is dead: /health then says 503, or a model worker is not heard.
    bad = FakeWorker(gate=Event())
    engine = start(bad, call_timeout_s=4.0)  # it is looked at every second
    bad.broken[fault] = 503
    generate_until_lost(engine, match="503")


def test_answers_of_a_worker_that_was_restarted_meanwhile_are_dropped(start: Any) -> None:
    fickle, steady = FakeWorker(faults=("restart",)), FakeWorker(delay_s=0.02)
    engine = start(fickle, steady, max_sequences=1, step=3)
    found = generate_until_lost(engine, match=f"{fickle.url} was restarted")
    assert {completion.worker for completion in found.values()} <= {steady.url}
    recover(engine, 3)
    assert fickle.version == steady.version
    assert token_ids(generate(engine)) == undisturbed()


def test_what_came_before_a_loss_is_kept_and_the_rest_follows(start: Any) -> None:
    worker = FakeWorker(faults=("",) * 6 + ("die",), delay_s=0.01)
    engine = start(worker, max_sequences=1)  # one completion at a time
    finished = generate_until_lost(engine, match=worker.url)
    assert sorted(finished) == list(range(6))

    def reopen() -> None:
        wait_until(lambda: worker.server is None)
        worker.restart()
        time.sleep(1.0)  # it is greeted in vain, and waited for
        worker.open()

    reopened = run_in_thread(reopen)
    recover(engine)
    reopened.result()
    rest = sample_groups(engine, PROMPTS[3:], SAMPLING, 2, END, SEEDS[3:])
    whole = [[finished[i], finished[i + 1]] for i in range(0, 6, 2)]
    assert token_ids([*whole, *rest]) == undisturbed()
    assert_each_prompt_once(worker)


def test_a_worker_that_never_comes_back_ends_the_run_with_its_address_and_advice(start: Any) -> None:
    worker = FakeWorker(faults=("die",))
    engine = start(worker, recovery_timeout_s=0.5)
    with pytest.raises(WorkersLost):
        generate(engine)
    with pytest.raises(EngineError, match=rf"must answer within 0.5 s.*{worker.url}.*--resume true"):
        engine.health()


def test_a_refused_request_is_not_sent_again(start: Any) -> None:
    worker = FakeWorker(always="400")
    engine = start(worker, max_sequences=1)
    with pytest.raises(EngineError, match="refused with status 400"):
        generate(engine)
    assert len(worker.bodies) == 1


# Weights and versions


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update", "/reset_prefix_cache"])
def test_after_a_failed_push_all_workers_need_another(start: Any, path: str) -> None:
    bad, good = FakeWorker(), FakeWorker()  # they stay paused, as vLLM does: requests wait until /resume
    engine = start(bad, good)
    assert token_ids(generate(engine)) == undisturbed()
    bad.broken[path] = 500
    engine.update_weights(WEIGHTS, 1)
    assert engine.policy_version == -1
    with pytest.raises(WorkersLost):
        generate(engine)
    bad.broken.clear()
    recover(engine, 1)
    assert token_ids(generate(engine)) == undisturbed()


def test_a_worker_that_another_trainer_left_paused_is_taken_into_service(start: Any) -> None:
    worker = FakeWorker()
    worker.serving.clear()
    worker.updating = True  # and in the middle of a push
    assert token_ids(generate(start(worker))) == undisturbed()


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


@pytest.mark.parametrize("answer", [500, {}, {"choices": [{"prompt_logprobs": [None]}]}, b"<html>"])
def test_a_worker_that_cannot_score_is_lost(start: Any, answer: Any) -> None:
    bad, good = FakeWorker(), FakeWorker(score=lambda ids: TRAINER_SCORES)
    engine = start(bad, good)
    bad.broken["/v1/completions"] = answer
    engine.verify([1, 2, 3, 4], {0: TRAINER_SCORES})
    assert engine.unverified
    assert engine.policy_version == -1


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


def test_gathered_groups_keep_order_and_bound_and_let_a_large_tensor_go_alone() -> None:
    sizes = [2, 2, 3, 9, 1, 4]  # floats; at most 5 of them, 20 bytes, in a group
    tensors = [(str(i), torch.full((size,), float(i))) for i, size in enumerate(sizes)]
    groups = [[int(tensor[0]) for tensor in group] for group in gather_in_groups(tensors, 20)]
    assert groups == [[0, 1], [2], [3], [4, 5]]
    assert [len(group) for group in gather_in_groups(tensors, 0)] == [1] * 6
    assert list(gather_in_groups([], 20)) == []


@pytest.mark.parametrize("kind", [IPCPush, GlooPush])
def test_a_bucket_brings_all_weights_in_pieces(start: Any, kind: type[BucketPush]) -> None:
    received: list[dict[str, Tensor]] = []
    workers = [gloo_worker(f"w{i}") if kind is GlooPush else FakeWorker() for i in range(2)]
    workers[1].dtype = "bfloat16"  # their types differ: the trainer's travels
    push = kind(timeout_s=60.0)
    push.bucket_bytes = 1000
    engine = start(*workers, push=push, step=None)
    large = torch.randn(25, 31)  # 3100 bytes: four pieces
    weights = [*WEIGHTS, ("large", large), ("turned", large.T), ("scalar", torch.tensor(2.5))]
    for step in range(2):
        engine.update_weights([(name, tensor + step) for name, tensor in weights], step)
        assert engine.policy_version == step
        for worker in workers:
            assert worker.tensors.keys() == dict(weights).keys()
            for name, tensor in weights:
                assert worker.tensors[name].dtype == tensor.dtype
                assert torch.equal(worker.tensors[name], tensor + step), name
        received.append(workers[0].tensors)
    assert torch.equal(received[0]["large"], large)  # a copy, which the second push has not changed
    assert list_own_buffers() == []
    meetings = [worker.calls.count("POST /init_weight_transfer_engine") for worker in workers]
    assert meetings == [int(kind is GlooPush)] * 2  # they meet once


def list_own_buffers() -> list[str]:
    """The shared buffers that this process holds open or mapped."""
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    held = files + Path("/proc/self/maps").read_text().splitlines()
    return [file for file in held if "memfd:rlt-" in file]


def test_a_shared_buffer_is_let_go_of_when_a_push_fails(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    worker = FakeWorker(broken={"/update_weights": 500})
    engine = start(worker, step=None)
    engine.update_weights(WEIGHTS, 1)
    assert "/update_weights was refused with status 500" in caplog.text
    assert list_own_buffers() == []


def test_a_worker_opens_no_other_file(tmp_path: Path) -> None:
    with open(tmp_path / "secret", "wb+") as file:
        file.write(bytes(100))
        file.flush()
        info = {"process": os.getpid(), "file": file.fileno(), "name": "rlt-0", "num_bytes": 100}
        with pytest.raises(FileNotFoundError, match="another file"):
            open_buffer(info, torch.device("cpu"))


def test_a_trainer_that_is_killed_leaves_no_memory() -> None:
    code = "from rlt_lightning.worker.ipc import HostBuffer; b = HostBuffer(2**20); b.tensor.fill_(7); "
    code += "import json, time; print(json.dumps(b.share('')), flush=True); time.sleep(600)"
    with Popen([sys.executable, "-c", code], stdout=PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        info = json.loads(trainer.stdout.readline())
        content = open_buffer(info, torch.device("cpu"))
        assert content[9:12].tolist() == [7, 7, 7]
        trainer.kill()
    assert len(list_own_buffers()) == 1  # the kernel keeps it for the reader
    del content
    assert list_own_buffers() == []
    with pytest.raises(FileNotFoundError):
        open_buffer(info, torch.device("cpu"))


def test_launched_workers_share_memory_where_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(VLLMEngine(launch=Launch()).push, GlooPush)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(VLLMEngine(launch=Launch()).push, IPCPush)
    assert isinstance(VLLMEngine(["http://127.0.0.1:1"]).push, GlooPush)


def gloo_worker(name: str, call: Callable[..., Any] = lambda f, *a: f(*a)) -> FakeWorker:
    """A fake that takes weights over gloo, where `call` lets the functions run."""
    worker = FakeWorker(on_init=lambda info: call(join_gloo, name, info))
    worker.on_update = lambda info: worker.tensors.update(call(receive, name, info))
    return worker


@pytest.mark.parametrize("first", [0, 1])
def test_a_gloo_push_arrives_in_another_process_and_outlives_its_death(start: Any, first: int) -> None:
    pools = [ProcessPoolExecutor(1, get_context("spawn")) for _ in range(2)]
    pool = pools[0]
    there = gloo_worker("there", lambda f, *a: pool.submit(f, *a).result())
    workers = [there, gloo_worker("here")][:: -1 if first else 1]
    engine = start(*workers, push=GlooPush(bucket_mib=1, timeout_s=80.0), step=None)
    weights = [*WEIGHTS, ("big", torch.randn(300_000))]  # 1.2 MB: two pieces
    engine.update_weights(weights, 0)
    assert engine.policy_version == 0
    for process in pool._processes.values():
        process.kill()
    engine.update_weights(weights, 1)
    assert engine.policy_version == -1
    pool = pools[1]  # it is restarted
    recover(engine, 2)
    for worker in workers:
        assert torch.equal(worker.tensors["a.weight"], WEIGHTS[0][1])
    for pool in pools:
        pool.shutdown()


@pytest.mark.parametrize("push", [IPCPush, GlooPush])
def test_weights_travel_in_the_workers_type_if_it_is_narrower(push: type[WeightPush], start: Any) -> None:
    worker = gloo_worker("one") if push is GlooPush else FakeWorker()
    worker.dtype = "bfloat16"
    start(worker, push=push(timeout_s=60.0)).update_weights(WEIGHTS, 1)
    assert worker.tensors["a.weight"].dtype == torch.bfloat16
    assert torch.equal(worker.tensors["a.weight"], WEIGHTS[0][1].bfloat16())


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
    with pytest.raises(InputError, match=r"engine's push out"):
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


def pids_in(log: Path) -> list[int]:
    """Those of worker and child, once they are there."""
    wait_until(lambda: log.exists() and bool(re.search(r"pids \d+ \d+", log.read_text())))
    return [int(pid) for pid in re.findall(r"pids (\d+) (\d+)", log.read_text())[-1]]


def test_stop_ends_a_server_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    process = start_server([sys.executable, "-c", TREE], {}, log)
    pids = pids_in(log)
    assert all(map(is_alive, pids))
    stop_server(process)
    wait_until(lambda: not any(map(is_alive, pids)))
    stop_server(process)  # safe twice


def test_a_launched_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    engine = launched(tmp_path, num_workers=2)
    start_engine(engine, tmp_path)
    try:
        engine.update_weights(WEIGHTS, 0)
        assert token_ids(generate(engine)) == undisturbed()
        first, second = processes_of(engine)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        generate_until_lost(engine)
        recover(engine)
        assert processes_of(engine)[0].pid != first.pid
        assert processes_of(engine)[1] is second
        assert token_ids(generate(engine)) == undisturbed()
        groups = [process.pid for process in processes_of(engine)]
    finally:
        engine.close()
    wait_until(lambda: not any(map(is_alive, groups)))


def test_no_command_line_shows_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    engine = launched(tmp_path)
    start_engine(engine, tmp_path)  # the fake refuses calls without it
    [process] = processes_of(engine)
    assert "s3cret" not in " ".join(process.args)
    engine.close()
