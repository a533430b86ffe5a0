"""Sampling in process against plain sampling, transformers and vLLM, at several numbers of sequences.

    OMP_NUM_THREADS=2 .venv/bin/python benchmarks/generate.py [--sequences 1,8,16,64] [--vllm PATH]

Every side samples completions of 64 tokens after one prompt of 350 with SmolLM2-135M in fp32, with the same
number of threads. Sides run in turns, so that other work on the machine slows all of them; figures are
medians of tokens per second, and of CPU milliseconds per token of all the side's processes, which other work
disturbs less.

    ours                 HFEngine
    plain                tests/support/plain_engine.py: transformers' cache, one batch after the other
    transformers         `generate`, which repeats the prompt for every completion
    continuous batching  transformers' `generate_batch` with a paged cache
    vLLM                 a worker of `vllm serve`; left out where it is not installed

Before speed is compared, ours must sample the same tokens as the plain side. The last line has the goals, and
the ratios at 16 sequences or, if these are not measured, at the nearest number.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from side_by_side import CPU, alternate, benchmark_parser, finish, measure, read_options

from rlt_lightning.engines import HFEngine, Launch, NoPush, SampleRequest, Sampling, VLLMEngine
from rlt_lightning.models.embedded import DEFAULT_MODEL, resolve
from rlt_lightning.models.load import load_model, load_tokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from plain_engine import PlainEngine  # noqa: E402

GOALS = {"plain": 2.5, "vLLM": 0.9}
GOALS_AT = 16  # sequences
TEXT = "A farmer sells eggs at the market every morning, and counts her coins in the evening. "
SAMPLING = {"temperature": 0.7}
OURS, BATCHED = "ours", "continuous batching"


class Sides:
    """What is measured: functions of the number of sequences that return their tokens."""

    def __init__(self, model_name: str, prompt_length: int, length: int) -> None:
        self.length = length
        self.tokenizer = load_tokenizer(model_name)
        words = self.tokenizer.encode(TEXT)
        self.prompt = (words * (prompt_length // len(words) + 1))[:prompt_length]
        # No end-of-sequence token: all completions have full length.
        self.tokenizer.chat_template = self.tokenizer.eos_token = None
        self.engines: dict[str, Any] = {OURS: HFEngine(), "plain": PlainEngine()}
        ours = load_model(model_name)
        ours.generation_config.eos_token_id = None
        for engine in self.engines.values():
            engine.start(ours, self.tokenizer, Path())
        # transformers' continuous batching does not know our attention.
        self.theirs = load_model(model_name, attn_implementation="sdpa")

    def add_vllm(self, model_name: str, executable: Path, threads: int, folder: Path) -> None:
        """Start a worker that has the same threads."""
        overlay = yaml.safe_load((ROOT / "configs/add/vllm_launch.yaml").read_text())
        settings = overlay["rollouts"]["engine"]["init_args"]["launch"]
        bound = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "OMP_NUM_THREADS": str(threads)}
        settings |= {"executable": str(executable), "model": resolve(model_name)}
        settings["max_model_len"] = len(self.prompt) + self.length
        settings["environment"] |= bound
        engine = VLLMEngine(launch=Launch(**settings), push=NoPush())
        engine.start(None, self.tokenizer, folder)
        engine.health()
        self.engines["vLLM"] = engine

    def sample(self, name: str, sequences: int) -> list[list[int]]:
        """Let an engine sample."""
        sampling = Sampling(**SAMPLING, max_completion_length=self.length)
        requests = [SampleRequest(self.prompt, seed=0, num_completions=sequences)]
        found = dict(self.engines[name].sample(requests, sampling, stop=""))
        return [found[number].token_ids for number in range(sequences)]

    def transformers(self, sequences: int) -> list[list[int]]:
        """Let transformers' `generate` sample."""
        torch.manual_seed(0)
        found = self.theirs.generate(
            torch.tensor([self.prompt]),
            generation_config=self.generation_config(num_return_sequences=sequences),
        )
        return [row[len(self.prompt) :] for row in found.tolist()]

    def continuous_batching(self, sequences: int) -> list[list[int]]:
        """Let transformers' continuous batching sample."""
        from transformers import ContinuousBatchingConfig

        torch.manual_seed(0)
        # Room for all tokens: by default it reserves most of the machine's memory.
        blocks = sequences * (1 + (len(self.prompt) + self.length) // 16) + 1
        settings = ContinuousBatchingConfig(
            page_size=16, num_blocks=blocks, max_batch_tokens=max(512, sequences)
        )
        found = self.theirs.generate_batch(
            [self.prompt] * sequences,
            generation_config=self.generation_config(),
            continuous_batching_config=settings,
            persistent_manager=True,  # its start takes a second
        )
        return [output.generated_tokens for output in found.values()]

    def generation_config(self, num_return_sequences: int = 1) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(
            do_sample=True,
            num_return_sequences=num_return_sequences,
            max_new_tokens=self.length,
            min_new_tokens=self.length,  # without it a model's own end-of-sequence token ends a row
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
            **SAMPLING,
        )

    def functions(self, with_batching: bool) -> dict[str, Callable[[int], list[list[int]]]]:
        """Return the sides by name."""
        sides: dict[str, Any] = {
            name: lambda sequences, name=name: self.sample(name, sequences) for name in self.engines
        }
        sides["transformers"] = self.transformers
        return sides | ({BATCHED: self.continuous_batching} if with_batching else {})

    def close(self) -> None:
        if "vLLM" in self.engines:
            self.engines["vLLM"].close()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those it started, such as a worker's."""
    parents, times = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid], times[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    return sum(ticks for pid, ticks in times.items() if ours(pid)) / os.sysconf("SC_CLK_TCK")


def compare(sides: dict[str, Any], sequences: int, rounds: int) -> dict[str, Any]:
    """Return tokens per second and memory of every side, and the ratios of ours to the others."""
    tokens: dict[str, list[list[int]]] = {}

    def side(name: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            before = cpu_seconds()
            found = measure(lambda: tokens.update({name: sides[name](sequences)}), CPU)
            count = sum(map(len, tokens[name]))
            assert len(tokens[name]) == sequences, f"{name}: {len(tokens[name])} of {sequences} completions"
            cpu_ms = 1000 * (cpu_seconds() - before) / count
            return found | {"tokens_per_s": count / found["seconds"], "cpu_ms_per_token": cpu_ms}

        return run

    found: dict[str, Any] = alternate({name: side(name) for name in sides}, rounds)
    same = sum(a == b for a, b in zip(tokens[OURS], tokens["plain"], strict=True))
    others = [name for name in sides if name != OURS]
    speeds, costs = ({n: found[n][key] for n in found} for key in ("tokens_per_s", "cpu_ms_per_token"))
    return {
        "ratios": {name: speeds[OURS] / speeds[name] for name in others},
        "cpu_ratios": {name: costs[name] / max(costs[OURS], 1e-9) for name in others},
        "same_completions": same,
        "sides": found,
    }


def table(results: dict[str, Any]) -> str:
    """Return tokens per second and CPU milliseconds per token, one row per number of sequences."""
    names = list(next(iter(results.values()))["sides"])
    lines = ["| sequences | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for sequences, result in results.items():
        figures = [result["sides"][name] for name in names]
        speeds = [f"{found['tokens_per_s']:.0f} ({found['cpu_ms_per_token']:.1f})" for found in figures]
        lines.append(f"| {sequences} | " + " | ".join(speeds) + " |")
    return "\n".join(lines)


def figures_of(results: dict[str, Any]) -> dict[str, float]:
    """Return the ratios at the number of sequences next to `GOALS_AT` and, if it is that one, the goals."""
    count = min(results, key=lambda sequences: abs(int(sequences) - GOALS_AT))
    found = results[count]["ratios"]
    names = [name for name in GOALS if name in found]
    ratios = {f"to_{name}": found[name] for name in names}
    return ratios | ({f"{name}_goal": GOALS[name] for name in names} if int(count) == GOALS_AT else {})


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=3)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sequences", default="1,8,16,64")
    parser.add_argument("--prompt_length", type=int, default=350)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "0")) or None)
    parser.add_argument("--vllm", type=Path, default=Path(sys.executable).with_name("vllm"))
    parser.add_argument("--continuous_batching", choices=["true", "false"], default="true")
    tiny = {"model": "miniature", "sequences": "2", "prompt_length": 40, "length": 4, "threads": 1}
    options = read_options(parser, **tiny, vllm=Path("no vLLM"), continuous_batching="false")
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    sides = Sides(options.model, options.prompt_length, options.length)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            if options.vllm.exists():
                sides.add_vllm(options.model, options.vllm, threads, Path(folder))
            else:
                print(f"vLLM is left out: {options.vllm} does not exist", flush=True)
            functions = sides.functions(options.continuous_batching == "true")
            for sequences in map(int, options.sequences.split(",")):
                results[str(sequences)] = compare(functions, sequences, options.rounds)
        finally:
            sides.close()
    settings = {k: str(v) for k, v in vars(options).items() if k not in ("output", "vllm")}
    settings |= {"threads": threads}
    print(f"tokens per second (CPU milliseconds per token), {threads} threads:\n{table(results)}")
    for sequences, result in results.items():
        pairs = zip(result["ratios"].items(), result["cpu_ratios"].values(), strict=True)
        ratios = ", ".join(f"{name} {ratio:.2f} (CPU time {cpu:.2f})" for (name, ratio), cpu in pairs)
        print(f"{sequences} sequences: {result['same_completions']} equal the plain side's; ours to {ratios}")
    finish(options.output, {"settings": settings, "sequences": results}, **figures_of(results))


if __name__ == "__main__":
    main()
