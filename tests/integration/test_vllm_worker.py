"""Real vLLM workers on the CPU: pushes, agreement of log-probs, known traps, lost workers."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx2
import pytest
import torch
import yaml
from bespoke import bespoke, student, trained_prompts  # noqa: F401
from cases import slow
from commands import ROOT, path_of_tests, run_rlt, start, wait_until
from fits import metrics, small_fit
from sampling import sample_groups
from tiny import CHAINS
from vllm_runs import EXECUTABLE, NEEDS_VLLM, completions, forked_vllm, processes, worker_pids

from rlt_lightning.engines import (
    EngineError,
    GlooPush,
    HFEngine,
    IPCPush,
    Launch,
    NoPush,
    Sampling,
    VLLMEngine,
    WeightPush,
)
from rlt_lightning.engines.launch import FLOAT32_LOGITS, find_free_port, start_server, stop_server
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.packed import sequence_log_probs

LAUNCH = {
    "executable": str(EXECUTABLE),
    "dtype": "float32",
    "max_model_len": 512,
    "arguments": ["--enforce-eager"],
    "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
}
STOP = "</think>"


pytestmark = NEEDS_VLLM


class Trainer:
    """The trainer's side of an engine, without Lightning: a model whose weights take steps."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = load_model(name, "float32", None, False)
        self.tokenizer = load_tokenizer(name)
        self.folder = folder
        self.version = -1

    def step(self, size: float = 1e-3) -> None:
        """Move every weight a little, as an optimizer does."""
        generator = torch.Generator().manual_seed(self.version + 100)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    def push(self, engine: VLLMEngine) -> None:
        """One optimizer step's push, until it is through."""
        self.version += 1
        engine.health()
        while engine.policy_version != self.version:
            engine.update_weights(list(self.model.named_parameters()), self.version)
            engine.health()

    def log_probs(self, tokens: list[int], prompt_length: int = 1, temperature: float = 1.0) -> list[float]:
        """Log-probs of the tokens after the prompt."""
        return sequence_log_probs(self.model, tokens, temperature)[prompt_length - 1 :].tolist()

    def prompt(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text)
        return ids


TRAPS = {"PYTHONPATH": path_of_tests()}  # with the extension `worker_traps.TrapExtension`


@pytest.fixture(scope="module", params=[IPCPush, slow(GlooPush)])
def push_class(request: pytest.FixtureRequest) -> type[WeightPush]:
    """How weights travel."""
    kind: type[WeightPush] = request.param
    return kind


@pytest.fixture(scope="module")
def server(
    push_class: type[WeightPush], tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A vLLM worker with a tiny model, as a user starts one: its URL."""
    port = find_free_port()
    folder = tmp_path_factory.mktemp("server")
    launch = Launch(**LAUNCH | {"executable": forked_vllm(folder, "sleeping_vllm")})
    command = launch.build_command(0, port, tiny_model, push_class.backend, "teacher")
    command[command.index("--worker-extension-cls") + 1] = "worker_traps.TrapExtension"
    environment = launch.environment | TRAPS | {"VLLM_SERVER_DEV_MODE": "1"}
    process = start_server(command, environment, folder / "worker.log")
    yield f"http://127.0.0.1:{port}"
    stop_server(process)


@pytest.fixture
def trainer(tiny_model: str, tmp_path: Path) -> Trainer:
    return Trainer(tiny_model, tmp_path)


@pytest.fixture
def engine(push_class: type[WeightPush], server: str, trainer: Trainer) -> Iterator[VLLMEngine]:
    """An engine of its own for each test, at the one worker."""
    engine = VLLMEngine(urls=[server], push=push_class(bucket_mib=1, timeout_s=30))
    engine.start(trainer.model, trainer.tokenizer, trainer.folder)
    yield engine
    engine.close()


def ask_worker(engine: VLLMEngine, method: str, *arguments: Any) -> Any:
    """Call a method of `TrapExtension` or of vLLM's worker; its result."""
    body = {"method": method, "args": arguments}
    answer = asyncio.run(engine.fleet.workers[0].call("POST", "/collective_rpc", body, 10))
    return answer["results"][0]


def leave_tied_heads_stale(engine: VLLMEngine, stale: bool) -> None:
    ask_worker(engine, "leave_tied_heads_stale", stale)


def test_pushed_weights_are_the_files_to_the_bit(
    push_class: type[WeightPush], engine: VLLMEngine, trainer: Trainer, tmp_path: Path
) -> None:
    engine.push.bucket_bytes = 100_000  # layers in several buckets, and tensors in several pieces
    trainer.step()
    trainer.model.save_pretrained(tmp_path / "saved")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "saved")}}
    asyncio.run(engine.fleet.workers[0].call("POST", "/collective_rpc", body, 60))
    loaded = ask_worker(engine, "hash_weights")  # by vLLM itself
    other = Trainer(trainer.model.name_or_path, tmp_path)
    other.step(size=0.1)
    other.push(engine)
    assert ask_worker(engine, "hash_weights") != loaded
    trainer.version = other.version
    trainer.push(engine)
    assert ask_worker(engine, "hash_weights") == loaded
    assert ask_worker(engine, "count_open_buffers") == "0"
    assert not any("memfd:rlt-" in os.readlink(file) for file in list_open_files())


def list_open_files() -> list[str]:
    """The files that this process has open, but not the list's own."""
    return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd") if is_open(int(name))]


def is_open(file: int) -> bool:
    with suppress(OSError):
        os.fstat(file)
        return True
    return False


@pytest.mark.slow
def test_a_worker_killed_within_a_bucket_gets_the_next_push(tiny_model: str, tmp_path: Path) -> None:
    trainer = Trainer(tiny_model, tmp_path)
    text = trainer.prompt("The probe, a text of a few words")
    launch = Launch(**LAUNCH | {"executable": forked_vllm(tmp_path)})
    launch.arguments.append("--worker-extension-cls=worker_traps.TrapExtension")  # the last one counts
    launch.environment.update(TRAPS)
    engine = VLLMEngine(launch=launch, push=IPCPush(bucket_mib=1, timeout_s=60), call_timeout_s=20)
    with closing(engine):
        engine.start(trainer.model, trainer.tokenizer, tmp_path)
        trainer.push(engine)
        trainer.step(size=0.05)
        ask_worker(engine, "die_within_update", 5)
        trainer.push(engine)
        assert engine.fleet.losses == 1
        engine.verify(text, {trainer.version: trainer.log_probs(text)})
    assert not any("memfd:rlt-" in os.readlink(file) for file in list_open_files())


def test_float32_logits_follow_every_push(tiny_model: str, tmp_path: Path) -> None:
    """The head is tied and in bfloat16: a copy of it in float32 that no push refreshed would be nats off."""
    trainer = Trainer(tiny_model, tmp_path)
    trainer.model.bfloat16()
    assert trainer.model.config.tie_word_embeddings
    text = trainer.prompt("The probe, a text of a few words, and some more of them")
    nats: dict[str, list[float]] = {}
    for name, arguments in (("rounded", []), ("float32", FLOAT32_LOGITS)):
        options = {"executable": forked_vllm(tmp_path), "dtype": "bfloat16"}
        launch = Launch(**LAUNCH | options | {"arguments": ["--enforce-eager", *arguments]})
        with closing(VLLMEngine(launch=launch, push=IPCPush(timeout_s=60))) as engine:
            engine.start(trainer.model, trainer.tokenizer, tmp_path / name)
            nats[name] = []
            for _ in range(2):
                trainer.step(size=0.05)
                trainer.push(engine)
                scores = asyncio.run(engine.fleet.workers[0].score(text, 60.0))
                with torch.no_grad():
                    states = trainer.model.base_model(torch.tensor([text])).last_hidden_state[0, :-1]
                logits = states.float() @ trainer.model.get_output_embeddings().weight.float().T
                own = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
                nats[name].append(fmean(abs(a - b) for a, b in zip(scores, own, strict=True)))
    print(f"figure: nats from float32 logits: {nats}")
    assert max(nats["float32"] + nats["rounded"]) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_completions_and_log_probs_agree_with_the_trainer_after_every_push(
    temperature: float, engine: VLLMEngine, trainer: Trainer
) -> None:
    sampling = Sampling(temperature=temperature, max_completion_length=16)
    prompts = [
        trainer.prompt(text) for text in ("One and two", "A longer prompt, of some more words than that")
    ]
    for _ in range(3):
        trainer.step(size=0.02)
        trainer.push(engine)
        groups = sample_groups(engine, prompts, sampling, 3, STOP, seeds=[11, 12])
        assert sample_groups(engine, prompts, sampling, 3, STOP, seeds=[11, 12]) == groups
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                expected = trainer.log_probs(prompt + completion.token_ids, len(prompt), temperature or 1.0)
                assert completion.log_probs == pytest.approx(expected, abs=1e-3)
        if temperature:
            assert len({tuple(c.token_ids) for group in groups for c in group}) > 3
            assert [c.seed for c in groups[0]] == [11, 12, 13]


def test_greedy_completions_are_those_of_the_hf_engine(
    smollm2: str, engine: VLLMEngine, trainer: Trainer
) -> None:
    trainer.push(engine)
    hf = HFEngine()
    hf.start(trainer.model, trainer.tokenizer, trainer.folder)
    prompts = [trainer.prompt("Count: one, two,"), trainer.prompt("Hello")]
    sampling = Sampling(temperature=0.0, max_completion_length=12)
    [[first], _] = sample_groups(hf, prompts, sampling, 1, STOP, [0, 0])
    stop = trainer.tokenizer.decode(first.token_ids[5:7])  # a text that comes: both must end with it, alike
    for tag in (STOP, stop):
        ours = sample_groups(engine, prompts, sampling, 1, tag, [0, 0])
        theirs = sample_groups(hf, prompts, sampling, 1, tag, [0, 0])
        assert [[(c.token_ids, c.finish_reason) for c in g] for g in ours] == [
            [(c.token_ids, c.finish_reason) for c in g] for g in theirs
        ]
    assert theirs[0][0].finish_reason == "stop"


def build_forgetful_push(push_class: type[WeightPush]) -> WeightPush:
    """From its second push on, it tells the worker that new weights came and sends none."""
    push: Any = push_class(timeout_s=30)
    send, pushes = push.push, []

    def forget(named_tensors: Any, workers: Any, version: str) -> None:
        pushes.append(version)
        if len(pushes) == 1:
            return send(named_tensors, workers, version)
        for worker in workers:
            push.begin(worker)
            push.finish(worker, version)  # which succeeds, and leaves the old weights in place
            push.resume(worker)

    push.push = forget
    return push


def test_a_skipped_push_is_caught_at_the_next_step(
    push_class: type[WeightPush], server: str, trainer: Trainer
) -> None:
    text = trainer.prompt("The probe, a text of a few words")
    engine = VLLMEngine(urls=[server], push=build_forgetful_push(push_class))
    engine.start(trainer.model, trainer.tokenizer, trainer.folder)
    trainer.push(engine)
    before = {0: trainer.log_probs(text)}
    engine.verify(text, before)
    trainer.step(size=1e-4)  # a small step: log-probs move by less than rounding may be worth
    trainer.push(engine)
    after = trainer.log_probs(text)
    with pytest.raises(EngineError, match=r"weights of step 1, but .* those of step 0: later pushes"):
        engine.verify(text, before | {1: after})
    trainer.step(size=0.1)
    trainer.push(engine)
    with pytest.raises(EngineError, match="stale"):
        engine.verify(text, {2: trainer.log_probs(text)})


def test_a_worker_that_wakes_without_its_weights_is_caught(
    push_class: type[WeightPush], server: str, trainer: Trainer
) -> None:
    text = trainer.prompt("The probe, a text of a few words")
    engine = VLLMEngine(urls=[server], push=build_forgetful_push(push_class), sleep=True)
    engine.start(trainer.model, trainer.tokenizer, trainer.folder)
    trainer.push(engine)
    engine.verify(text, {0: trainer.log_probs(text)})
    engine.put_to_sleep()
    trainer.push(engine)
    with pytest.raises(EngineError, match="fit no earlier step"):
        engine.verify(text, {1: trainer.log_probs(text)})


def test_a_tied_head_left_stale_is_caught_and_our_extension_repairs_it(
    engine: VLLMEngine, trainer: Trainer
) -> None:
    text = trainer.prompt("The probe, a text of a few words")
    assert trainer.model.config.tie_word_embeddings
    trainer.push(engine)
    leave_tied_heads_stale(engine, True)
    try:
        trainer.step(size=0.05)
        trainer.push(engine)
        with pytest.raises(EngineError, match="tied output head"):
            engine.verify(text, {1: trainer.log_probs(text)})
    finally:
        leave_tied_heads_stale(engine, False)
    trainer.step(size=0.05)
    trainer.push(engine)
    engine.verify(text, {2: trainer.log_probs(text)})


def test_a_push_that_broke_off_is_made_good_by_the_next(
    push_class: type[WeightPush], engine: VLLMEngine, trainer: Trainer
) -> None:
    text = trainer.prompt("The probe, a text of a few words")
    trainer.push(engine)

    class Torn(Exception):
        pass

    def tear(*arguments: Any) -> None:
        buckets.append(arguments)
        if len(buckets) == 3:
            raise Torn  # the trainer dies within a layer
        send(*arguments)

    push: Any = engine.push
    buckets: list[Any] = []
    push.bucket_bytes = 100_000
    send, push.send = push.send, tear
    with pytest.raises(Torn):
        engine.update_weights(list(trainer.model.named_parameters()), 7)
    push.close()
    [worker] = engine.fleet.workers
    successor = VLLMEngine(urls=[worker.url], push=push_class(timeout_s=30))  # the next trainer
    successor.start(trainer.model, trainer.tokenizer, trainer.folder)
    trainer.step(size=0.05)
    trainer.push(successor)
    successor.verify(text, {trainer.version: trainer.log_probs(text)})
    successor.close()


def test_cached_prefixes_do_not_outlive_a_push(engine: VLLMEngine, trainer: Trainer) -> None:
    prompt = trainer.prompt("A prefix of more than sixteen tokens, so that a block of it is cached: " * 4)
    sampling = Sampling(temperature=1.0, max_completion_length=4)
    for _ in range(2):
        trainer.step(size=0.05)
        trainer.push(engine)
        [[completion]] = sample_groups(engine, [prompt], sampling, 1, STOP, [5])
        expected = trainer.log_probs(prompt + completion.token_ids, len(prompt))
        assert completion.log_probs == pytest.approx(expected, abs=1e-3)


# Whole runs, with a worker that they launch


def run_config(
    folder: Path, model: str, push: type[WeightPush], executable: str = "", **rollouts: Any
) -> list[str]:
    """`rlt fit` with a launched worker, 4 iterations, validated greedily after each."""
    overlay = yaml.safe_load((ROOT / "configs" / "add" / "vllm_launch.yaml").read_text())
    engine = overlay["rollouts"]["engine"]["init_args"]
    engine["launch"] |= {"executable": executable or forked_vllm(folder), "max_model_len": 512}
    engine["push"] = {"class_path": f"rlt_lightning.engines.{push.__name__}"}
    engine |= rollouts.pop("engine", {})
    overlay["rollouts"] |= {
        "sampling": {"max_completion_length": 24},
        "val_sampling": {"temperature": 0, "max_completion_length": 24},
    } | rollouts
    overlay["trainer"] = {"max_steps": 4, "val_check_interval": 1}
    path = folder / "overlay.yaml"
    path.write_text(yaml.safe_dump(overlay))
    verb, config, *options = fit_options(folder / "run", model)
    return [verb, config, f"--config={path}", *options]


def fit_options(run: Path, model: str) -> list[str]:
    """`rlt fit` of tiny models, which sample in process."""
    few = ["--data.val_rows=1", "--data.num_embedded_rows=9", "--model.group_size=4"]
    return small_fit(model, run, *few, "--model.optimizer.lr=1e-5")


def require_agreement(run: Path, steps: int) -> None:
    assert [*metrics(run)] == list(range(1, steps + 1))
    rows = metrics(run).values()
    largest = max(row[name] for row in rows for name in ("rollout/mismatch_max", "rollout/val_mismatch_max"))
    print(f"figure: log-probs differ by {largest:.1e} nats at most")
    for row in rows:
        assert row["rollout/mismatch_max"] <= 1e-3  # sampled
        assert row["rollout/val_mismatch_max"] <= 1e-3  # greedy
        assert row["policy/grad_norm"] > 0


LORA = ["--model.lora.rank=8", "--model.optimizer.lr=1e-3"]  # moves log-probs by far more than 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "push", "steps", "options"),
    [
        ("miniature", IPCPush, 2, [*CHAINS, "--model.optimizer.lr=1e-3"]),
        ("smollm2", IPCPush, 8, []),
        ("tiny_model", GlooPush, 4, []),
        ("tiny_model", IPCPush, 4, LORA),
    ],
)
def test_a_run_with_the_launch_overlay_stays_within_a_thousandth_nat(
    model: str, push: type, steps: int, options: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = run_config(tmp_path, request.getfixturevalue(model), push, str(EXECUTABLE))
    run_rlt(*config, *options, f"--trainer.max_steps={steps}")
    require_agreement(tmp_path / "run", steps)
    assert worker_pids(tmp_path / "run") == []  # nothing is left behind


@pytest.mark.slow
def test_thoughts_of_a_worker_are_scored_by_the_policy(tmp_path: Path) -> None:
    _, _, overlay, *_ = run_config(tmp_path, "miniature", IPCPush, str(EXECUTABLE))
    options = ["--trainer.max_steps=3", "--data.val_rows=1", f"--output_dir={tmp_path / 'run'}"]
    run_rlt("fit", "--config=laptop/likelihood", overlay, *options)
    require_agreement(tmp_path / "run", 3)


@pytest.mark.parametrize(
    ("strategy", "sleep", "push"),
    [slow("zero3", False, IPCPush), slow("fsdp2", True, IPCPush), ("fsdp2", False, GlooPush)],
)
def test_a_trainer_of_two_processes_with_weights_in_shards_pushes_them_too(
    strategy: str, sleep: bool, push: type[WeightPush], tiny_model: str, tmp_path: Path
) -> None:
    command = run_config(tmp_path, tiny_model, push, engine={"sleep": sleep})
    command += [f"--config=configs/hardware/{strategy}.yaml", "--trainer.devices=2", "--data.val_rows=2"]
    run_rlt(*command)
    require_agreement(tmp_path / "run", 4)  # the weights were compared with every push, too
    log = (tmp_path / "run" / "workers" / "worker-0.log").read_text()
    calls = re.findall(r"POST /(sleep|wake_up|update_weights)\b", log)
    turns = "".join(call[0] for call in calls)  # a sleeping vLLM, on a CPU too, samples nothing
    assert re.fullmatch(r"w(wuws){8}" if sleep else "wu{5}", turns), turns  # 4 steps and 4 validations
    assert worker_pids(tmp_path / "run") == []


def run_with_faults(
    folder: Path, model: str, faults: list[tuple[float, signal.Signals, int]], steps: int
) -> list[str]:
    """Run to the end, hit one of the worker's processes a while after each sign of progress, return losses.

    Args:
        faults: Seconds after an iteration, the signal, and its target: server 0, engine 1 or worker 2.
    """
    engine: dict[str, Any] = {"call_timeout_s": 30.0}
    engine["push"] = {"class_path": "rlt_lightning.engines.IPCPush", "init_args": {"timeout_s": 30.0}}
    command = run_config(folder, model, IPCPush, engine=engine)
    process = start(*command, f"--trainer.max_steps={steps}")
    run = folder / "run"

    def losses() -> list[str]:
        return [line for line in process.stderr.splitlines() if "Lost vLLM worker" in line]

    for number, (delay, fault, target) in enumerate(faults):
        # Two more iterations: the second was sampled by the worker that has come back.
        done = len(metrics(run)) + (2 if number else 1)
        wait_until(lambda done=done: len(metrics(run)) >= done or process.poll() is not None, 600)
        time.sleep(delay)
        end, pids = time.monotonic() + 120, processes(run)
        while len(pids) < 3:  # a worker that is being started again may have fewer yet
            assert process.poll() is None, process.stderr
            assert time.monotonic() < end, "the run stands still"
            time.sleep(0.05)
            pids = processes(run)
        os.kill(pids[target], fault)
        wait_until(lambda number=number: len(losses()) > number or process.poll() is not None, 120)
    process.wait()
    assert process.returncode == 0, process.stderr
    return losses()


STEPS_WITH_FAULTS = 40  # two for each of five faults, and those made while a fault waits for its moment


@pytest.fixture(scope="module")
def calm_run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same data that can lose no worker, since it samples in process."""
    run = tmp_path_factory.mktemp("calm") / "run"
    run_rlt(*fit_options(run, tiny_model), f"--trainer.max_steps={STEPS_WITH_FAULTS}")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
def test_five_faults_at_random_moments_change_nothing(
    fault: signal.Signals, calm_run: Path, tiny_model: str, tmp_path: Path
) -> None:
    chance = random.Random(fault.name)
    faults = [(chance.uniform(0, 2), fault, chance.randrange(3)) for _ in range(5)]
    losses = run_with_faults(tmp_path, tiny_model, faults, STEPS_WITH_FAULTS)
    print(f"figure: {len(losses)} losses of the worker by {len(faults)} faults")
    assert len(losses) >= 5
    calm, hit = completions(calm_run), completions(tmp_path / "run")
    assert [row[:3] for row in hit] == [row[:3] for row in calm]
    assert len(metrics(tmp_path / "run")) == STEPS_WITH_FAULTS


@pytest.fixture(scope="module")
def exported(student: tuple[Path, str]) -> str:
    """An ordinary model folder: that of a student after stage 4."""
    return str(student[0] / "model")


@pytest.fixture(scope="module")
def plain_server(exported: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve FOLDER` as anybody types it, without routes of development or our extension: its URL."""
    port, folder = find_free_port(), tmp_path_factory.mktemp("plain")
    command = [forked_vllm(folder), "serve", exported, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager"]
    log = folder / "worker.log"
    process = start_server(command, {"VLLM_CPU_KVCACHE_SPACE": "1"}, log)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/health").status_code == 200
        return False

    wait_until(answers, 240)
    yield url
    stop_server(process)


def test_a_servers_chat_route_asks_as_stage_4_trained(
    plain_server: str, exported: str, bespoke: str, tiny_model: str
) -> None:
    for question, expected in trained_prompts(bespoke, tiny_model).items():
        message = {"role": "user", "content": question}
        body = {"model": exported, "messages": [message], "max_tokens": 1, "return_token_ids": True}
        answer = httpx2.post(f"{plain_server}/v1/chat/completions", json=body, timeout=300).json()
        assert answer["prompt_token_ids"] == expected


def test_a_plain_server_completes_for_whoever_asks_and_for_the_trainer_whose_model_it_serves(
    plain_server: str, exported: str, tiny_model: str, tmp_path: Path
) -> None:
    trainer = Trainer(exported, tmp_path)
    prompts = [trainer.prompt(text) for text in ("One and two", "A longer prompt, of some more words")]
    sampling = Sampling(temperature=0.7, max_completion_length=16)
    engine = VLLMEngine(urls=[plain_server], push=NoPush())
    engine.start(None, trainer.tokenizer, trainer.folder)
    alone = sample_groups(engine, prompts, sampling, 3, "", [1, 2], [4, 16])
    engine.close()
    assert [{len(c.token_ids) for c in group} for group in alone] == [{4}, {16}]
    assert {completion.log_probs for group in alone for completion in group} == {None}

    engine = VLLMEngine(urls=[plain_server], push=NoPush(), log_probs="trainer")
    engine.start(trainer.model, trainer.tokenizer, trainer.folder)
    trainer.push(engine)
    text = prompts[1]
    own = trainer.log_probs(text)
    assert asyncio.run(engine.fleet.workers[0].score(text, 60.0)) == pytest.approx(own, abs=1e-4)
    assert own != pytest.approx(Trainer(tiny_model, tmp_path).log_probs(text), abs=1e-3)  # before stage 4
    engine.verify(text, {0: own})
    again = sample_groups(engine, prompts, sampling, 3, "", [1, 2], [4, 16])
    assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in g] for g in alone]
    trainer.step(size=0.5)
    with pytest.raises(EngineError, match="It serves another model"):
        engine.verify(text, {0: trainer.log_probs(text)})
    engine.close()
