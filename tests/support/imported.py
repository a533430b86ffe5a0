"""List the modules that a file imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from commands import ROOT

PACKAGE = ROOT / "rlt_lightning"


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
