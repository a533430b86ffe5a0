"""Estimate the time of a step: work divided by stated rates, without waiting and communication.

The slowest rank counts, of lengths that differ (lengths.py). How the phases add up depends on the run:

    one after the other    generate ─ push ─ sleep ─ score ─ reference ─ train ─ cpu
    score while sampling   [generate | score ─ reference] ─ push ─ train ─ cpu
    asynchronous           [generate | score ─ reference ─ train ─ cpu] ─ push         [a | b]: the longer one
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlt_lightning.plan.inputs import LanguageModel, Setup
from rlt_lightning.plan.lengths import NUM_STEPS, rank_loads
from rlt_lightning.plan.memory import pushed
from rlt_lightning.plan.sampling import rows_at_once, sampling_seconds

# These constants are stated; docs/planning.md says where each comes from.
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

    def sum_of(self, *names: str) -> float:
        """Return the seconds of the named phases."""
        return sum(phase.seconds for phase in self.phases if phase.name in names)

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        sampling, scoring = self.sum_of("generate"), self.sum_of("score", "reference")
        training = self.sum_of("train", "step", "cpu")
        between = self.sum_of("push", "sleep")
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


def forward_flops(setup: Setup, model: LanguageModel, solution: int = 0) -> float:
    """Return the operations of one forward over the slowest rank's sequences; see `rank_loads`."""
    totals = []
    for seed in range(NUM_STEPS):
        loads = rank_loads(setup.step, solution, seed)
        totals.append(
            max(
                model.flops_per_token * load.tokens
                + model.flops_per_pair * load.pairs
                + model.flops_per_scored * load.scored
                for load in loads
            )
        )
    return sum(totals) / NUM_STEPS


def generate_timing(setup: Setup) -> Timing:
    """Return the time of sampling."""
    worker, step = setup.worker, setup.step
    if worker and not setup.device.is_cpu and rows_at_once(setup, worker) < 1:
        return Timing("generate", float("inf"), "no completion of full length fits into a worker")
    seconds = sampling_seconds(setup)
    copies = worker.num_copies if worker else setup.num_processes
    tokens = step.prompts * step.group_size * step.mean_completion_length
    rate = tokens / copies / seconds
    return Timing("generate", seconds, f"{tokens:,} tokens: {copies} copies at {rate:,.0f} tokens/s")


def worker_timings(setup: Setup) -> list[Timing]:
    """Return the times that each step takes to bring weights to the workers, and of their sleep."""
    worker = setup.worker
    if worker is None or not worker.pushed or not setup.trains:
        return []  # a run that does not train pushes once, at its start
    size = pushed(setup, worker)
    reason = f"{size / 1e9:.1f} GB at {setup.push_bandwidth / 1e9:g} GB/s"
    found = [Timing("push", size / setup.push_bandwidth, reason)]
    # A worker drops its weights, which the next push brings, but not the base of an adapter.
    if worker.colocated and worker.sleeps and worker.only_adapter and not setup.device.is_cpu:
        own = setup.policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size
        seconds = own / SLEEP_BANDWIDTH + own / HOST_BANDWIDTH
        rates = f"{SLEEP_BANDWIDTH / 1e9:g}, and back at {HOST_BANDWIDTH / 1e9:g} GB/s"
        found.append(Timing("sleep", seconds, f"{own / 1e9:.1f} GB a worker at {rates}"))
    return found


def timings(setup: Setup) -> StepTime:
    """Return the time of each phase of a step at the stated rates, without waiting and communication."""
    policy, students = setup.policy, setup.students
    rate = setup.device.flops * setup.mfu
    forward = forward_flops(setup, policy)
    samples = bool(setup.hf_sequences or setup.worker)
    found = [generate_timing(setup)] if samples else []
    found += worker_timings(setup)
    passes = 0

    def work(name: str, flops: float, reason: str) -> Timing:
        return Timing(name, flops / rate, f"{flops / 1e15:.3g} PFLOP on the slowest rank: {reason}")

    if students:
        # Hidden states of the teacher, for the exact KL, are computed again with each student.
        of_teacher = setup.recompute_teacher * (len(students) if setup.exact_kl else 1)
        passes += len(students) + of_teacher
        flops = of_teacher * forward
        for number, student in enumerate(students):
            of_student = replace(setup, step=setup.step.of_reader(number))
            flops += forward_flops(of_student, student, setup.step.mean_solution_length)
        found.append(work("score", flops, score_reason(len(students), of_teacher)))
    if setup.with_reference:
        passes += 1
        found.append(work("reference", forward, "one forward"))
    if setup.trains:
        passes += 1
        repeated = setup.forwards_per_step + setup.checkpointing
        flops, reason = repeated * forward, f"{repeated} forwards' worth"
        if setup.teacher is not None:
            passes += 1
            flops += forward_flops(replace(setup, step=setup.step.of_reader(0)), setup.teacher)
            reason += " and the teacher's forward"
        found.append(work("train", flops, reason))
    if setup.offload_optimizer and setup.trains:
        own = policy.shape.trained / setup.state_shards
        moved = own * (setup.grad_bytes + policy.weight_bytes) + own * 2 * 3 * setup.master_bytes
        reason = f"{moved / 1e9:.1f} GB of states and gradients at {HOST_BANDWIDTH / 1e9:g} GB/s"
        found.append(Timing("step", moved / HOST_BANDWIDTH, reason))
    if not setup.device.is_cpu:  # on a CPU this is a small part of the rest
        found.append(cpu_timing(setup, passes, samples))
    return StepTime(found, scores_early=setup.scores_early, asynchronous=setup.asynchronous)


def score_reason(num_students: int, of_teacher: int) -> str:
    """Return in words which forwards a reward needs."""
    students = "the student's forward" if num_students == 1 else f"the forwards of {num_students} students"
    if not of_teacher:
        return students
    return f"{students} and " + ("the teacher's" if of_teacher == 1 else f"{of_teacher} of the teacher")


def cpu_timing(setup: Setup, passes: int, samples: bool) -> Timing:
    """Return the time in which the GPUs wait for rows to be built and completions to be read."""
    own = max(load.tokens for load in rank_loads(setup.step))
    sampled = setup.step.prompts * setup.step.group_size * setup.step.mean_completion_length if samples else 0
    seconds = own * passes * ROW_SECONDS + sampled * TOKEN_SECONDS
    work = [f"rows for {passes} passes"] * (passes > 0) + ["completions read"] * samples
    return Timing("cpu", seconds, ", ".join(work))
