"""The vLLM engine in front of fake workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_worker import END, EOS, FakeTokenizer, FakeWorker, fake_vllm, made_up
from sampling import build_requests, sample_groups
from transformers import LlamaConfig

from rlt_lightning.engines import IPCPush, Launch, Sampling, VLLMEngine, WorkersLost
from rlt_lightning.types import Completion

SAMPLING = Sampling(max_completion_length=6)


PROMPTS = [[7, 8, 9 + i] for i in range(8)]


SEEDS = [100 * i for i in range(8)]


WEIGHTS = [("a.weight", torch.arange(6.0).reshape(2, 3)), ("b.bias", torch.tensor([0.5, -1.0]).bfloat16())]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., VLLMEngine]]:
    """Starts an engine on fake workers, with the weights of step 0, unless asked not to."""
    with ExitStack() as stack:

        def make(*workers: FakeWorker, step: int | None = 0, **options: Any) -> VLLMEngine:
            for worker in workers:
                stack.callback(worker.close)
            # No deadline that a busy machine could miss; a test that waits for one sets it.
            defaults = {"push": IPCPush(timeout_s=60.0)}
            defaults |= {"call_timeout_s": 60.0, "recovery_timeout_s": 60.0}
            engine = VLLMEngine([worker.url for worker in workers], **(defaults | options))
            stack.callback(engine.close)
            start_engine(engine, tmp_path)
            if step is not None:
                engine.update_weights(WEIGHTS, step)
            return engine

        yield make


def start_engine(engine: VLLMEngine, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    config = LlamaConfig(vocab_size=49152)
    eos = SimpleNamespace(eos_token_id=[EOS, 5])
    model = SimpleNamespace(generation_config=eos, name_or_path="model", config=config)
    model.parameters = lambda: iter([torch.zeros(1, dtype=dtype)])
    engine.start(model, FakeTokenizer(), folder)


def generate(engine: VLLMEngine, number: int = 2, sampling: Sampling = SAMPLING) -> list[list[Completion]]:
    return sample_groups(engine, PROMPTS, sampling, number, END, SEEDS)


def generate_until_lost(engine: VLLMEngine, match: str | None = None) -> dict[int, Completion]:
    """What comes, by index, before the last worker is lost."""
    found: dict[int, Completion] = {}

    def take() -> None:
        for index, completion in engine.sample(build_requests(PROMPTS, SEEDS, 2), SAMPLING, END):
            found[index] = completion

    with pytest.raises(WorkersLost, match=match):
        take()
    return found


def token_ids(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def undisturbed(number: int = 2, endings: tuple[str, ...] = ("stop", "eos", "length")) -> list[Any]:
    """What the fake's rule gives, worked out without a server."""
    return [
        [made_up(prompt, seed + i, 6, endings)["token_ids"] for i in range(number)]
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]


def assert_each_prompt_once(*workers: FakeWorker, number: int = 2) -> None:
    """Each of its completions is asked for again only where the first answer did not come."""
    delivered = Counter(str(prompt) for worker in workers for prompt in worker.delivered)
    assert delivered == Counter(map(str, PROMPTS * number))


def processes_of(engine: VLLMEngine) -> list[Popen[bytes]]:
    return [worker.process for worker in engine.fleet.workers if worker.process is not None]


def launched(folder: Path, **options: Any) -> VLLMEngine:
    launch = Launch(executable=fake_vllm(folder), start_deadline_s=120.0, **options)
    push = IPCPush(timeout_s=60.0)
    return VLLMEngine(launch=launch, push=push, call_timeout_s=8.0)
