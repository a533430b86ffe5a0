"""Verbs, shipped configs and overlays at tiny size, and every option of sampling, on pretended GPUs."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, path_of_tests, run_python, run_rlt
from fake_worker import worker_of
from sampling import sample_groups
from samplings import SAMPLINGS, assert_same, started
from tiny import OVERLAYS, SHORT, tiny_run, uses_workers, written_file
from vllm_runs import EXECUTABLE, forked_vllm

from rlt_lightning.engines import HFEngine
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.run.shipped import find_config
from rlt_lightning.tasks.stepwise import chain_rows

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("pretended_gpus")]

GPU = ["--trainer.accelerator=gpu", "--trainer.precision=bf16-mixed", "--model.head.compiled=false"]
ONE_OF_EACH_KIND = ("warmup", "sft", "opd", "grpo", "generate", "rejection", "rank", "score", "evaluate")
# Overlays that say nothing about GPUs, that tests/gpu/test_pretended_gpu.py runs, or that cannot run here.
ELSEWHERE = {
    **dict.fromkeys(("fsdp2", "zero3", "lora", "evaluate_every"), "tests/gpu/test_pretended_gpu.py"),
    **dict.fromkeys(("tensorboard", "wandb"), "where metrics are logged"),
    **dict.fromkeys(("countdown", "traces_1k", "opsd", "sdft", "faithful", "faithful_sft"), "other settings"),
    "student_32b": "another model, by zero3",
    "evaluate_8gpu": "its trainer is on a CPU, and loads no model",
    "multinode": "two nodes",
    "vllm_launch": "a real worker on a CPU",
}


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_config_of_each_kind_runs_on_one_gpu(name: str, tiny_model: str, tmp_path: Path) -> None:
    verb, options, settings = tiny_run(find_config(f"recipe_7b/{name}"), tiny_model)
    options += [*(GPU[:1] if verb == "test" else GPU), "--rollouts.engine=HFEngine"]
    run_on_gpu(verb, *options, f"--output_dir={tmp_path / 'run'}")
    assert (tmp_path / "run" / written_file(verb, settings)).stat().st_size > 0


@pytest.mark.parametrize(
    "overlay", [path for path in OVERLAYS if path.stem not in ELSEWHERE], ids=lambda path: path.stem
)
def test_an_overlay_runs_on_as_many_gpus_as_it_needs(overlay: Path, tiny_model: str, tmp_path: Path) -> None:
    """Two GPUs stand for more. Where workers sample, a fake one takes the weights, as shipped."""
    text = overlay.read_text()
    verb, options, _ = tiny_run(overlay, tiny_model)
    gpus = 1 if re.search(r"devices: (1\b|\[0\])", text) else 2
    options += [*GPU, f"--trainer.devices={gpus}", f"--output_dir={tmp_path}"]
    with ExitStack() as stack:
        if uses_workers(overlay):
            takes_weights, launches = "NoPush" not in text, "launch:" in text
            dtype = "bfloat16" if "dtype: bfloat16" in text else "float32"
            worker = stack.enter_context(
                worker_of(tiny_model, takes_weights and not launches, dtype, dev_mode=takes_weights)
            )
            options += [f"--rollouts.engine.init_args.urls=[{worker.url}]"]
            options += ["--rollouts.engine.init_args.launch=null"] if launches else []
            if takes_weights and launches:  # what a launched worker gets
                options += ["--rollouts.engine.init_args.push=rlt_lightning.engines.IPCPush"]
        else:
            options += ["--rollouts.engine=HFEngine"]
        run_rlt(verb, *options, gpus=gpus)
        if uses_workers(overlay):
            assert (worker.sleep_level > 0) is ("sleep: true" in text)


@pytest.mark.skipif(not EXECUTABLE.exists(), reason="needs vLLM: make setup-vllm")
def test_a_run_that_sets_no_engine_takes_turns_with_vllm(tiny_model: str, tmp_path: Path) -> None:
    """A real worker, of vLLM's CPU build: only what that build lacks is taken out of its command line."""
    verb, options, _ = tiny_run(find_config("own_rows/rlt"), tiny_model)
    watch = {"class_path": "turns.WorkerWatch", "init_args": {"path": str(tmp_path / "events")}}
    on_cpu = {"class_path": "turns.ChosenOnCPU"}
    on_cpu["init_args"] = {"executable": forked_vllm(tmp_path, "sleeping_vllm")}
    options += [*GPU, f"--output_dir={tmp_path / 'run'}", "--trainer.max_steps=2"]
    options += [f"--trainer.callbacks+={json.dumps(callback)}" for callback in (on_cpu, watch)]
    done = run_rlt(verb, *options, gpus=1, PYTHONPATH=path_of_tests())
    assert "rollouts.engine: vLLM on GPUs 0, in turns with the trainer" in done.stderr
    events = [json.loads(line) for line in (tmp_path / "events").open()]
    assert [(row["event"], row["step"]) for row in events if row["event"] in ("verify", "sleep")] == [
        (event, step) for step in (0, 1) for event in ("verify", "sleep")
    ]


# Verbs besides fit, predict and test


RUN = ["--config=configs/laptop/rlt.yaml", *SHORT, "--trainer.max_steps=1", "--data.num_embedded_rows=4"]
RUN += ["--data.prompts_per_step=2", "--checkpoint.every_n_train_steps=1", *GPU]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of RLT on a pretended GPU."""
    folder = tmp_path_factory.mktemp("gpu") / "run"
    run_on_gpu("fit", *RUN, f"--output_dir={folder}")
    return folder


QUESTION = "Start with 3. Double it, then add 4."
VERBS = {
    "validate": [*RUN, "--data.val_rows=2", "--output_dir={folder}"],
    "check": [*RUN, "--check.rows=2", "--check.completions=2"],
    "explain": ["{run}", "--student=miniature", f"--question={QUESTION}", "--solution=10", "--seed=1"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_works_on_one_gpu(verb: str, run: Path, tmp_path: Path) -> None:
    words = [word.format(run=run, folder=tmp_path) for word in VERBS[verb]]
    assert run_on_gpu(verb.split()[0], *words, text=QUESTION).strip()


def test_a_checkpoint_of_a_gpu_is_exported(run: Path, tmp_path: Path) -> None:
    run_rlt("export", f"--ckpt_path={run}", f"--output_dir={tmp_path}", gpus=1)
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() == (run / "model" / name).read_bytes()


VERB = """
import sys, torch
from rlt_lightning.__main__ import main
sys.argv = {words}
try:
    main()
except SystemExit as ending:
    failed_checks = sys.argv[1] == "check" and ending.code == 1  # of settings as small as here
    assert failed_checks or not ending.code, ending.code
assert torch.cuda.max_memory_allocated() > 0, "nothing was on the GPU"
"""


def run_on_gpu(*words: str, text: str = "") -> str:
    """Run `rlt WORDS`, of which something must be on the GPU, and return what it prints."""
    done = run_python(VERB.format(words=["rlt", *words]), ROOT, text=text, gpus=1)
    return done.stdout


# The engine in process


@pytest.mark.parametrize("cache", ["ours", "transformers'"])
def test_the_engine_draws_the_same_tokens_as_on_a_cpu(cache: str) -> None:
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
    code += f"from test_pretended_verbs import require_same_tokens; require_same_tokens({cache!r})"
    run_python(code, ROOT, gpus=1)


def require_same_tokens(cache: str) -> None:
    """Sample by every option, on a CPU and on the device; raise if tokens, log-probs or endings differ."""
    model, tokenizer = load_model("miniature"), load_tokenizer("miniature")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": row["question"]}], return_dict=False)
        for row in chain_rows(3, seed=1)
    ]
    endings = set()
    samplings = list(SAMPLINGS.values())[: 6 if cache == "ours" else 2]
    for sampling, stop in zip(samplings, cycle(["</think>", ""])):
        # The last prompt gets completions of at most 5 tokens; five are sampled at once.
        asked = prompts, sampling, 3, stop, [1, 2, 3], [72, 72, 5]
        on_cpu, on_gpu = (
            sample_groups(start_on(device, model, tokenizer, cache), *asked) for device in ("cpu", "cuda")
        )
        assert_same(on_gpu, on_cpu)
        endings |= {completion.finish_reason for group in on_gpu for completion in group}
    assert endings == {"stop", "eos", "length"}


def start_on(device: str, model: Any, tokenizer: Any, cache: str) -> HFEngine:
    engine = started(HFEngine, model.to(device), tokenizer, max_sequences=5)
    engine.decoder = "slots" if cache == "ours" else "padded"
    return engine
