"""Estimate how long it takes to sample a step's completions, by playing one step through.

A copy of the weights works on many completions at a time. In every token step it reads all weights and the
keys and values of every completion in work. A completion that ends gives its place to one that waits:

    completions  ─ wait ─▶ in work (at most max_sequences, and as many keys and values as fit) ─▶ done
                    ▲              │ no room for the next token
                    └─ preempted ──┘
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rlt_lightning.modules.meter import GIB
from rlt_lightning.plan.inputs import PlannedWorkers, Setup
from rlt_lightning.plan.lengths import NUM_STEPS, simulated_lengths

# The four constants below are stated; docs/planning.md says where each comes from.
WORKER_OVERHEAD = 3 * GIB  # vLLM's own activations and graphs, per GPU
READ_EFFICIENCY = 0.8  # part of the peak rate at which decoding reads memory
WORKER_STEP = 1e-3  # seconds a token step that vLLM schedules and draws, on a GPU
HF_BLOCK_STEP = 0.5e-3  # seconds a token step and block that HFEngine needs on a GPU to start its kernels


@dataclass(frozen=True)
class Copy:
    """One copy of the weights that samples, and its rates."""

    max_sequences: int
    capacity: float  # tokens whose keys and values fit
    weights_s: float  # reading all weights once
    token_s: float  # reading the keys and values of one token
    product_s: float  # the products of one token
    overhead_s: float  # of every token step

    def step_s(self, rows: int, tokens: float) -> float:
        """Return the seconds in which each of `rows` gets a token; they have `tokens` so far, together."""
        return max(self.weights_s + self.token_s * tokens, self.product_s * rows) + self.overhead_s


def kv_capacity(setup: Setup, worker: PlannedWorkers) -> float:
    """Return how many tokens' keys and values fit beside the weights of one copy, over its GPUs."""
    gpus = worker.tensor_parallel_size
    room = gpus * (worker.gpu_memory_utilization * setup.device.memory - WORKER_OVERHEAD)
    room -= setup.policy.shape.weights * worker.weight_bytes
    return max(0.0, room / (setup.policy.shape.kv_per_token * worker.weight_bytes))


def rows_at_once(setup: Setup, worker: PlannedWorkers) -> float:
    """Return how many completions of full length one copy can work on at a time.

    The smallest of three limits counts: what fits at full length, the completions of a step, and
    `max_sequences`. A group shares its prompt's keys and values.
    """
    per_row = setup.step.completion_length + setup.step.prompt_length / setup.step.group_size
    in_step = setup.step.prompts * setup.step.group_size / worker.num_copies
    return min(kv_capacity(setup, worker) / per_row, in_step, worker.max_sequences)


def copy_of(setup: Setup) -> Copy:
    """Return the rates of one copy: a worker's, or of a process that samples by itself."""
    worker, policy, device = setup.worker, setup.policy, setup.device
    gpus = worker.tensor_parallel_size if worker else 1
    size = worker.weight_bytes if worker else policy.weight_bytes
    bandwidth = device.bandwidth * gpus * (1.0 if device.is_cpu else READ_EFFICIENCY)
    overhead = WORKER_STEP if worker else HF_BLOCK_STEP * policy.shape.num_blocks
    return Copy(
        max_sequences=worker.max_sequences if worker else setup.hf_sequences,
        capacity=kv_capacity(setup, worker) if worker and not device.is_cpu else float("inf"),
        weights_s=policy.shape.weights * size / bandwidth,
        token_s=policy.shape.kv_per_token * size / bandwidth,
        product_s=(policy.flops_per_token + policy.flops_per_scored) / (device.flops * setup.mfu * gpus),
        overhead_s=0.0 if device.is_cpu else overhead,
    )


def sampling_seconds(setup: Setup) -> float:
    """Return the time until the last completion of a step is there, as the mean of simulated steps."""
    copies = setup.worker.num_copies if setup.worker else setup.num_processes
    step, copy = setup.step, copy_of(setup)
    prompt = step.mean_prompt_length / step.group_size
    total = 0.0
    for seed in range(NUM_STEPS):
        lengths = simulated_lengths(step, seed)
        if setup.decode_rate:
            total += sum(lengths) / (copies * setup.decode_rate)
        else:
            # Each goes to the copy with the fewest in work: about every nth one.
            total += max(played(copy, lengths[n::copies], prompt) for n in range(copies))
    return total / NUM_STEPS


def played(copy: Copy, lengths: Sequence[int], prompt: float) -> float:
    """Return the seconds that one copy takes for completions of these lengths.

    All in work advance together, so the time to the next end is computed at once, at mean length.

    Args:
        copy: The copy of the weights.
        lengths: Tokens of each completion.
        prompt: Tokens of a prompt, divided by the completions that share it.
    """
    waiting = [(length, 0.0) for length in reversed(lengths)]  # tokens to go, tokens that are there
    active: list[tuple[float, int, float]] = []  # clock at its end, number, its tokens at clock 0
    clock, seconds, tokens, number = 0.0, 0.0, 0.0, 0
    while waiting or active:
        while waiting and len(active) < copy.max_sequences:
            togo, there = waiting[-1]
            if active and tokens + prompt + there + len(active) + 1 > copy.capacity:
                break
            waiting.pop()
            heapq.heappush(active, (clock + togo, number, there - clock))
            tokens, number = tokens + prompt + there, number + 1
            seconds += copy.product_s * (prompt + there)
        rows = len(active)
        steps = active[0][0] - clock
        if rows > 1:
            steps = min(steps, (copy.capacity - tokens) // rows)
        if steps >= 1:
            seconds += steps * copy.step_s(rows, tokens + rows * steps / 2)
            clock, tokens = clock + steps, tokens + rows * steps
        else:  # the last one that came must wait, and is computed again when it returns
            last = max(active, key=lambda item: item[1])
            active.remove(last)
            heapq.heapify(active)
            waiting.append((round(last[0] - clock), last[2] + clock))
            tokens -= prompt + last[2] + clock
        while active and active[0][0] <= clock:
            _, _, base = heapq.heappop(active)
            tokens -= prompt + base + clock
    return seconds
