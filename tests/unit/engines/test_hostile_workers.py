"""Bad answers of a worker are refused, and the error names the worker."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from cases import full
from commands import rlt
from fake_worker import END, EOS, TAG, FakeTokenizer, FakeWorker, worker_of
from fits import sampled_by, small_fit
from fleets import WEIGHTS, start_engine
from sampling import build_requests
from tiny import CHAINS

from rlt_lightning.engines import EngineError, IPCPush, NoPush, Sampling, VLLMEngine
from rlt_lightning.modules.step_metrics import require_agreement
from rlt_lightning.numerics.importance import Mismatch
from rlt_lightning.types import Completion

pytestmark = pytest.mark.filterwarnings("ignore:Lost vLLM worker")
LIMIT = 4
NAN, INFINITY = float("nan"), float("inf")
JSON = dict[str, Any]


def answer(
    token_ids: Any = (11, 12, 13, 14),
    log_probs: Any = (-1.0, -2.0, -3.0, -4.0),
    reason: Any = "length",
    detail: Any = None,
) -> JSON:
    """An answer as vLLM gives it; without arguments it is right for a limit of 4 tokens."""
    choice = {"token_ids": token_ids, "logprobs": {"token_logprobs": log_probs}}
    return {"choices": [choice | {"finish_reason": reason, "stop_reason": detail}]}


def ended(*token_ids: int, reason: Any = "stop", detail: Any = None) -> JSON:
    return answer(token_ids, (-1.0,) * len(token_ids), reason, detail)


def without(name: str) -> JSON:
    [choice] = answer()["choices"]
    del choice[name]
    return {"choices": [choice]}


def send_slowly(call: BaseHTTPRequestHandler) -> None:
    call.send_response(200)
    call.end_headers()
    while True:
        call.wfile.write(b" ")
        time.sleep(0.01)


def send_half(call: BaseHTTPRequestHandler) -> None:
    call.send_response(200)
    call.send_header("Content-Length", "1000")
    call.end_headers()
    call.wfile.write(json.dumps(answer()).encode())


def redirect(call: BaseHTTPRequestHandler) -> None:
    call.send_response(307)
    call.send_header("Location", "http://127.0.0.1:9/v1/completions")
    call.send_header("Content-Length", "0")
    call.end_headers()


def refuse_with_controls(call: BaseHTTPRequestHandler) -> None:
    call.send_response(503)
    call.end_headers()
    call.wfile.write("\x1b[2J\x1b]0;mine\x07\u202e".encode())


HOSTILE: dict[str, Any] = {
    # It ends early, late or otherwise than it says.
    "length_too_early": ended(11, reason="length"),
    "length_too_long": ended(11, 12, 13, 14, 15, reason="length"),
    "length_with_a_tag_at_the_end": ended(11, 12, 13, TAG, reason="length"),
    "length_with_an_end_token_at_the_end": ended(11, 12, 13, EOS, reason="length"),
    "stop_without_the_tag": ended(11, 12, detail=END),
    "end_token_that_is_not_there": ended(11, 12),
    "aborted": answer(reason="abort"),
    "unfinished": answer(reason=None),
    # Tokens and log-probs that are none.
    "no_tokens": answer((), ()),
    "more_log_probs": answer(log_probs=(-1.0,) * 5),
    "fewer_log_probs": answer(log_probs=(-1.0,) * 3),
    "tokens_outside_the_vocabulary": answer((11, 12, 13, 49152)),
    "negative_token": answer((11, 12, 13, -1)),
    "fraction_as_token": answer((11, 12, 13, 14.0)),
    "text_as_tokens": answer("abcd"),
    "nan": answer(log_probs=(-1.0, NAN, -1.0, -1.0)),
    "minus_infinity": answer(log_probs=(-1.0, -INFINITY, -1.0, -1.0)),
    "clamped_minus_infinity": answer(log_probs=(-1.0, -9999.0, -1.0, -1.0)),
    "slightly_positive_log_prob": answer(log_probs=(-1.0, 5e-4, -1.0, -1.0)),
    "null_as_log_prob": answer(log_probs=(-1.0, None, -1.0, -1.0)),
    # Another form, cut off, or too slow.
    "nothing": b"",
    "two_choices": {"choices": answer()["choices"] * 2},
    "no_reason": without("finish_reason"),
    "a_list": [answer()],
    "no_json": b"<html>\x1b[2J</html>",
    "slow": send_slowly,
    "cut_off": send_half,
    "redirect": redirect,
    "status_with_controls": refuse_with_controls,
}


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    with FakeWorker() as worker:
        push = IPCPush(timeout_s=60.0)
        engine = VLLMEngine([worker.url], push=push, request_timeout_s=3.0)
        start_engine(engine, tmp_path)
        engine.update_weights(WEIGHTS, 0)
        yield engine, worker
        engine.close()


def sample(engine: VLLMEngine) -> Completion:
    sampling = Sampling(max_completion_length=LIMIT)
    [(_, completion)] = engine.sample(build_requests([[7, 8]], [0], 1), sampling, END)
    return completion


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_an_engine_error(name: str, engine: Any) -> None:
    engine, worker = engine
    worker.broken["/v1/completions"] = HOSTILE[name]
    with pytest.raises(EngineError, match=worker.url) as refused:
        sample(engine)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1500


RIGHT = {
    "log_probs_of_certain_tokens": (answer(log_probs=(0.0, -0.0, 1e-6, 0.0)), "length"),
    "length": (ended(11, 12, 13, 14, reason="length"), "length"),
    "tag": (ended(11, TAG, detail=END), "stop"),
    "tag_at_the_limit": (ended(11, 12, 13, TAG, detail=END), "stop"),
    "own_end_token": (ended(11, EOS), "eos"),
    "named_end_token": (ended(11, 12, 5, detail=5), "eos"),
    "end_token_at_the_limit": (ended(11, 12, 13, EOS), "eos"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_is_believed(name: str, engine: Any) -> None:
    engine, worker = engine
    worker.broken["/v1/completions"], reason = RIGHT[name]
    assert sample(engine).finish_reason == reason


def test_without_a_trainer_a_worker_ends_with_special_tokens_only(tmp_path: Path) -> None:
    with FakeWorker(dev_mode=False) as worker:
        engine = VLLMEngine([worker.url], push=NoPush())
        engine.start(None, FakeTokenizer(), tmp_path)
        worker.broken["/v1/completions"] = ended(11, EOS)
        assert sample(engine).finish_reason == "eos"
        for hostile in (ended(11, 12), ended(11, 12, detail=12), answer((11, 12, 13, 10**5))):
            worker.broken["/v1/completions"] = hostile
            with pytest.raises(EngineError, match="must send a completion"):
                sample(engine)
            engine.fleet.losses = 0
            engine.health()


@pytest.mark.parametrize(
    ("path", "hostile"),
    [
        ("/v1/models", b'{"data": [{"id": "teacher", "max_model_len": 1e999}]}'),
        ("/collective_rpc", {"results": [{"dtype": 1, "can_sleep": True}]}),
    ],
    ids=["infinite_context", "no_dtype"],
)
def test_a_hostile_greeting_is_an_engine_error(path: str, hostile: Any, tmp_path: Path) -> None:
    with FakeWorker(broken={path: hostile}) as worker:
        engine = VLLMEngine([worker.url], recovery_timeout_s=0.1)
        with pytest.raises(EngineError, match=worker.url) as refused:
            start_engine(engine, tmp_path)
        assert str(refused.value).isprintable()


# Lies of a worker that samples from the weights it was pushed


def report(choice: JSON, log_probs: list[float]) -> JSON:
    return choice | {"logprobs": {"token_logprobs": log_probs}}


def reported(choice: JSON) -> list[float]:
    values: list[float] = choice["logprobs"]["token_logprobs"]
    return values


def change_a_token(worker: FakeWorker, body: JSON, choice: JSON) -> JSON:
    token_ids = list(choice["token_ids"])
    token_ids[len(token_ids) // 2 - 1] = 20 + token_ids[len(token_ids) // 2 - 1] % 20
    return choice | {"token_ids": token_ids}


def of_temperature_one(worker: FakeWorker, body: JSON, choice: JSON) -> JSON:
    prompt: list[int] = body["prompt"]
    assert worker.sampled is not None
    return report(choice, worker.sampled(prompt + choice["token_ids"], 1.0)[len(prompt) - 1 :])


# What a lie makes of an answer: worker, body, honest choice -> choice.
Lie = Callable[[FakeWorker, JSON, JSON], JSON]
STOPPED: dict[str, Lie] = {
    "shifted": lambda worker, body, choice: report(choice, [*reported(choice)[1:], reported(choice)[0]]),
    "too_low": lambda worker, body, choice: report(choice, [value - 1.5 for value in reported(choice)]),
    "a_token_changed": change_a_token,
}


def fit_with_a_liar(
    lie: Lie | None, model: str, folder: Path, *options: str, push: str = "IPCPush", **of_worker: Any
) -> subprocess.CompletedProcess[str]:
    """One step of `rlt fit` with a worker that samples from the model, and then lies."""
    with worker_of(model, samples=True, gloo=push == "GlooPush", **of_worker) as worker:
        honest = worker.choice
        if lie is not None:
            worker.choice = lambda body: lie(worker, body, honest(body))  # type: ignore[method-assign]
        words = [*CHAINS, "--trainer.max_steps=1", "--rollouts.sampling.max_completion_length=32"]
        return rlt(*small_fit(model, folder, *words, *sampled_by(worker.url, push=push), *options))


@pytest.mark.parametrize("lie", [full("shifted"), "a_token_changed"])
def test_a_lie_about_log_probs_reaches_no_update(lie: str, miniature: str, tmp_path: Path) -> None:
    result = fit_with_a_liar(STOPPED[lie], miniature, tmp_path)
    assert result.returncode == 2, result.stderr
    assert "Step 1, http" in result.stderr
    assert ": engine and trainer may differ by model.mismatch_limit" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("checkpoints/*"))


def test_one_liar_among_workers_is_named(miniature: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_of(miniature, samples=True)) for _ in range(3)]
        lying, honest = workers[2], workers[2].choice
        lying.choice = lambda body: STOPPED["too_low"](lying, body, honest(body))  # type: ignore[method-assign]
        words = [*CHAINS, "--trainer.max_steps=1", "--model.group_size=6", "--model.mismatch_limit=1"]
        words += sampled_by(*(worker.url for worker in workers))
        result = rlt(*small_fit(miniature, tmp_path, *words))
    assert result.returncode == 2, result.stderr
    assert f"Step 1, {lying.url}: engine and trainer may differ" in result.stderr.splitlines()[-1]


def test_log_probs_of_another_temperature_are_told(miniature: str, tmp_path: Path) -> None:
    many = ["--model.group_size=32", "--data.prompts_per_step=4"]
    result = fit_with_a_liar(of_temperature_one, miniature, tmp_path, *many)
    assert result.returncode == 0, result.stderr
    assert "must be 1 on average" in result.stderr


@pytest.mark.parametrize(("push", "options"), [full("IPCPush", {}), ("GlooPush", {"dtype": "bfloat16"})])
def test_an_honest_worker_is_let_alone(push: str, options: Any, miniature: str, tmp_path: Path) -> None:
    words = ["--model.group_size=8", "--rollouts.sampling.temperature=1"]
    result = fit_with_a_liar(None, miniature, tmp_path, *words, push=push, **options)
    assert result.returncode == 0, result.stderr
    assert "mismatch" not in result.stderr
    assert "must be 1 on average" not in result.stderr


def test_a_worker_that_lies_writes_no_trace(tiny_model: str, tmp_path: Path) -> None:
    with worker_of(tiny_model) as worker:
        score: Any = worker.sampled
        worker.sampled = lambda ids, temperature: [value - 1.5 for value in score(ids, temperature)]
        words = small_fit(tiny_model, tmp_path, *sampled_by(worker.url))
        result = rlt("predict", *words[1:])
    assert result.returncode == 2, result.stderr
    assert "model.mismatch_limit" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "traces.jsonl").exists()


def test_only_a_large_mismatch_stops_the_run() -> None:
    # 100 log-probs of -1 and -3: their variance is 1.
    varied = {"num_tokens": 100.0, "log_prob": -200.0, "squared_log_prob": 500.0}
    require_agreement(Mismatch(), 0.5, 1)
    require_agreement(Mismatch(squared=50.0, **varied), 0.5, 1)
    require_agreement(Mismatch(squared=1e9, **varied), None, 1)
    for squared in (50.1, NAN, INFINITY):
        with pytest.raises(EngineError, match=r"Step 7: .* model\.mismatch_limit 0\.5 "):
            require_agreement(Mismatch(squared=squared, **varied), 0.5, 7)


def test_equal_completions_of_different_seeds_stop_the_run(miniature: str, tmp_path: Path) -> None:
    def draw_once(worker: FakeWorker, body: JSON, choice: JSON) -> JSON:
        return choice if body["seed"] == 0 else worker.choice(body | {"seed": 0})

    result = fit_with_a_liar(draw_once, miniature, tmp_path, "--model.group_size=16")
    assert result.returncode == 2, result.stderr
    assert "must sample by the seed, but drew the same" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("checkpoints/*"))
