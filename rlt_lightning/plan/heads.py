"""Memory of language-model heads: hidden states of scored tokens, tiles of logits, the weight's gradient."""

from __future__ import annotations

from rlt_lightning.plan.inputs import LanguageModel, Setup

HEAD_TILES = 4  # tiles of logits, and of what is computed from them, that the head holds at a time
PAIR_TILES = 7  # the same for a divergence, where two halves are a tile; traced are 5 to 6.5


def head_forward(setup: Setup, model: LanguageModel, num_scored: int) -> float:
    """Return the hidden states of scored tokens, in fp32 on a CPU, and the tiles of logits."""
    return num_scored * model.shape.hidden_size * 4 + HEAD_TILES * setup.logits_bytes


def head_grad(setup: Setup) -> float:
    """Return the whole gradient of the head's weight; the embedding's is as large."""
    return setup.policy.shape.head_trained * setup.policy.product_bytes


def head_backward(setup: Setup, num_scored: int) -> float:
    """Return the forward's needs, the gradients of hidden states in fp32, and the weight's gradient.

    A divergence from a teacher keeps the teacher's hidden states too, and more tiles.
    """
    more = num_scored * setup.policy.shape.hidden_size * 4
    if setup.teacher is not None and setup.compares_words:
        more += num_scored * setup.teacher.shape.hidden_size * 4
        more += (PAIR_TILES - HEAD_TILES) * setup.logits_bytes
    return head_forward(setup, setup.policy, num_scored) + more + head_grad(setup)


def gathered_head(setup: Setup) -> float:
    """Return what of a teacher's shards is whole while the policy's head is: the teacher's own head."""
    teacher = setup.copied_teacher
    if setup.shards == 1 or teacher is None or not setup.compares_words:
        return 0.0
    # FSDP2 gathers all weights outside the blocks together.
    shape = teacher.shape
    return (shape.outside if setup.sharding == "fsdp2" else shape.largest) * teacher.product_bytes
