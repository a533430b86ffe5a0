"""The layout of the package: imports point downwards.

The layers, from low to high; a module may import from its own layer and those below:

    types worker → tags numerics → run → models judging → checkpoints strategies → metrics
    → datamodules tasks engines → rollouts → rewards → modules → callbacks → trainer → teacher → commands
    → cli → __main__ and __init__, which exports what scripts use
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name

import pytest
from commands import ROOT

PACKAGE = ROOT / "rlt_lightning"

LAYERS = [
    {"types", "worker"},
    {"tags", "numerics"},
    {"run"},
    {"models", "judging"},
    {"checkpoints", "strategies"},
    {"metrics"},
    {"datamodules", "tasks", "engines"},
    {"rollouts"},
    {"rewards"},
    {"modules"},
    {"callbacks"},
    {"trainer"},
    {"teacher"},
    {"commands"},
    {"cli"},
    {"__main__", "__init__"},
]
# The only files that import these packages, so that a laptop without them runs all the rest.
WRAPPERS = {
    "vllm": {"worker/vllm.py"},
    "trl": set(),  # TRL calls us; only a test and a benchmark import it
    "deepspeed": {"models/weights.py", "strategies/sharding.py", "strategies/zero.py"},
    "wandb": {"trainer.py"},  # asks for the login before a run; Lightning's logger does the rest
}
# Names that a library calls private and that have no public way, by file: which object has them.
PRIVATE = {
    "callbacks/checkpoint.py": {
        "lightning.pytorch.callbacks:ModelCheckpoint": "_last_global_step_saved _monitor_candidates "
        "_save_topk_checkpoint"
    },
    "cli/parser.py": {
        "jsonargparse": "_typehints",
        "jsonargparse._typehints": "ActionTypeHint discard_init_args_on_class_path_change",
    },
    "cli/stages.py": {"lightning.pytorch.cli:LightningCLI": "_parse_ckpt_path"},
    "datamodules/sources.py": {"datasets:Dataset": "_fingerprint"},
    "engines/slots.py": {
        "torch.ops:aten": "_scaled_dot_product_flash_attention_for_cpu",
        "transformers:GenerationMixin": "_prepare_cache_for_generation _supports_logits_to_keep "
        "_update_model_kwargs_for_generation",
    },
    "judging/compare.py": {"sympy:Float": "_prec"},
    "judging/judge.py": {"multiprocessing.spawn": "_inheriting"},
    "models/attention.py": {
        "transformers:PreTrainedConfig": "_attn_implementation",
        "transformers:PreTrainedModel": "_supports_sdpa",
    },
    "models/file_names.py": {"transformers.core_model_loading": "_weight_conversions"},
    "models/kernels.py": {"transformers:PreTrainedModel": "_no_split_modules"},
    "models/lora.py": {"peft.tuners.lora:LoraLayer": "_cast_input_dtype _disable_adapters"},
    "modules/checks.py": {"lightning.pytorch.strategies:DDPStrategy": "_start_method"},
    "modules/policy.py": {"lightning.pytorch:LightningModule": "_trainer"},
    "numerics/attention.py": {
        "torch.ops:aten": "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward"
    },
    "numerics/head.py": {"torch.utils": "_pytree"},
    "numerics/varlen.py": {
        "torch.ops:aten": "_flash_attention_backward _flash_attention_forward",
        "flash_attn.flash_attn_interface": "_wrapped_flash_attn_varlen_backward "
        "_wrapped_flash_attn_varlen_forward",
    },
    "run/interrupt.py": {
        "lightning.pytorch.trainer.connectors.signal_connector": "_SignalConnector _original_handlers "
        "_register_signal _sigterm_notifier_fn _slurm_sigusr_handler_fn",
        "lightning.pytorch:Trainer": "_signal_connector",
    },
    "strategies/fsdp2.py": {
        "lightning.pytorch.strategies:ModelParallelStrategy": "_data_parallel_size _tensor_parallel_size"
    },
    "strategies/zero.py": {
        "lightning.pytorch.strategies:DeepSpeedStrategy": "_init_config_if_needed _init_optimizers",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": "_hp_optimizer_states_linked "
        "_lazy_init_hp_params_optimizer_state",
    },
    "trainer.py": {
        "lightning.pytorch:Trainer": "_default_root_dir",
        "lightning.pytorch.loggers:WandbLogger": "_log_model _offline",
    },
    "worker/gloo.py": {
        "torch.distributed:ProcessGroupGloo": "_Options",
        "torch.distributed:ProcessGroupGloo._Options": "_devices _timeout",
    },
    "worker/ipc.py": {
        "torch": "_C",
        "torch:_C": "_accelerator_getAllocatorSettings _accelerator_setAllocatorSettings",
        "torch:UntypedStorage": "_new_shared_cuda _share_cuda_",
    },
}

BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "patch.object"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by name."""
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.Module) -> set[str]:
    """Names that a module imports, at its top or inside functions: modules, and attributes of modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports within the package are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def imports() -> dict[str, set[str]]:
    """Modules of the package that each module imports; a name of a package is its `__init__`."""
    graph = {}
    for name, tree in trees().items():
        found = {path if path in trees() else path.rpartition(".")[0] for path in imported(tree)}
        graph[name] = (found & trees().keys()) - {name, "rlt_lightning"}
    return graph


def list_private(tree: ast.Module) -> set[str]:
    """Names with an underscore that a file uses and does not define."""
    nodes = list(ast.walk(tree))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    defined |= {a.attr for a in attributes if isinstance(a.ctx, ast.Store) and ast.unparse(a.value) == "self"}
    used = {a.attr for a in attributes} - defined
    used |= {a.attr for a in attributes if ast.unparse(a.value) == "super()"}
    used |= {part for name in imported(tree) for part in name.split(".")}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    named = [a for call in calls if ast.unparse(call.func) in BY_NAME for a in call.args]
    used |= {str(a.value) for a in named if isinstance(a, ast.Constant)} - {""}
    public = {"_exit", "_replace"}  # of os and of named tuples
    return {name for name in used if name[0] == "_" and name[:2] != "__"} - public


def folder_of(module: str) -> str:
    """The entry of the package's root that a module lies in."""
    return [*module.split("."), "__init__"][1]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rlt_lightning", "torch"),
        ("rlt_lightning.judging.judge", "torch"),
        ("rlt_lightning.worker.ipc", "lightning"),
    ],
)
def test_some_modules_load_little(module: str, absent: str) -> None:
    code = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_import_runs_upwards() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    upwards = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in sorted(others)
        if level[folder_of(other)] > level[folder_of(module)]
    ]
    assert upwards == []


def test_no_modules_import_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()  # an error names the circle


def test_only_wrappers_import_heavy_packages() -> None:
    for package, wrappers in WRAPPERS.items():
        found = {
            str(path.relative_to(PACKAGE))
            for path in PACKAGE.rglob("*.py")
            if package in {name.split(".")[0] for name in imported(trees()[module_name(path)])}
        }
        assert found == wrappers, package


def test_private_names_of_libraries_are_listed() -> None:
    for path in PACKAGE.rglob("*.py"):
        listed = " ".join(PRIVATE.get(str(path.relative_to(PACKAGE)), {}).values()).split()
        assert list_private(trees()[module_name(path)]) <= set(listed), path
        assert all(name in path.read_text() for name in listed), path


@pytest.mark.parametrize("file", PRIVATE)
def test_libraries_still_have_their_private_names(file: str) -> None:
    for owner, names in PRIVATE[file].items():
        pytest.importorskip(owner.partition(":")[0].partition(".")[0])
        found = resolve_name(owner)
        source = read_source(found)
        missing = [name for name in names.split() if not hasattr(found, name) and name not in source]
        assert missing == [], f"{owner} has lost names that {file} uses"


def read_source(found: object) -> str:
    try:
        return inspect.getsource(found)  # type: ignore[arg-type]
    except (OSError, TypeError):  # it is compiled
        return ""
