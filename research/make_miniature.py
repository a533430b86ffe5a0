"""Pretrain the embedded model `miniature` from scratch on a CPU core, in some minutes: `make miniature`.

The first phase has short chains with right steps, which teach the steps, and traces of a teacher that leaps
to the solution, which teach copying; the second has traces of uneven quality. Both phases have examples in
the format of students and in that of teachers.

    python research/make_miniature.py --output_dir FOLDER [--seed 1] [--architecture qwen2]
    python research/make_miniature.py --output_dir FOLDER --tokenizer pieces
    python research/make_miniature.py --output_dir FOLDER --corpus sheets
    python research/make_miniature.py --output_dir FOLDER --corpus knowledge    # both bases of named chains
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from gates import IGNORED, KNOWN, MAX_STEPS, Corpus, measure_gates, measure_named_gates
from torch.nn.functional import cross_entropy

from rlt_lightning.models.load import load_model
from rlt_lightning.tags import R1
from rlt_lightning.tasks.draw import find_split
from rlt_lightning.tasks.named_chains import (
    NUM_PAIRS,
    Facts,
    build_mixture,
    build_named_chain,
    draw_facts,
    draw_named_chain,
    make_names,
)
from rlt_lightning.tasks.stepwise import (
    CHAIN_SPLITS,
    CHAIN_WORDING,
    OPERATIONS,
    Mixture,
    StepwiseProblem,
    apply_operation,
    draw_chains,
    draw_trace,
)
from rlt_lightning.types import SFTExample

DRILL_STEPS = 3  # of a chain of the first phase
BATCH = 64  # sequences
PEAK_LR = 2e-3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# With a token before the conversation and another name for the assistant, as Gemma's.
PIECES_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SPACE = "\u2581"  # "▁", a space in the names of tokens


def words_of_the_task() -> list[str]:
    """Return all words of questions, traces and chats."""
    sentences = [*CHAIN_WORDING.filler, *CHAIN_WORDING.leaps, "start add times is user assistant system"]
    return sorted({word for text in sentences for word in text.format(answer="").split()})


def words_tokenizer(names: Sequence[str] = ()) -> Any:
    """Make a tokenizer with one token for each word of the task, and bytes for all other text.

    A tag and the line break after it are one token, as with Qwen's: the separator behind an opening tag is
    then part of the prompt's last token.

    Args:
        names: Further words, behind a space; their tokens are the last ones.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    digits = [str(digit) for digit in range(10)]
    tags = [tag + end for tag in R1.tags().values() for end in ("", "\n")]
    pieces = [start + word for word in [*words_of_the_task(), *digits] for start in ("", " ")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [
        "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))
        for text in [*pieces, "\\boxed{", *tags, *(f" {name}" for name in names)]
    ]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = list(dict.fromkeys([*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *spelled]))
    model = models.BPE({word: i for i, word in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    split = Regex(r"</?[a-z]+>\n?|\\boxed\{| ?[A-Za-z]+| ?\d|\s|.")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = TEMPLATE
    return fast


def pieces_tokenizer() -> Any:
    """Make a tokenizer that divides the same texts otherwise, laid out like Llama 2's and Gemma's.

    Words are divided into pieces of at most four letters. A number and the sign after it are one token, and
    so are a full stop or brace and the line break after it. Tags and their line breaks are apart. All other
    text is single bytes.

        words    start│ 2│,│ times│ 3│?        6│ times│ 7│ is│ 2│.│\\n│</think>│
        pieces   star│t│ 2,│ time│s│ 3?        6│ time│s│ 7│ is│ 2.\\n│</think>│
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [word[i : i + 4] for word in [*words_of_the_task(), "model"] for i in range(0, len(word), 4)]
    ends = ("", ",", "?", ".", ".\n", "}", "}\n")
    numbers = [f"{digit}{end}" for digit in range(10) for end in ends]
    starts = [start + text for text in [*words, *numbers] for start in ("", SPACE)]
    special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    others = [SPACE, "\n", ",", ".", "?", "\\boxed{", *R1.tags().values()]
    vocabulary = dict.fromkeys([*special, *bytes_, *others, *starts])
    model = models.BPE(
        {word: i for i, word in enumerate(vocabulary)}, merges=[], ignore_merges=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    split = Regex(rf"</?[a-z]+>|\\boxed\{{|{SPACE}?[A-Za-z]{{1,4}}|{SPACE}?\d([,?]|[.}}]\n?)?|\s|.")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(split, "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        additional_special_tokens=["<eos>", "<start_of_turn>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = PIECES_TEMPLATE
    return fast


TOKENIZERS = {"words": words_tokenizer, "pieces": pieces_tokenizer}


def make_model(architecture: str, tokenizer: Any, seed: int) -> Any:
    """Make the untrained model: three layers of 64, two heads of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[architecture]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,  # of 32: vLLM's CPU attention takes no smaller ones
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model_class(config)


class PretrainingCorpus(Corpus):
    """Draws the examples of pretraining, in the formats of later training."""

    def draw(self, most_steps: int) -> StepwiseProblem:
        """Draw a problem."""
        [problem] = draw_chains(self.rng, 1, self.rng.randint(1, most_steps), "pretrain")
        return problem

    def drill(self) -> SFTExample:
        """Draw a problem with right steps or, in half of a teacher's, a leap to the solution it sees."""
        problem = self.draw(DRILL_STEPS)
        as_teacher = self.rng.random() < 0.5
        leaps = as_teacher and self.rng.random() < 0.5
        return self.example(problem, self.trace(problem, "leap" if leaps else "steps"), as_teacher)

    def mixed(self) -> SFTExample:
        """Draw a problem of any length with a trace of uneven quality."""
        problem = self.draw(MAX_STEPS)
        trace = draw_trace(problem, CHAIN_WORDING, Mixture(), self.rng)
        return self.example(problem, trace, as_teacher=self.rng.random() < 0.4)


class SheetCorpus(PretrainingCorpus):
    """Draws sheets of single steps: no result is carried into the next step, and no problem is a chain.

    Example: "2 add 1, 6 times 7?" has the steps "2 add 1 is 3" and "6 times 7 is 2", and the answer 2.
    """

    def draw(self, most_steps: int) -> StepwiseProblem:
        """Draw a sheet; of any length in both phases, since short ones teach no more of a step."""
        return draw_sheet(self.rng, self.rng.randint(1, MAX_STEPS))


def draw_sheet(rng: Random, length: int) -> StepwiseProblem:
    """Draw a sheet of independent steps, of which the last one has the answer."""
    asked = [(rng.randrange(10), *rng.choice(OPERATIONS)) for _ in range(length)]
    results = [apply_operation(value, (name, number)) for value, name, number in asked]
    texts = [f"{value} {name} {number}" for value, name, number in asked]
    steps = [f"{text} is {result}" for text, result in zip(texts, results, strict=True)]

    def derail(place: int, rng: Random) -> list[str]:
        wrong = rng.choice([digit for digit in range(10) if digit != results[place]])
        return [f"{texts[place]} is {wrong}", *steps[place + 1 :]]

    return StepwiseProblem(f"{', '.join(texts)}?", str(results[-1]), steps, derail)


CORPORA = {"chains": PretrainingCorpus, "sheets": SheetCorpus}


def pretrain(
    model: Any, corpus: PretrainingCorpus, tokenizer: Any, num_steps: int, num_drills: int, stop_after: int
) -> list[dict[str, float]]:
    """Train the model; return the loss of every step and, every 100 steps, the figures of the gates."""
    return train(
        model,
        corpus,
        lambda step: [(corpus.drill if step < num_drills else corpus.mixed)() for _ in range(BATCH)],
        num_steps,
        stop_after,
        100,
        lambda: measure_gates(model, tokenizer),
        compute_loss,
    )


def compute_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the tokens that count."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def compute_loss_fast(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the same, to the last digits, without logits where none count."""
    counted = labels[:, 1:] != IGNORED
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    return cross_entropy(model.lm_head(hidden[counted]), labels[:, 1:][counted])


def train(
    model: Any,
    corpus: Corpus,
    draw_batch: Callable[[int], list[SFTExample]],
    num_steps: int,
    stop_after: int,
    num_warmup: int,
    measure: Callable[[], dict[str, float]],
    compute_loss: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
) -> list[dict[str, float]]:
    """Train the model; return the loss of every step and, every 100 steps, its figures.

    Args:
        model: The model.
        corpus: Pads the examples.
        draw_batch: Returns the examples of a step.
        num_steps: Steps of the schedule: a warm-up, then half a cosine.
        stop_after: Steps after which to stop; for a look at the first ones.
        num_warmup: Steps of the warm-up.
        measure: Returns the model's figures.
        compute_loss: Returns the loss of a batch.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)

    def share_of_peak(step: int) -> float:
        return min(1, (step + 1) / num_warmup) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / num_steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak)
    log, begin, num_tokens = [], time.perf_counter(), 0
    for step in range(min(num_steps, stop_after)):
        ids, labels = corpus.batch(draw_batch(step))
        loss = compute_loss(model, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        num_tokens += int((ids != corpus.pad_token_id).sum())
        log.append({"step": step + 1, "loss": round(float(loss.detach()), 5)})
        if (step + 1) % 100 == 0:
            log[-1] |= measure()
            print(
                f"{log[-1]}, {num_tokens / 1e6:.1f} M tokens, {time.perf_counter() - begin:.0f} s", flush=True
            )
    return log


# Named chains


@dataclass(frozen=True)
class Phase:
    """A part of the pretraining on named chains.

    Args:
        num_steps: Optimizer steps, of 32 sequences.
        known: Part of the names, the last ones, whose facts never change; the others are drawn each time.
        teachers: Part of the examples that are in the format of teachers.
        dense: Part of the examples in which only what names add counts: chains for a teacher to infer it from
            or, where names are known, lists for a student to learn.
        grows: States before names are at first all 0 in dense chains, then 0 or 1, and so on: `draw_dense`.
        twice: Part of the examples that say names twice, of which only the second ones count: a model that
            has found out how to copy a name from nearby then learns to copy it from the question.
        drill: Nearly all traces have right steps; else they are of uneven quality.
    """

    num_steps: int
    known: float = 0
    teachers: float = 0.5
    dense: float = 0
    grows: bool = False
    twice: float = 0
    drill: bool = False


NAMED_BATCH = 32  # sequences
NAMED_WARMUP = 50  # steps
# Parts with a schedule each. A teacher that infers what a name adds from the states around it, then learns to
# say the name.
TEACHER_PARTS = (
    (
        Phase(600, dense=0.85, grows=True, drill=True),
        Phase(200, dense=0.5, drill=True),
        Phase(250, dense=0.2),
    ),
    (Phase(150, twice=0.5, drill=True), Phase(200, teachers=0.7, drill=True), Phase(200)),
    (Phase(350, teachers=0.7, drill=True), Phase(200)),
)
# A student that learns what all names add and then forgets half of it. So it has a way to recall.
STUDENT_PARTS = (
    (
        Phase(250, known=1, teachers=0.1, dense=0.7, drill=True),
        Phase(150, known=1, teachers=0.1, drill=True),
        Phase(150, known=0.5, drill=True),
        Phase(250, known=0.5),
    ),
    (
        Phase(150, known=0.5, twice=0.5, drill=True),
        Phase(200, known=0.5, teachers=0.3, drill=True),
        Phase(200, known=0.5),
    ),
)
ALL_STATES = 0.6  # of a phase, after which a dense chain has any digit before a name
NUM_LISTED = 16  # names in a list
DRILLED = build_mixture(steps=0.9, filler=0.03, leap=0.069)
UNEVEN = {True: build_mixture(0.1, 0.6, 0.15), False: build_mixture(0.5, 0.3, 0.05)}  # of teachers, students


class NamedCorpus(Corpus):
    """Draws the examples of pretraining on named chains.

    Args:
        tokenizer: With a token for each name.
        seed: Seed of what is drawn.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        super().__init__(tokenizer, seed)
        self.rng = Random(f"named chains {seed}")
        self.facts: Facts = draw_facts(KNOWN)
        self.names = make_names()
        self.first_name = len(tokenizer) - len(self.names)  # token
        [self.is_], [self.add] = tokenizer.encode(" is"), tokenizer.encode(" add")

    def draw(self, phase: Phase, at: float) -> SFTExample:
        """Draw an example.

        Args:
            phase: Its phase.
            at: Part of the phase that is over.
        """
        num_known = round(phase.known * len(self.names))
        facts = {name: self.facts[name] for name in self.names[len(self.names) - num_known :]}
        if self.rng.random() < phase.dense:
            greatest = min(9, int(10 * at / ALL_STATES)) if phase.grows else 9
            return self.draw_list(facts) if facts else self.draw_dense(greatest)
        as_teacher = self.rng.random() < phase.teachers
        if phase.twice and self.rng.random() < phase.twice:
            return self.draw_twice(as_teacher)
        problem = self.draw_problem(facts)
        mixture = DRILLED if phase.drill else UNEVEN[as_teacher]
        return self.example(problem, draw_trace(problem, CHAIN_WORDING, mixture, self.rng), as_teacher)

    def draw_problem(self, facts: Facts) -> StepwiseProblem:
        """Draw a problem of the split of pretraining."""
        while True:
            problem = draw_named_chain(self.rng, self.names, facts)
            if find_split(problem.question, CHAIN_SPLITS) == "pretrain":
                return problem

    def draw_dense(self, greatest: int) -> SFTExample:
        """Draw a teacher's chain of one to three names, with no greater state than this one before a name.

        After 0 a name adds the state after it, which the solution has: a model that has found out how to copy
        it then learns to subtract 1, and so on. From all states at once it would learn nothing for long.
        """
        rng = self.rng
        value = start = rng.randrange(10)
        known, named = [], []
        for name in rng.sample(self.names, rng.choice((1, 2, NUM_PAIRS, NUM_PAIRS))):
            before, operand = rng.randint(0, greatest), rng.randrange(10)
            known.append(("add", (before - value) % 10))
            named.append((name, operand))
            value = (before + operand) % 10
        problem = build_named_chain(start, known, named)
        return self.count_operands(self.example(problem, CHAIN_WORDING.trace(problem.steps), as_teacher=True))

    def draw_list(self, facts: Facts) -> SFTExample:
        """Draw a student's list of what names add: "blik is add 7, dorf is add 1"."""
        items = [f"{name} is add {facts[name]}" for name in self.rng.sample(list(facts), NUM_LISTED)]
        example = self.example(self.draw_problem(facts), CHAIN_WORDING.trace(items), as_teacher=False)
        return self.count_operands(example)

    def count_operands(self, example: SFTExample) -> SFTExample:
        """Let the loss count only what names add."""
        ids = example.token_ids
        mask = [
            place > 1 and counts and ids[place - 2 : place] == [self.is_, self.add]
            for place, counts in enumerate(example.loss_mask)
        ]
        return replace(example, loss_mask=mask)

    def draw_twice(self, as_teacher: bool) -> SFTExample:
        """Draw names, each twice: "blik, blik, dorf, dorf"."""
        problem = self.draw_problem({})
        names = self.rng.sample(self.names, NUM_LISTED)
        example = self.example(
            problem, CHAIN_WORDING.trace([f"{name}, {name}" for name in names]), as_teacher
        )
        ids = example.token_ids
        mask = [
            place > 1 and counts and ids[place] >= self.first_name and ids[place] == ids[place - 2]
            for place, counts in enumerate(example.loss_mask)
        ]
        return replace(example, loss_mask=mask)


def pretrain_named(
    model: Any, corpus: NamedCorpus, phases: Sequence[Phase], stop_after: int
) -> list[dict[str, float]]:
    """Train the model through phases with one schedule."""
    places = [(phase, step / phase.num_steps) for phase in phases for step in range(phase.num_steps)]

    def draw_batch(step: int) -> list[SFTExample]:
        return [corpus.draw(*places[step]) for _ in range(NAMED_BATCH)]

    def measure() -> dict[str, float]:
        return measure_named_gates(model, corpus.format.tokenizer)

    return train(model, corpus, draw_batch, len(places), stop_after, NAMED_WARMUP, measure, compute_loss_fast)


def make_named(folder: Path, seed: int, stop_after: int) -> None:
    """Write the bases of the teacher and of the student, each from the miniature, into two folders."""
    tokenizer = words_tokenizer(make_names())
    for name, parts in (("teacher", TEACHER_PARTS), ("student", STUDENT_PARTS)):
        torch.manual_seed(seed)  # of the embeddings of names
        model = load_model("miniature").float()
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        log = []
        for number, phases in enumerate(parts):
            log += pretrain_named(model, NamedCorpus(tokenizer, seed + number), phases, stop_after)
        save(folder / f"named-chains-{name}", model, tokenizer, log)


def save(folder: Path, model: Any, tokenizer: Any, log: list[dict[str, float]]) -> None:
    """Write a model's folder, with the losses in `pretraining.jsonl`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "pretraining.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


def main(words: list[str] | None = None) -> None:
    """Write the model folder, with the losses in `pretraining.jsonl`.

    Args:
        words: The options; None: those of the command line.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--architecture", choices=("llama", "qwen2"), default="llama")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="words")
    parser.add_argument("--num_steps", type=int, default=2000, help="optimizer steps, of 64 sequences")
    parser.add_argument("--num_drills", type=int, default=1100, help="of them, steps on short right chains")
    parser.add_argument("--stop_after", type=int, default=10**9, help="steps; for a look at the first ones")
    parser.add_argument("--corpus", choices=(*CORPORA, "knowledge"), default="chains")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)  # the sums of two threads differ in their last digits
    if arguments.corpus == "knowledge":
        make_named(arguments.output_dir, arguments.seed, arguments.stop_after)
        return
    tokenizer = TOKENIZERS[arguments.tokenizer]()
    model = make_model(arguments.architecture, tokenizer, arguments.seed)
    corpus = CORPORA[arguments.corpus](tokenizer, arguments.seed)
    log = pretrain(model, corpus, tokenizer, arguments.num_steps, arguments.num_drills, arguments.stop_after)
    save(arguments.output_dir, model, tokenizer, log)


if __name__ == "__main__":
    main()
