"""`rlt chat`: real models through pipes, a terminal of its own, and a server that streams what it is told."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from commands import ROOT, rlt
from sampling import sample_groups

from rlt_lightning.chat.conversation import AnswerStreamer, ChatModel, LocalSpeaker, Screen, TagSplitter, chat
from rlt_lightning.datamodules.formats import ChatFormat, encode
from rlt_lightning.engines import EngineError, HFEngine, Sampling
from rlt_lightning.pretrained import load_model, load_tokenizer
from rlt_lightning.tags import R1
from rlt_lightning.types import InputError

QUESTION = "What is 3 + 4?"


class StreamingServer(ThreadingHTTPServer):
    """Streams one script after the other: texts, or bytes as they are; an int is a status, None breaks off,
    an Event hangs."""

    def __init__(self, *scripts: list[Any], api_key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts = list(scripts)
        self.api_key = api_key
        self.bodies: list[dict[str, Any]] = []
        self.deserted = Event()  # a caller went away in the middle of an answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StreamingServer

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": "student", "max_model_len": 2048}]}))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        script = self.server.scripts.pop(0)
        if isinstance(script[0], int):
            self.reply(script[0], "no")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        try:
            for text in script:
                if isinstance(text, str):
                    self.event(text)
                elif isinstance(text, bytes):
                    self.wfile.write(text)
                elif text is None:
                    return
                while isinstance(text, Event):
                    self.event("…")
                    time.sleep(0.05)
            self.event("", "stop")
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self.server.deserted.set()

    def event(self, text: str, finish_reason: str | None = None) -> None:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason}
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        self.wfile.flush()

    def reply(self, status: int, content: str) -> None:
        key = f"Bearer {self.server.api_key}"
        refused = self.server.api_key and self.headers.get("Authorization") != key
        self.send_response(401 if refused else status)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts a server that streams these scripts."""
    servers = []

    def start(*scripts: list[Any], **options: Any) -> StreamingServer:
        server = StreamingServer(*scripts, **options)
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Pipes a question into `chat` in this process; returns standard output and error."""

    def pipe(model: ChatModel, question: str = QUESTION, **options: Any) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(question))
        chat(model, **({"tags": "r1"} | options))
        captured = capsys.readouterr()
        return captured.out, captured.err

    return pipe


# Who answers


def test_a_piped_question_is_answered_by_a_real_model_in_the_students_format(miniature: str) -> None:
    options = ["--student_system_prompt=Answer in one word.", "--temperature=0"]
    result = rlt("chat", f"--model.path={miniature}", "--tags=r1", *options, text=QUESTION)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [f"loading {miniature} (0.7 MB)"]
    engine, tokenizer = HFEngine(), load_tokenizer(miniature)
    engine.start(load_model(miniature), tokenizer, Path())
    chat_format = ChatFormat(tokenizer, "r1", student_system_prompt="Answer in one word.")
    prompt = chat_format.build_student_problem(1, QUESTION, "").teacher_prompt
    [[answer]] = sample_groups(
        engine, [prompt], Sampling(temperature=0, max_completion_length=200), 1, "", [0]
    )
    assert answer.finish_reason == "eos"
    assert result.stdout == tokenizer.decode(answer.token_ids[:-1]) + "\n"


@pytest.fixture(scope="module")
def speaker(tiny_model: str) -> LocalSpeaker:
    """The model of random weights, in this process."""
    return LocalSpeaker(ChatModel(tiny_model, dtype="float32"), load_tokenizer(tiny_model))


def answered(speaker: LocalSpeaker, seed: int = 0, text: str = "Tell me", **settings: Any) -> list[str]:
    """The pieces of an answer of 40 tokens."""
    pieces: list[str] = []
    sampling = Sampling(**{"max_completion_length": 40} | settings)
    speaker.answer(encode(speaker.tokenizer, text), sampling, seed, pieces.append)
    return pieces


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 20.0},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-4},
        {"temperature": 2.0, "min_p": 0.9999},
    ],
    ids=lambda settings: list(settings)[-1],
)
def test_settings_that_leave_one_token_give_the_engines_answer(
    settings: dict[str, Any], speaker: LocalSpeaker
) -> None:
    engine = HFEngine()
    engine.start(speaker.model, speaker.tokenizer, Path())
    prompt = encode(speaker.tokenizer, "Tell me")
    sampling = Sampling(**settings, max_completion_length=40)
    [[completion]] = sample_groups(engine, [prompt], sampling, 1, "", [1])
    pieces = answered(speaker, seed=2, **settings)
    assert "".join(pieces) == speaker.tokenizer.decode(completion.token_ids)
    assert len(pieces) > 20  # as it came


def test_tokens_are_drawn_with_the_models_probabilities(speaker: LocalSpeaker) -> None:
    prompt = torch.tensor([encode(speaker.tokenizer, "Tell me")])
    with torch.no_grad():
        logits, likeliest = speaker.model(prompt).logits[0, -1].topk(3)
    temperature = float(logits[0] - logits[2])
    expected = (logits / temperature).softmax(-1)
    settings = {"temperature": temperature, "top_k": 3, "max_completion_length": 1}
    texts = ["".join(answered(speaker, seed, **settings)) for seed in range(200)]
    words = [speaker.tokenizer.decode([token]) for token in likeliest.tolist()]
    assert set(texts) == set(words)
    for word, probability in zip(words, expected.tolist(), strict=True):
        error = (probability * (1 - probability) / 200) ** 0.5
        assert texts.count(word) / 200 == pytest.approx(probability, abs=4 * error)


def test_a_seed_repeats_its_answer(speaker: LocalSpeaker) -> None:
    answers = ["".join(answered(speaker, seed, temperature=1.2, top_p=0.9)) for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


def test_settings_that_come_with_a_model_do_not_act_but_its_ends_do(
    speaker: LocalSpeaker, tiny_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    plain = answered(speaker, temperature=1.0)
    first, third = (encode(speaker.tokenizer, plain[i])[0] for i in (0, 2))
    assert [speaker.tokenizer.decode([third]), plain.count(plain[2])] == [plain[2], 1]
    settings = {"do_sample": True, "top_k": 1, "temperature": 0.1, "repetition_penalty": 3.0, "max_length": 8}
    settings |= {"suppress_tokens": [first], "eos_token_id": [2, third]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    other = LocalSpeaker(ChatModel(str(folder), dtype="float32"), speaker.tokenizer)
    pieces: list[str] = []
    sampling = Sampling(temperature=1.0, max_completion_length=40)
    reason = other.answer(encode(speaker.tokenizer, "Tell me"), sampling, 0, pieces.append)
    assert ("".join(pieces), reason) == ("".join(plain[:2]), "eos")


def test_characters_of_several_tokens_come_whole(tiny_model: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    text = " Größe: 𝄞 — 数学 🧮 done"
    token_ids = encode(tokenizer, text)
    pieces: list[str] = []
    streamer = AnswerStreamer(tokenizer, {2}, pieces.append)
    streamer.put(torch.tensor([[5, 6, 7]]))  # the prompt
    for token in [*token_ids, token_ids[0], 2]:  # the end of the sequence
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "" in pieces  # a part of a character waits for the rest
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text + tokenizer.decode(token_ids[0])


def test_a_server_is_asked_with_the_students_own_tokens(
    serve: Any, ask: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    server = serve(["<thi", "nk>\nSeven", ".\n</th", "ink>"], api_key="s3cret")
    model = ChatModel(tiny_model, server.url, api_key_env="MY_KEY")
    out, err = ask(model, temperature=0.4, top_p=0.8, max_tokens=99, seed=5)
    assert (out, err) == ("<think>\nSeven.\n</think>\n", "")
    chat_format = ChatFormat(load_tokenizer(tiny_model), "r1")
    prompt = chat_format.build_student_problem(1, QUESTION, "").teacher_prompt
    expected = {"model": "student", "prompt": prompt, "max_tokens": 99, "temperature": 0.4, "top_p": 0.8}
    assert server.bodies == [expected | {"seed": 5, "skip_special_tokens": False, "stream": True}]


def test_events_are_read_as_their_standard_says(serve: Any, ask: Any, tiny_model: str) -> None:
    text = "ven\u2028\x85"  # ends of lines elsewhere, but not between events
    choice = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    event = f"event: message\r\ndata:{choice}\r\n\r\n"
    server = serve([b": ping\r\n\r\n", "Se", b"retry: 5\n\n", event.encode()])
    assert ask(ChatModel(tiny_model, server.url)) == (f"Se{text}\n", "")


def test_an_answer_gets_no_more_tokens_than_the_context_has_left(
    serve: Any, ask: Any, tiny_model: str
) -> None:
    server = serve(["x"])
    ask(ChatModel(tiny_model, server.url))
    [body] = server.bodies
    assert body["max_tokens"] == 2048 - len(body["prompt"])  # less than the default of 4096
    with pytest.raises(InputError, match=r"must leave room for an answer, but its .* context of 2048"):
        ask(ChatModel(tiny_model, server.url), "why? " * 2048)


# In a terminal


class Terminal:
    """`rlt chat` in a pseudo-terminal."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlt_lightning", "chat", *options],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm"} | environment,
            start_new_session=True,
            # A shell that starts the tests in the background lets them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> str:
        """Read until a text has been shown; returns all since the last call."""
        deadline = time.monotonic() + 120
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.seen += os.read(self.master, 10_000).decode().replace("\r\n", "\n")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, line: str) -> None:
        """Wait for the prompt, and type."""
        self.until("> ")
        os.write(self.master, line.encode())

    def end(self) -> int:
        """The exit status, once it has ended."""
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.master)


@pytest.mark.full
def test_a_terminal_shows_styles_remembers_turns_and_stops_answers(serve: Any, tiny_model: str) -> None:
    said = ["Hm <thi", "nk>add\x1b[31m", " them</t", "hink>\n\n<sol", "ution>7<", "/solution>", " a < b <thi"]
    server = serve(said, ["two"], ["three"], ["four", Event()], ["five"], [500], ["six"])
    terminal = Terminal(f"--model.path={tiny_model}", f"--model.url={server.url}", "--tags=r1")
    terminal.until("/reset forgets what was said, /exit or Ctrl-D leaves")
    terminal.type("Add 3 and 4\n")
    shown = terminal.until("<thi\n")
    assert "Hm \x1b[2madd\ufffd[31m\x1b[0m\x1b[2m them\x1b[0m\n\n\x1b[1;32m7\x1b[0m a < b <thi\n" in shown
    terminal.type("And 5?\n")
    terminal.until("two\n")
    terminal.type("/reset\n")
    terminal.type("/nonsense\n")
    terminal.until("/reset forgets")
    terminal.type("Anew\n")
    terminal.until("three\n")
    terminal.type("Go on\n")
    terminal.until("four…")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("stopped\n")
    assert server.deserted.wait(10)  # the server hears of it
    terminal.type("Then?\n")
    terminal.until("five\n")
    terminal.type("Is it broken?\n")
    terminal.until("was refused with status 500")
    terminal.type("Now?\n")
    terminal.until("six\n")
    terminal.type("\x04")
    assert terminal.end() == 0

    tokenizer = load_tokenizer(tiny_model)
    prompts = [tokenizer.decode(body["prompt"]) for body in server.bodies]
    assert "Add 3 and 4" in prompts[1]
    assert "".join(said) in prompts[1]
    assert "Add 3 and 4" not in prompts[2]
    assert "Anew" in prompts[3]
    assert "four…" in prompts[4]  # what was said before it was stopped
    assert "Is it broken?" not in prompts[6]  # it got no answer
    assert [body["seed"] for body in server.bodies] == [0, 1, 0, 1, 2, 3, 3]


@pytest.mark.full
def test_a_terminal_stops_the_answer_of_a_model_in_this_process(tiny_model: str) -> None:
    terminal = Terminal(
        f"--model.path={tiny_model}", "--model.dtype=float32", "--max_tokens=1900", NO_COLOR="1"
    )
    for _ in range(2):
        terminal.type("Add 3 and 4\n")
        terminal.until("Add 3 and 4\n")
        terminal.until(" ")  # the answer has begun
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("stopped\n")
    terminal.type("/exit\n")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("terminal", "environment", "shown"),
    [
        (True, {}, "\x1b[2ma\x1b[0m\x1b[1;32mb\x1b[0m\n"),
        (True, {"NO_COLOR": "1"}, "<think>a</think><solution>b</solution>\n"),
        (True, {"TERM": "dumb"}, "<think>a</think><solution>b</solution>\n"),
        (False, {}, "<think>a</think><solution>b</solution>\n"),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    terminal: bool,
    environment: dict[str, str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    screen = Screen(R1)
    screen.show("<think>a</think><solution>b</solution>")
    screen.end()
    assert capsys.readouterr().out == shown


def test_tags_are_found_however_the_text_is_cut() -> None:
    text = "a <<think>b < c</thin k></think>\n<solution>d</solution>e</sol"
    expected = [("plain", "a <"), ("tag", "<think>"), ("thought", "b < c</thin k>"), ("tag", "</think>")]
    expected += [("plain", "\n"), ("tag", "<solution>"), ("solution", "d"), ("tag", "</solution>")]
    expected += [("plain", "e</sol")]
    for size in range(1, len(text) + 1):
        splitter = TagSplitter(R1)
        found: list[tuple[str, str]] = []
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        for kind, part in [*(p for piece in pieces for p in splitter.feed(piece)), splitter.flush()]:
            if found and found[-1][0] == kind:
                found[-1] = kind, found[-1][1] + part
            elif part:
                found.append((kind, part))
        assert found == expected, size


# What goes wrong


def test_a_folder_without_weights_is_one_clear_line(ask: Any, tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(InputError, match=r"The model '.*' could not be loaded .*safetensors") as raised:
        ask(ChatModel(str(folder)))
    assert "\n" not in str(raised.value)


def test_a_slow_tokenizer_is_refused(tiny_model: str) -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(InputError, match="must be a fast one"):
        LocalSpeaker(ChatModel(tiny_model), SlowTokenizer())


def test_a_server_that_is_not_there_is_one_clear_line(tiny_model: str) -> None:
    options = [f"--model.path={tiny_model}", "--model.url=http://127.0.0.1:9"]
    result = rlt("chat", *options, text=QUESTION)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "http://127.0.0.1:9: GET /v1/models failed" in result.stderr


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ([500], "was refused with status 500"),
        (["some", None], "broke off in the middle|failed"),
        (["some", b'data: {"error": "no memory"}\n\n'], 'must stream pieces of text, but sent {"error'),
        (["some", b"data: Seven\n\n"], "must stream pieces of text, but sent Seven"),
    ],
)
def test_a_server_that_fails_in_an_answer_is_an_engine_error(
    script: list[Any], problem: str, serve: Any, ask: Any, tiny_model: str
) -> None:
    server = serve(script)
    with pytest.raises(EngineError, match=problem):
        ask(ChatModel(tiny_model, server.url))


def test_a_key_that_the_server_refuses_is_named_by_its_variable(
    serve: Any, ask: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(api_key="s3cret")
    monkeypatch.setenv("VLLM_API_KEY", "0ther")
    with pytest.raises(EngineError, match="environment variable") as refused:
        ask(ChatModel(tiny_model, server.url))
    assert "0ther" not in str(refused.value)


def test_an_empty_pipe_is_no_question(ask: Any, tiny_model: str) -> None:
    with pytest.raises(InputError, match="standard input is empty"):
        ask(ChatModel(tiny_model), " \n")


def test_a_question_that_is_no_text_is_one_clear_line(ask: Any, tiny_model: str) -> None:
    with pytest.raises(InputError, match="must be text in UTF-8"):
        ask(ChatModel(tiny_model), "a\udcff")


@pytest.mark.full
def test_a_reader_that_has_enough_ends_the_chat_quietly(tiny_model: str) -> None:
    command = [sys.executable, "-m", "rlt_lightning", "chat", f"--model.path={tiny_model}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write(QUESTION.encode())
        process.stdin.close()
        process.stdout.read(1)
        process.stdout.close()
        told = process.stderr.read().decode()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in told
