"""Score completions while the engine samples the others of the step.

An engine outside the process, on GPUs of its own, leaves the trainer's GPUs idle while it samples. So the
completions come in waves, and each wave is scored at once. Each ═ is a collective: all ranks wait there.

    engine   ─── sample ───────────────────────────────────────────┐
    rank 0       wave 1 ═▶ score ═ wave 2 ═▶ score ═ ...  last wave ═▶ score ─▶ update
    rank 1              ═▶ score ═        ═▶ score ═ ...            ═▶ score ─▶ update

Why each wait ends:

    rank 0, for completions         the engine's thread puts a mark behind the last one, also after an error;
                                    the engine returns or raises within its own deadlines
    the others, for rank 0's wave   rank 0 hands on the wave or its EngineError; `deadline_s` bounds the rest
    all, to divide a wave           every rank got the same wave just before, an empty one too
    sharded ranks, in a forward     a rank without a part of the wave runs what another has (`Share.spare`)

No weight moves before the last wave is scored, so the rewards equal those of scoring all at the end, up to
rounding, since micro-batches differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from lightning.pytorch import Trainer

from rlt_lightning.callbacks.engine_link import EngineLink
from rlt_lightning.callbacks.order import Order
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.modules.reading import Reading
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.types import Problem, PromptBatch, Rollout, Rollouts

# Sampled tokens of a wave, in full forwards of each rank: a smaller wave would fill no forward, a larger one
# would leave more to score after the last completion (benchmarks/overlap.py).
WAVE_FORWARDS = 1


class Arrived(NamedTuple):
    """A rank's part of a wave."""

    rollouts: dict[int, Rollout]  # by their place among the rank's rollouts
    ended_at: float | None  # in the last wave: when the engine was done, time.perf_counter()


def waves(
    link: EngineLink,
    trainer: Trainer,
    module: PolicyModule,
    problems: list[Problem],
    order: Order,
    min_tokens: int,
) -> Iterator[Arrived]:
    """Sample what an order misses, and yield completions in waves while the engine samples the rest.

    All ranks get equally many waves, the last when the engine is done. It may be empty.

    Args:
        link: The link to an engine outside the process.
        trainer: The trainer.
        module: The module whose policy samples.
        problems: The problems of this rank.
        order: Holds the problems of all ranks.
        min_tokens: A wave has at least this many sampled tokens over all ranks; the last may have fewer.
    """
    own = link.own_positions(trainer, problems, order)
    data, size = stratos_of(trainer), order.num_completions
    while True:
        with module.phase("generate") as cost:
            wave = link.call(trainer, lambda: order.next_wave(min_tokens))
            ended_at = time.perf_counter() - wave.waited_s
            order.handed |= wave.completions
            rollouts = {
                (place - own.start) * size + number: data.rollout(problems[place - own.start], completion)
                for (place, number), completion in sorted(wave.completions.items())
                if place in own
            }
            cost.tokens += sum(len(rollout.completion.token_ids) for rollout in rollouts.values())
        if wave.completions or wave.complete:
            yield Arrived(rollouts, ended_at if wave.complete else None)
        if wave.complete:
            return
        if not wave.sampling:
            link.begin(trainer, module, order)


def read_in_waves(
    link: EngineLink,
    trainer: Trainer,
    module: RLTModule,
    batch: PromptBatch,
    order: Order,
    with_reference: bool,
) -> Reading:
    """Let models read an order's completions as they come, then put this rank's part into the batch.

    Args:
        link: The link to an engine outside the process.
        trainer: The trainer.
        module: The module whose models read.
        batch: The problems of this rank.
        order: Holds the problems of all ranks.
        with_reference: Whether the reference reads, too.
    """
    num_own = len(batch.problems) * order.num_completions
    min_tokens = WAVE_FORWARDS * module.micro_batch_tokens * trainer.world_size
    found: dict[int, Rollout] = {}
    spans: list[tuple[float, float]] = []
    ended_at = 0.0

    def like(rollouts: list[Rollout]) -> Rollouts:
        temperature = order.sampling.temperature
        return Rollouts(rollouts, order.num_completions, order.policy_version, temperature)

    reading = Reading.of(module, like([]), num_own, with_reference=with_reference)
    for arrived in waves(link, trainer, module, batch.problems, order, min_tokens):
        start = time.perf_counter()
        # As training_step, with the precision that the models run in.
        with trainer.precision_plugin.train_step_context():
            reading.add(arrived.rollouts)
        spans.append((start, time.perf_counter()))
        found |= arrived.rollouts
        ended_at = arrived.ended_at or ended_at
    batch.rollouts = like([found[place] for place in range(num_own)])
    module.phase.phases["score"].hidden_s += hidden_seconds(spans, ended_at)
    return reading


def hidden_seconds(spans: list[tuple[float, float]], ended_at: float) -> float:
    """Return how long the spans, from start to end, lasted before `ended_at`."""
    return sum(max(0.0, min(end, ended_at) - start) for start, end in spans)
