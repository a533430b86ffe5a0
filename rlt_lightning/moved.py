"""What had another name in the last release: modules, functions, methods. The old name warns, and works.

A class path in somebody's YAML, or an import in a script, keeps working for one release. Empty the table in
the next one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# Old module → the modules that have its public names now. Without the package's name.
MOVED: dict[str, tuple[str, ...]] = {
    "callbacks.answer_rows": ("callbacks.predictions",),
    "callbacks.completions": ("callbacks.recorder",),
    "callbacks.distillation": ("callbacks.predictions",),
    "callbacks.dynamic_sampling": ("rollouts.dynamic_sampling",),
    "callbacks.engine_link": ("rollouts.dispatcher",),
    "callbacks.evaluation": ("evaluation.callbacks",),
    "callbacks.metrics": ("callbacks.checkpoint",),
    "callbacks.order": ("rollouts.request",),
    "callbacks.responses": ("evaluation.callbacks", "evaluation.protocol"),
    "callbacks.together": ("rollouts.collectives",),
    "callbacks.waves": ("rollouts.sampler",),
    "checkpoints.choices": ("checkpoints.folder",),
    "checkpoints.named": ("checkpoints.io",),
    "cli.borrowed": ("cli.shared_settings",),
    "cli.failure": ("cli.ranks",),
    "cli.restarts": ("cli.ranks",),
    "cli.teach": ("cli.shared_settings",),
    "cli.verbs": ("cli.shared_settings",),
    "cli.watch": ("cli.ranks",),
    "datamodules.arithmetic": ("tasks.arithmetic",),
    "datamodules.chains": ("tasks.stepwise",),
    "datamodules.countdown": ("tasks.countdown",),
    "datamodules.files": ("datamodules.sources",),
    "datamodules.hub": ("datamodules.sources",),
    "datamodules.items": ("datamodules.tokenize",),
    "datamodules.keys": ("datamodules.token_cache",),
    "datamodules.orders": ("datamodules.loader",),
    "datamodules.preparation": ("datamodules.tokenize",),
    "datamodules.published": ("datamodules.evaluation_sets",),
    "datamodules.readers": ("datamodules.student_views",),
    "datamodules.responses": ("datamodules.rows",),
    "datamodules.retelling": ("datamodules.cross_tokenizer",),
    "datamodules.settings": ("datamodules.stratos",),
    "datamodules.stored": ("datamodules.token_cache",),
    "datamodules.token_bytes": ("datamodules.cross_tokenizer",),
    "datamodules.tokenise": ("datamodules.tokenize",),
    "datamodules.tokenised": ("datamodules.token_cache",),
    "datamodules.uneven": ("tasks.stepwise",),
    "datamodules.views": ("datamodules.teacher_views",),
    "datamodules.word_sums": ("tasks.stepwise",),
    "engines.batch": ("engines.hf",),
    "engines.decoders": ("engines.slots",),
    "engines.disk": ("engines.push",),
    "engines.drawing": ("engines.hf",),
    "engines.gpus": ("engines.launch",),
    "engines.staging": ("engines.push",),
    "engines.verification": ("engines.base", "engines.fleet"),
    "engines.weights": ("engines.push", "engines.threads", "engines.launch"),
    "engines.worker": ("engines.fleet",),
    "integrations.scorer": ("scoring.one_problem",),
    "judging.questions": ("datamodules.evaluation", "datamodules.evaluation_sets"),
    "judging.worker": ("judging.judge",),
    "models.announce": ("console", "pretrained", "models.weights", "models.kernels", "models.packed"),
    "models.attention_choice": ("models.kernels",),
    "models.checks": ("models.kernels",),
    "models.cpu_linear": ("models.kernels",),
    "models.fused": ("models.kernels",),
    "models.layouts": ("models.packed",),
    "models.slots": ("engines.slots",),
    "models.waiting": ("console",),
    "modules.accuracy": ("evaluation.metrics",),
    "modules.baseline": ("modules.scorer",),
    "modules.checked": ("modules.base", "modules.on_policy"),
    "modules.evaluation": ("evaluation.module",),
    "modules.judged": ("modules.opd",),
    "modules.logged": ("modules.step_metrics",),
    "modules.meter": ("modules.phases",),
    "modules.reading": ("modules.scorer",),
    "modules.retold": ("modules.scorer",),
    "modules.sampled": ("modules.on_policy",),
    "modules.scoring": ("modules.scorer",),
    "modules.shares": ("rollouts.shards", "modules.on_policy"),
    "modules.students": ("modules.scorer",),
    "modules.validated": ("modules.base",),
    "numerics.decoding": ("engines.slots",),
    "numerics.jsd": ("numerics.divergence",),
    "numerics.kl": ("numerics.divergence",),
    "numerics.masks": ("numerics.rewards",),
    "numerics.top_words": ("numerics.divergence",),
    "plan.page": ("plan.verdict",),
    "planner.heads": ("plan.memory",),
    "planner.known": ("plan.models",),
    "planner.options": ("plan.inputs",),
    "planner.processes": ("plan.settings",),
    "planner.page": ("plan.verdict",),
    "planner.rows": ("plan.lengths",),
    "planner.sampling": ("plan.time",),
    "planner.shapes": ("plan.models",),
    "planner.timing": ("plan.time",),
    "planner.verbs": ("plan.settings",),
    "planner.workers": ("plan.settings",),
    "python.surroundings": ("python.environment",),
    "records.catalogue": ("run.metrics",),
    "records.catalogue.columns": ("run.metrics",),
    "records.catalogue.distillation": ("run.metrics",),
    "records.catalogue.entry": ("run.metrics",),
    "records.catalogue.evaluation": ("run.metrics",),
    "records.catalogue.page": ("run.metrics",),
    "records.catalogue.performance": ("run.metrics",),
    "records.catalogue.policy": ("run.metrics",),
    "records.catalogue.registry": ("run.metrics",),
    "records.catalogue.rewards": ("run.metrics",),
    "records.catalogue.saved": ("run.metrics",),
    "records.group_plot": ("run.ranking",),
    "records.results": ("evaluation.results",),
    "records.rows": ("run.rollout_rows",),
    "records.run_folder": ("run.folder",),
    "report.completion_rows": ("report.collect",),
    "report.completions": ("report.collect",),
    "report.explain": ("scoring.explain",),
    "report.heat": ("scoring.text",),
    "report.taught": ("scoring.teach", "scoring.one_problem"),
    "report.teach": ("scoring.teach",),
    "run.results": ("evaluation.results",),
    "scoring.scorer": ("scoring.one_problem",),
}
# Old name of a public function or class → its new one, in the same module or where its module moved to. A new
# name with dots has its own module.
RENAMED: dict[str, str] = {
    "callbacks.order.Order": "RolloutRequest",
    "callbacks.recorder.ScoreWriter": "callbacks.predictions.ScoreWriter",
    "callbacks.rollout_checks.ReadingModel": "ModelContext",
    "callbacks.rollout_checks.find_reading_models": "list_model_contexts",
    "console.counted": "show_count",
    "datamodules.evaluation.evaluation_of": "get_evaluation_data",
    "datamodules.filters.ngrams": "list_ngrams",
    "datamodules.filters.within": "is_within",
    "datamodules.formats.masked_example": "build_masked_example",
    "datamodules.readers.Reader": "StudentView",
    "datamodules.readers.Readers": "StudentViews",
    "datamodules.retelling.RetellingFormat": "CrossTokenizerFormat",
    "datamodules.rows.missing_columns": "find_missing_columns",
    "datamodules.stratos.stratos_of": "get_stratos_data",
    "datamodules.token_bytes.PlainTokenizer": "ByteExactTokenizer",
    "datamodules.tokenise.tokenise": "tokenize_rows",
    "datamodules.views.with_other_solutions": "swap_solutions",
    "engines.budget.generate_with_budget": "sample_with_budget",
    "engines.generate_with_budget": "sample_with_budget",
    "engines.threads.in_background": "run_in_background",
    "engines.verification.disagreement": "find_disagreement",
    "models.lora.adapter_weights": "list_adapter_weights",
    "models.lora.merged_weights": "merge_weights",
    "models.packed.ask": "call_model",
    "models.packed.log_probs_of": "compute_log_probs",
    "models.packed.verified_layout": "verify_layout",
    "models.weights.trained": "trained_tensors",
    "modules.frozen.Run": "RunModel",
    "modules.meter.PhaseCost": "PhaseStats",
    "modules.meter.StepMeter": "PhaseTimer",
    "modules.sampled.SampledModule": "OnPolicyModule",
    "modules.scorer.known_empty": "collect_empty_scores",
    "modules.scoring.StudentScorer": "Scorer",
    "modules.sft.example_sequence": "build_example_sequence",
    "numerics.Extent": "SequenceLengths",
    "numerics.advantages.in_groups": "split_groups",
    "numerics.balance.divide": "balance_shards",
    "numerics.balance.room_of": "compute_room",
    "numerics.divide": "balance_shards",
    "numerics.head.rows_of": "select_rows",
    "numerics.packing.Extent": "SequenceLengths",
    "numerics.packing.by_size": "sort_by_size",
    "numerics.packing.numbers_in": "expand_ranges",
    "numerics.packing.row_of": "build_row",
    "numerics.varlen.inputs_of": "select_inputs",
    "plan.page.plan_page": "format_plan",
    "plan.plan_page": "format_plan",
    "planner.page.plan_page": "format_plan",
    "pretrained.plain_attention": "can_replace_attention",
    "report.page.data_of_rows": "build_data_of_rows",
    "run.rollout_rows.own_token_columns": "build_student_token_columns",
    "run.rollout_rows.token_columns": "build_token_columns",
    "strategies.sharding.Entry": "ModelEntry",
    "strategies.sharding.Whole": "Unsharded",
    "strategies.sharding.sharding_of": "get_sharding",
    "types.Retold": "ModelView",
    "types.Seen": "ModelView",
    "types.View": "ModelView",
}
# Old package → new package, whose modules have kept their names, unless the table above has them.
PACKAGES = {
    "records": "run",
    "loggers": "run",
    "planner": "plan",
    "integrations": "scoring",
}


def new_places(name: str) -> tuple[str, ...]:
    """Return the modules that have the public names of a module that moved; none if it has not."""
    package, _, rest = name.partition(".")
    if name in MOVED or package not in PACKAGES:
        return MOVED.get(name, ())
    path = Path(__file__).parent.joinpath(PACKAGES[package], *rest.split("."))
    exists = path.is_dir() or path.with_suffix(".py").is_file()
    return (f"{PACKAGES[package]}.{rest}".rstrip("."),) if exists else ()


def was_package(name: str) -> bool:
    """Return whether modules of that old name had modules inside."""
    return name in PACKAGES or any(other.startswith(f"{name}.") for other in MOVED)


class MovedModule(ModuleType):
    """Stands for a module that moved: looks each name up in the modules that have it now."""

    def __getattr__(self, name: str) -> Any:
        """Return what the old name stands for."""
        # With the `__path__` of the new package, Python would load its files a second time.
        if name.startswith("__"):
            raise AttributeError(name)
        old = self.__name__.removeprefix("rlt_lightning.")
        places = [f"rlt_lightning.{place}" for place in new_places(old)]
        found = RENAMED.get(f"{old}.{name}", name)
        for place in places:
            module = import_module(place)
            if hasattr(module, found):
                return getattr(module, found)
        raise AttributeError(f"module {self.__name__!r} moved to {', '.join(places)}, which has no {name!r}")


class MovedFinder:
    """Finds the modules of the table, after Python's own finders have found none of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to make a module that moved; None for every other."""
        package, _, name = fullname.partition(".")
        if package != "rlt_lightning" or not new_places(name):
            return None
        return ModuleSpec(fullname, self, is_package=was_package(name))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in, and say where its names are now."""
        places = ", ".join(f"rlt_lightning.{place}" for place in new_places(spec.name.partition(".")[2]))
        warnings.warn(
            f"{spec.name} has moved to {places}. The old name works in this release only: change it.",
            FutureWarning,
            stacklevel=2,
        )
        return MovedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are asked for."""


def find_renamed(module: str, name: str) -> Any:
    """Return what an old name of a module that stayed stands for, and warn; the module's `__getattr__`."""
    new = RENAMED.get(f"{module.partition('.')[2]}.{name}")
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(
        f"{module}.{name} is called {new} now. The old name works in this release only: change it.",
        FutureWarning,
        stacklevel=2,
    )
    place, _, new_name = new.rpartition(".")
    return getattr(import_module(f"rlt_lightning.{place}" if place else module), new_name)


class RenamingLoader(SourceFileLoader):
    """Loads a module that stayed, some of whose names have changed."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then let it look up its old names."""
        super().exec_module(module)
        module.__dict__["__getattr__"] = partial(find_renamed, module.__name__)


class RenamingFinder:
    """Finds the modules that stayed and have names in `RENAMED`, before Python's own finders do."""

    def __init__(self) -> None:
        stayed = {name.rpartition(".")[0] for name in RENAMED} - MOVED.keys()
        self.modules = {f"rlt_lightning.{name}" for name in stayed}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module with renamed names; None for every other."""
        if fullname not in self.modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = RenamingLoader(spec.loader.name, spec.loader.path)
        return spec


def rename_method(old: str, new: str) -> Callable[..., Any]:
    """Return a method for the old name, which warns and calls the one of the new name."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{old} is called {new} now. The old name works in this release only: "
            "change it.",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(self, new)(*args, **options)

    call.__name__, call.__doc__ = old, f"Call `{new}`, the name of this method now."
    return call


def install() -> None:
    """Let old names be imported; safe to call twice."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
        sys.meta_path.insert(0, RenamingFinder())
