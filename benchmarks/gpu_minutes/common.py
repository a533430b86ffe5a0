"""What the checks of `make gpu-minutes` share: device, sizes, timing, and how they write what they find.

OUT/results.jsonl gets a line of JSON for each finding as it comes:

    {"check": NAME, "passed": true | false | null, FIGURES...}

`null` means a measurement, or a check that was skipped for the reason in `why`. REHEARSE=1 makes everything
tiny.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from rlt_lightning.models.embedded import MINIATURES
from rlt_lightning.modules.phases import synchronise
from rlt_lightning.types import first_line

ON_CPU = not torch.cuda.is_available()
TINY = ON_CPU or bool(os.environ.get("REHEARSE"))
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
HALF = torch.float32 if ON_CPU else torch.bfloat16
OUT = Path(os.environ.get("OUT", "runs/gpu_minutes")).resolve()
Finding = tuple[bool | None, dict[str, Any]]


def note(check: str, passed: bool | None = None, **fields: Any) -> None:
    """Print a finding, and append it to the results."""
    line = json.dumps({"check": check, "passed": passed} | fields)
    print(line, flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "results.jsonl", "a") as file:
        file.write(line + "\n")


def attempt(check: str, function: Callable[[], Finding]) -> bool:
    """Note what a function finds, and its error if it has one; return whether nothing failed."""
    start = time.monotonic()
    try:
        passed, fields = function()
    except Exception as error:  # the checks after it still run, and the line says what went wrong
        traceback.print_exc()
        passed, fields = False, {"why": f"{type(error).__name__}: {first_line(error)}"}
    note(check, passed, **fields, s=round(time.monotonic() - start, 1))
    return passed is not False


def find_vllm() -> bool:
    """Tell whether VLLM's command is there; note it if not."""
    if not Path(os.environ["VLLM"]).exists():
        note("vllm", why=f"skipped: {os.environ['VLLM']} is not there; the extra vllm brings it")
        return False
    return True


def time_call(function: Callable[[], Any], rounds: int = 3, warm_up: int = 1) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(warm_up + rounds):
        synchronise(DEVICE)
        start = time.perf_counter()
        function()
        synchronise(DEVICE)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm_up:])


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest wanted number."""
    wanted = wanted.detach().double()
    found = found.detach().to(wanted)
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()


@torch.no_grad()
def make_model(shape: str) -> Path:
    """Save a model with random weights that samples words of the miniature's tokenizer, but never its end.

    Dimension 0 of the hidden state is the same for every word, and tells the head which words there are. The
    others are so large that the distribution over words is about as uneven as a trained model's.
    """
    folder = OUT / "models" / shape
    if (folder / "config.json").exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(str(MINIATURES["miniature"]))
    torch.manual_seed(0)
    sizes = gpu.SHAPES[shape]
    if shape == "tiny":  # vLLM on a CPU has heads of 64
        sizes = sizes | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with DEVICE:
        model: Any = Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=8192, **special))
    model = model.to(HALF)
    embedding = model.get_input_embeddings().weight  # (V, H), the head's weight, too
    embedding *= 3.0
    embedding[:, 0] = -4.0
    embedding[: len(tokenizer), 0] = 4.0
    embedding[tokenizer.all_special_ids, 0] = 0.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
