"""Estimate the time of a step: work divided by stated rates, without waiting and communication.

Lengths differ, so the longest completion and the slowest rank count (`Step.expect_longest`, `Step.load`).
How the phases add up depends on the run:

    one after the other    generate ─ push ─ sleep ─ score ─ reference ─ train ─ cpu
    score while sampling   [generate | score ─ reference] ─ push ─ train ─ cpu
    asynchronous           [generate | score ─ reference ─ train ─ cpu] ─ push         [a | b]: the longer one
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlt_lightning.modules.phases import GIB
from rlt_lightning.numerics.packing import MicroBatch, SequenceLengths, micro_batches
from rlt_lightning.plan.inputs import LanguageModel, PlannedWorkers, Setup, Step
from rlt_lightning.plan.memory import count_pushed_bytes

# These constants are stated; docs/planning.md says where each comes from.
WORKER_OVERHEAD = 3 * GIB  # vLLM's own activations and graphs, per GPU
READ_EFFICIENCY = 0.8  # part of the peak rate at which decoding reads memory
WORKER_STEP = 1e-3  # seconds a token step that vLLM schedules and draws, on a GPU
HF_BLOCK_STEP = 1.4e-3  # seconds a token step and block that HFEngine needs on a GPU to start its kernels
HOST_BANDWIDTH = 20e9  # bytes per second and process: for offloaded states and their transfer
SLEEP_BANDWIDTH = 1e9  # bytes per second and worker: a sleeping worker copies into freshly pinned memory
ROW_SECONDS = 0.3e-6  # per token and pass: a row is built on the CPU while the GPU waits
TOKEN_SECONDS = 1e-6  # per token of a step: every process reads and checks all completions


@dataclass(frozen=True)
class Timing:
    """The expected time of a phase, and where it comes from."""

    name: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class StepTime:
    """The phases of a step, and how they add up."""

    phases: list[Timing]
    scores_early: bool = False
    asynchronous: bool = False

    def sum_seconds(self, *names: str) -> float:
        """Return the seconds of the named phases."""
        return sum(phase.seconds for phase in self.phases if phase.name in names)

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        sampling, scoring = self.sum_seconds("generate"), self.sum_seconds("score", "reference")
        training = self.sum_seconds("train", "step", "cpu")
        between = self.sum_seconds("push", "sleep")
        if self.asynchronous:
            return max(sampling, scoring + training) + between
        if self.scores_early:
            return max(sampling, scoring) + training + between
        return sampling + scoring + training + between

    @property
    def order(self) -> str:
        """Return in words how the phases follow each other."""
        if self.asynchronous:
            return "the next step is sampled while this one is scored and trained"
        if self.scores_early:
            return "completions are scored while others are sampled"
        return "one phase after the other"


@dataclass(frozen=True)
class Work:
    """What one rank computes in a pass over its sequences."""

    tokens: float  # in its rows: a shared prompt counts once a row
    pairs: float  # of tokens where one attends to the other
    scored: float  # tokens that the head scores


def count_work(step: Step, solution: int = 0) -> Work:
    """Return what the slowest rank computes, by the rows that the packer makes of sequences of mean length.

    Args:
        step: The step.
        solution: Tokens of the solution that each completion is followed by: the student's sequences. The
            student's prompt does not have them.
    """
    prompt = max(0, step.mean_prompt_length - solution)
    sequences = step.sequences(prompt, step.mean_completion_length + solution)
    rows = micro_batches(sequences, step.micro_batch_tokens, step.layout)
    return Work(
        tokens=step.load * sum(row.num_tokens for row in rows),
        pairs=step.load * sum(count_pairs(row, sequences, step.mean_square) for row in rows),
        scored=step.load * sum(sequence.num_rest for sequence in sequences),
    )


def count_pairs(row: MicroBatch, sequences: list[SequenceLengths], mean_square: float = 1.0) -> float:
    """Return the pairs of tokens where one attends to the other: within and between prefix and rests."""
    pairs = 0.0
    for family in row.families:
        prefix = sequences[family[0]].num_prefix
        rests = [sequences[i].num_rest for i in family]
        pairs += prefix * (prefix + 1) / 2
        pairs += sum((mean_square * rest * rest + rest) / 2 + rest * prefix for rest in rests)
    return pairs


def count_forward_flops(setup: Setup, model: LanguageModel, solution: int = 0) -> float:
    """Return the operations of one forward over the slowest rank's sequences; see `count_work`."""
    work = count_work(setup.step, solution)
    return (
        model.flops_per_token * work.tokens
        + model.flops_per_pair * work.pairs
        + model.flops_per_scored * work.scored
    )


def count_kv_tokens(setup: Setup, worker: PlannedWorkers) -> float:
    """Return how many tokens' keys and values fit beside the weights of one copy, over its GPUs."""
    gpus = worker.tensor_parallel_size
    room = gpus * (worker.gpu_memory_utilization * setup.device.memory - WORKER_OVERHEAD)
    room -= setup.policy.shape.weights * worker.weight_bytes
    return max(0.0, room / (setup.policy.shape.kv_per_token * worker.weight_bytes))


def count_rows_at_once(setup: Setup, worker: PlannedWorkers) -> float:
    """Return how many completions of full length one copy can work on at a time.

    The smallest of three limits counts: what fits at full length, the completions of a step, and
    `max_sequences`. A group shares its prompt's keys and values.
    """
    per_row = setup.step.completion_length + setup.step.prompt_length / setup.step.group_size
    in_step = setup.step.prompts * setup.step.group_size / worker.num_copies
    return min(count_kv_tokens(setup, worker) / per_row, in_step, worker.max_sequences)


def estimate_sampling_seconds(setup: Setup) -> float:
    """Return the time until the last completion of a step is there, sampled by copies of the weights.

    A copy works on many completions at a time, and one that ends gives its place to one that waits. In every
    token step it reads all weights, and the keys and values of every completion in flight:

        token steps = (completions / places - 1) * mean length + longest length
        seconds = max(token steps * weights + keys and values that are read, products) + overhead

    Places are at most `max_sequences`, and as many as keys and values fit.
    """
    step, worker, policy, device = setup.step, setup.worker, setup.policy, setup.device
    copies = worker.num_copies if worker else setup.num_processes
    number = -(-step.prompts * step.group_size // copies)
    mean, prompt = step.mean_completion_length, step.mean_prompt_length / step.group_size
    if setup.decode_rate:
        return number * mean / setup.decode_rate
    so_far = step.mean_square * mean / 2  # tokens of a completion in flight, on average
    places = min(number, worker.max_sequences if worker else setup.hf_sequences)
    if worker and not device.is_cpu:
        places = max(1, min(places, int(count_kv_tokens(setup, worker) / (prompt + so_far))))
    steps = (number / places - 1) * mean + step.expect_longest(number)
    gpus = worker.tensor_parallel_size if worker else 1
    size = worker.weight_bytes if worker else policy.weight_bytes
    bandwidth = device.bandwidth * gpus * (1.0 if device.is_cpu else READ_EFFICIENCY)
    per_token = (policy.flops_per_token + policy.flops_per_scored) / (device.flops * setup.mfu * gpus)
    reads = steps * policy.shape.weights + number * mean * (prompt + so_far) * policy.shape.kv_per_token
    seconds = max(reads * size / bandwidth, number * mean * per_token) + number * prompt * per_token
    overhead = WORKER_STEP if worker else HF_BLOCK_STEP * policy.shape.num_blocks
    return seconds if device.is_cpu else seconds + steps * overhead


def estimate_sampling(setup: Setup) -> Timing:
    """Return the time of sampling."""
    worker, step = setup.worker, setup.step
    if worker and not setup.device.is_cpu and count_rows_at_once(setup, worker) < 1:
        return Timing("generate", float("inf"), "no completion of full length fits into a worker")
    seconds = estimate_sampling_seconds(setup)
    copies = worker.num_copies if worker else setup.num_processes
    tokens = step.prompts * step.group_size * step.mean_completion_length
    rate = tokens / copies / seconds
    reason = f"{tokens:,} tokens: {name_number(copies, 'copy', 'copies')} at {rate:,.0f} tokens/s"
    return Timing("generate", seconds, reason)


def name_number(number: int, one: str, several: str) -> str:
    """Return a number of things with their name."""
    return f"{number} {one if number == 1 else several}"


def estimate_push(setup: Setup) -> list[Timing]:
    """Return the times that each step takes to bring weights to the workers, and of their sleep."""
    worker = setup.worker
    if worker is None or not worker.pushed or not setup.trains:
        return []  # a run that does not train pushes once, at its start
    size = count_pushed_bytes(setup, worker)
    reason = f"{size / 1e9:.1f} GB at {worker.push_bandwidth / 1e9:g} GB/s"
    found = [Timing("push", size / worker.push_bandwidth, reason)]
    # A worker drops its weights, which the next push brings, but not the base of an adapter.
    if worker.colocated and worker.sleeps and worker.only_adapter and not setup.device.is_cpu:
        own = setup.policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size
        seconds = own / SLEEP_BANDWIDTH + own / HOST_BANDWIDTH
        rates = f"{SLEEP_BANDWIDTH / 1e9:g}, and back at {HOST_BANDWIDTH / 1e9:g} GB/s"
        found.append(Timing("sleep", seconds, f"{own / 1e9:.1f} GB a worker at {rates}"))
    return found


def estimate_step(setup: Setup) -> StepTime:
    """Return the time of each phase of a step at the stated rates, without waiting and communication."""
    policy, students = setup.policy, setup.students
    rate = setup.device.flops * setup.mfu
    forward = count_forward_flops(setup, policy)
    samples = bool(setup.hf_sequences or setup.worker)
    found = [estimate_sampling(setup)] if samples else []
    found += estimate_push(setup)
    passes = 0

    def work(name: str, flops: float, reason: str) -> Timing:
        return Timing(name, flops / rate, f"{flops / 1e15:.3g} PFLOP on the slowest rank: {reason}")

    if students:
        passes += len(students) + setup.teacher_passes
        flops = setup.teacher_passes * forward
        for number, student in enumerate(students):
            of_student = replace(setup, step=setup.step.with_scoring_prompts(number))
            flops += count_forward_flops(of_student, student, setup.step.mean_solution_length)
        found.append(work("score", flops, describe_scoring(setup)))
    if setup.with_reference:
        passes += 1
        found.append(work("reference", forward, "one forward"))
    if setup.trains:
        passes += 1
        repeated = setup.forwards_per_step + setup.checkpointing
        flops, reason = repeated * forward, f"{repeated} forwards' worth"
        if setup.teacher is not None:
            passes += 1
            flops += count_forward_flops(
                replace(setup, step=setup.step.with_scoring_prompts(0)), setup.teacher
            )
            reason += " and the teacher's forward"
        if setup.trains_solutions:
            passes += 1
            of_scorer = replace(setup, step=setup.step.with_scoring_prompts(0))
            flops += repeated * count_forward_flops(of_scorer, policy, setup.step.mean_solution_length)
            reason += ", and as many with the solutions"
        found.append(work("train", flops, reason))
    if setup.offload_optimizer and setup.trains:
        own = policy.shape.trained / setup.state_shards
        moved = own * (setup.grad_bytes + policy.weight_bytes) + own * 2 * 3 * setup.master_bytes
        reason = f"{moved / 1e9:.1f} GB of states and gradients at {HOST_BANDWIDTH / 1e9:g} GB/s"
        found.append(Timing("step", moved / HOST_BANDWIDTH, reason))
    if not setup.device.is_cpu:  # on a CPU this is a small part of the rest
        found.append(estimate_cpu(setup, passes, samples))
    return StepTime(found, scores_early=setup.scores_early, asynchronous=setup.asynchronous)


def describe_scoring(setup: Setup) -> str:
    """Return in words which forwards a reward needs."""
    num_students, of_teacher = len(setup.students), setup.teacher_passes
    if setup.scorer != "frozen":
        of_policy = " and one of the policy" if of_teacher else ""
        return f"one forward of the {setup.scorer} with the solutions{of_policy}"
    students = "the student's forward" if num_students == 1 else f"the forwards of {num_students} students"
    if not of_teacher:
        return students
    return f"{students} and " + ("the teacher's" if of_teacher == 1 else f"{of_teacher} of the teacher")


def estimate_cpu(setup: Setup, passes: int, samples: bool) -> Timing:
    """Return the time in which the GPUs wait for rows to be built and completions to be read."""
    own = count_work(setup.step).tokens
    sampled = setup.step.prompts * setup.step.group_size * setup.step.mean_completion_length if samples else 0
    seconds = own * passes * ROW_SECONDS + sampled * TOKEN_SECONDS
    work = [f"rows for {passes} passes"] * (passes > 0) + ["completions read"] * samples
    return Timing("cpu", seconds, ", ".join(work))
