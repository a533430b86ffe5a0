"""Find the lengths of a step's sequences.

rows and tokenizer on this machine     they are tokenised
embedded rows, no tokenizer            the same, with the tokens of a stand-in
anything else, or plan.prompt_length   the settings' limits, and means as parts of them
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import count_student_tokens
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.sources import MemoryRows
from rlt_lightning.modules import LikelihoodModule, RLTModule
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.plan.inputs import PlanOptions, Step, Verb
from rlt_lightning.plan.models import Models
from rlt_lightning.tasks import EMBEDDED

# Assumed where nothing better is known (docs/planning.md): means as parts of the longest, the solution as a
# part of the prompt, and the spread of the logarithm of completions, between problems and within one.
MEAN_FRAC, MEAN_PROMPT_FRAC, SOLUTION_FRAC = 0.3, 1 / 16, 0.5
BETWEEN = WITHIN = 0.47
# The longest question of an evaluation set that is not on this machine, and the mean.
QUESTION, MEAN_QUESTION = 1024, 256
# Questions of each evaluation set on this machine that are read: making many of Countdown takes a minute.
FIRST_QUESTIONS = 64
# Reads the rows of embedded sources where the model's own tokenizer is not on this machine.
STAND_IN = "miniature"
TOKENIZER_OF = "the tokenizer of "


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts, of what follows them, and of the solutions within the prompts.

    Example:
        `Lengths(512, 200, 16384, 5000, 90)`: prompts of up to 512 tokens and 200 on average, of which 90 are
        the solution; completions of up to 16,384 tokens and 5,000 on average.
    """

    prompt: int
    mean_prompt: int
    rest: int
    mean_rest: int
    mean_solution: int
    spread: float = math.hypot(BETWEEN, WITHIN)  # of all sequences
    # Of each model that reads completions after other prompts (`Step.scoring_prompts`).
    scoring_prompts: tuple[tuple[int, int] | None, ...] = ()
    num_batches: int | None = None  # of all rows that are used; None: the rows are not on this machine


def read_step(
    verb: Verb,
    module: PolicyModule,
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
    num_processes: int,
    models: Models,
    notes: list[str],
) -> Step:
    """Return the sequences of one step or batch, and note where their lengths come from.

    Rows are read and tokenised only if they and the tokenizer are on this machine: nothing is downloaded.
    """
    sampled = module if isinstance(module, OnPolicyModule) else None
    scores = isinstance(module, RLTModule)
    samples = sampled is not None and not has_completions(data)
    limit = rollouts.sampling.max_completion_length if samples else None
    missing = find_missing(data, models)
    if options.prompt_length is None and not missing:
        found = read_rows(verb, data, models.find_folder, limit)
        source = f"rows of {' and '.join(map(str, list_sources(data)))}"
    elif options.prompt_length is None and can_stand_in(data, missing):
        # Its vocabulary is small, so it makes more tokens, not fewer.
        found = read_rows(verb, data, lambda _: STAND_IN, limit)
        rows = " and ".join(map(str, list_sources(data)))
        source = f"rows of {rows} in tokens of {STAND_IN}, for {missing[0]} is not on this machine"
    else:
        found = assume_lengths(data, options, limit)
        given = options.prompt_length is not None
        source = "given" if given else f"assumed, for {missing[0]} is not on this machine"
    lengths = apply_options(found, options, scores)
    notes.append(
        f"prompts of up to {lengths.prompt} tokens, {lengths.mean_prompt} on average ({source}); "
        f"completions of up to {lengths.rest}, {lengths.mean_rest} on average"
    )
    notes += note_scoring_prompts(lengths, module)
    prompts, group_size = read_sizes(verb, sampled, data, rollouts)
    return Step(
        num_processes=num_processes,
        prompts=prompts,
        group_size=group_size,
        prompt_length=lengths.prompt,
        completion_length=lengths.rest,
        mean_prompt_length=lengths.mean_prompt,
        mean_completion_length=lengths.mean_rest,
        micro_batch_tokens=module.micro_batch_tokens,
        layout=module.layout,
        mean_solution_length=lengths.mean_solution if scores else 0,
        spread_between=BETWEEN if sampled else 0.0,
        spread_within=WITHIN if sampled else lengths.spread,
        balanced=sampled is not None,
        scoring_prompts=lengths.scoring_prompts,
        num_batches=lengths.num_batches,
    )


def note_scoring_prompts(lengths: Lengths, module: PolicyModule) -> list[str]:
    """Return a line for each model that reads completions after prompts of its own."""
    if not isinstance(module, RLTModule):
        read = "the teacher reads them after prompts with the solution, of up to {} tokens, {} on average"
        return [read.format(*found) for found in lengths.scoring_prompts if found is not None]
    if isinstance(module, LikelihoodModule):
        read = "the scorer reads prompts and solutions of up to {} tokens, {} on average, around each thought"
        return [read.format(*found) for found in dict.fromkeys(lengths.scoring_prompts) if found is not None]
    names = module.students.names
    notes = []
    for name, found in zip(names, lengths.scoring_prompts, strict=False):
        if found is not None:
            whose = "the student" if len(names) == 1 else f"the student {name}"
            notes.append(
                f"prompts and solutions of up to {found[0]} tokens of {whose}'s own, {found[1]} on average; "
                "completions as many as of the teacher"
            )
    return notes


def read_sizes(
    verb: Verb,
    sampled: OnPolicyModule | None,
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback,
) -> tuple[int, int]:
    """Return the number of problems in a step or batch, and of completions of each."""
    if isinstance(data, EvaluationDataModule):
        return data.batch_size, rollouts.num_traces
    if verb == "fit":
        return data.prompts_per_step, sampled.group_size if sampled else 1
    return data.val_batch_size, 1 if has_completions(data) else rollouts.num_traces


def has_completions(data: StratosDataModule | EvaluationDataModule) -> bool:
    """Return whether rows bring their completions, which are only scored."""
    return isinstance(data, StratosDataModule) and data.task == "score"


def list_sources(data: StratosDataModule | EvaluationDataModule) -> Sequence[str | MemoryRows]:
    """Return where rows or questions come from."""
    if isinstance(data, EvaluationDataModule):
        return [spec.source for spec in data.specs.values()]
    return data.sources


def find_missing(data: StratosDataModule | EvaluationDataModule, models: Models) -> list[str]:
    """Return what is not on this machine of that which decides lengths: sources and tokenizers."""
    format_from = data.format_options.format_from
    sources = [*list_sources(data), *([format_from] if format_from else [])]
    paths = [source for source in sources if isinstance(source, str) and source not in EMBEDDED]
    missing = [path for path in paths if not is_here(path)]
    names = (data.tokenizer_name, *getattr(data, "student_names", ()))
    tokenizers = [name for name in names if name]
    return missing + [TOKENIZER_OF + name for name in tokenizers if not models.has_tokenizer(name)]


def is_here(source: str) -> bool:
    """Return whether a source is a file or a folder, which a configuration may follow."""
    return any(Path(name).expanduser().exists() for name in (source, source.partition(":")[0]))


def can_stand_in(data: StratosDataModule | EvaluationDataModule, missing: list[str]) -> bool:
    """Tell whether the rows are embedded ones, and nothing but tokenizers is missing."""
    embedded = all(source in EMBEDDED for source in list_sources(data))
    return embedded and all(what.startswith(TOKENIZER_OF) for what in missing)


def read_rows(
    verb: Verb,
    data: StratosDataModule | EvaluationDataModule,
    folder: Callable[[str], str],
    limit: int | None,
) -> Lengths:
    """Read and tokenise the rows; `limit` is that of completions, None where rows bring them."""
    data = copy.copy(data)
    data.output_dir = None
    data.tokenizer_name = folder(str(data.tokenizer_name))
    if isinstance(data, EvaluationDataModule):
        num_batches = count_question_batches(data)
        data.max_rows = min(data.max_rows or FIRST_QUESTIONS, FIRST_QUESTIONS)
        data.setup("test")
        assert limit is not None
        asked = [len(problem.prompt) for problem in data.problems]
        mean = max(1, round(MEAN_FRAC * limit))
        return Lengths(max(asked), rounded_mean(asked), limit, mean, 0, num_batches=num_batches)
    if data.val_sources:
        # These rows may be on the hub, and val_rows counts them.
        data.val_sources, data.val_rows = [], 0
    data.student_names = tuple(map(folder, data.student_names))
    data.setup(verb)
    items = data.all_items
    batches = len(data.step_loader()) if verb == "fit" else -(-len(items) // data.val_batch_size)
    if items.is_examples:
        prompts = data.items.sum_columns("num_prompt").tolist()
        rests = (data.items.sum_columns("token_ids") - prompts).tolist()
        means = rounded_mean(prompts), rounded_mean(rests)
        spread = measure_spread(rests)
        return Lengths(max(prompts), means[0], max(rests), means[1], 0, spread, num_batches=batches)
    prompts = items.sum_columns("teacher_prefix", "think_prefix").tolist()
    solution = rounded_mean(items.sum_columns("solution_ids").tolist())
    if data.task == "student_likelihood":
        own: tuple[tuple[int, int] | None, ...] = tuple(
            (int(fixed.max()), rounded_mean(fixed.tolist())) for fixed in count_student_tokens(data)
        )
    elif data.task == "student_opd":
        views = items.sum_columns("teacher_view").tolist()
        own = ((max(views), rounded_mean(views)),)
    else:
        own = tuple(
            (int(fixed.max()), rounded_mean(fixed.tolist()))
            if isinstance(chat_format, CrossTokenizerFormat)
            else None
            for chat_format, fixed in zip(data.student_views.formats, count_student_tokens(data), strict=True)
        )
    sizes = max(prompts), rounded_mean(prompts)
    if limit is not None:
        mean = max(1, round(MEAN_FRAC * limit))
        return Lengths(*sizes, limit, mean, solution, scoring_prompts=own, num_batches=batches)
    rests = items.sum_columns("completion_ids").tolist()
    return Lengths(*sizes, max(rests), rounded_mean(rests), solution, measure_spread(rests), own, batches)


def count_question_batches(data: EvaluationDataModule) -> int | None:
    """Return the batches of an evaluation, at most; None if only the files of its sets know."""
    return None if data.max_rows is None else -(-data.max_rows * len(data.specs) // data.batch_size)


def measure_spread(lengths: Sequence[int]) -> float:
    """Return the standard deviation of the logarithm of lengths."""
    return statistics.pstdev([math.log(max(1, length)) for length in lengths])


def assume_lengths(
    data: StratosDataModule | EvaluationDataModule, options: PlanOptions, limit: int | None
) -> Lengths:
    """Return lengths by the settings' limits."""
    if isinstance(data, EvaluationDataModule):
        assert limit is not None
        longest = options.prompt_length or QUESTION
        return Lengths(longest, min(MEAN_QUESTION, longest), limit, max(1, round(MEAN_FRAC * limit)), 0)
    longest = options.prompt_length or (0 if limit is None else data.max_prompt_length)
    rest = limit or max(1, data.max_length - longest)
    average = round(MEAN_PROMPT_FRAC * longest)
    solution = round(SOLUTION_FRAC * average)
    mean_rest = max(1, round(MEAN_FRAC * rest))
    if data.task == "student_opd":  # only the teacher reads the solution
        return Lengths(longest, average - solution, rest, mean_rest, 0, scoring_prompts=((longest, average),))
    if data.task == "student_likelihood":  # only the scorer reads the solution
        own = ((longest + solution, average + solution),) * max(1, len(data.student_names))
        return Lengths(longest, average, rest, mean_rest, solution, scoring_prompts=own)
    return Lengths(longest, average, rest, mean_rest, solution)


def apply_options(found: Lengths, options: PlanOptions, samples: bool) -> Lengths:
    """Return the lengths, with the options' values where they are set."""
    rest, mean_rest = found.rest, found.mean_rest
    if options.completion_length is not None:
        rest = options.completion_length
        mean_rest = max(1, round(MEAN_FRAC * rest))
    mean_prompt = min(options.mean_prompt_length or found.mean_prompt, found.prompt)
    holds_solution = max(mean_prompt, *(own[1] for own in found.scoring_prompts if own is not None), 0)
    return Lengths(
        prompt=found.prompt,
        mean_prompt=mean_prompt,
        rest=rest,
        mean_rest=min(options.mean_completion_length or mean_rest, rest),
        mean_solution=min(found.mean_solution, holds_solution) if samples else 0,
        spread=found.spread,
        scoring_prompts=found.scoring_prompts,
        num_batches=found.num_batches,
    )


def rounded_mean(lengths: Sequence[int]) -> int:
    """Return the mean, rounded to a whole number of tokens, at least 1."""
    return max(1, round(sum(lengths) / len(lengths)))
