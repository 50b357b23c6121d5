"""The import rules of the package, read from its source without importing it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = "tilerelay"
SOURCE = Path(__file__).resolve().parent.parent / PACKAGE

# From the lowest layer to the highest. A module imports from its own layer and
# from lower ones.
LAYERS = ["graph", "protocol", "kernels", "runtime", "baselines", "bench", "cli"]

# Part -> the other parts of the package that it may import. A part is what
# stands right under the package: a folder or a module.
ALLOWED: dict[str, set[str]] = {layer: {"errors", *LAYERS[:height]} for height, layer in enumerate(LAYERS)}
ALLOWED["errors"] = set()
ALLOWED["trace"] = {"errors", "graph"}
ALLOWED["simulator"] = {"errors", "graph", "protocol", "trace"}
for part in ("protocol", "runtime", "bench", "cli"):
    ALLOWED[part].add("trace")
for part in ("runtime", "baselines", "bench", "cli"):
    ALLOWED[part].add("simulator")
# The package itself re-exports its public names; the commands stay out of it.
ALLOWED[PACKAGE] = set(ALLOWED) - {"cli"}
ALLOWED["cli"].add(PACKAGE)
ALLOWED["__main__"] = {"cli"}

# errors and trace are here because graph and protocol import them.
FORBIDDEN: dict[str, set[str]] = {
    "errors": {"torch", "triton"},
    "graph": {"torch", "triton"},
    "protocol": {"torch", "triton"},
    "simulator": {"torch"},
    "trace": {"torch", "triton"},
}


def module_name(path: Path) -> str:
    """tilerelay/graph/__init__.py -> tilerelay.graph.__init__"""
    return ".".join([PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts])


def part_of(module: str) -> str:
    """tilerelay.graph.tiling -> graph; the package itself -> tilerelay."""
    name = module.split(".")[1:2] or [PACKAGE]
    return PACKAGE if name == ["__init__"] else name[0]


def imported(source: str, module: str) -> list[tuple[int, str]]:
    """(line, full name) of every import in a source, wherever in it: in functions and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One dot is the folder of the module, which for an __init__ is its own.
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                found.append((node.lineno, str(name.value)))
    return found


def violations(source: str, module: str) -> list[str]:
    part = part_of(module)
    if part not in ALLOWED:
        return [f"{module}: {part} has no place in the table of this test"]
    found = []
    for line, name in imported(source, module):
        top = name.split(".")[0]
        if top != PACKAGE:
            if top in FORBIDDEN.get(part, ()):
                found.append(f"{module}:{line}: {part} must not import {top}")
            continue
        target = part_of(name)
        # `from tilerelay import Name` runs the package's __init__ for Name.
        target = target if target in ALLOWED else PACKAGE
        if target != part and target not in ALLOWED[part]:
            found.append(f"{module}:{line}: {part} must not import {target} ({name})")
    return found


def test_the_package_keeps_its_import_rules() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    parts = {part_of(module_name(path)) for path in paths}
    assert parts >= {PACKAGE, "errors", *LAYERS}, "modules are missing: the rules would hold for nothing"
    assert [v for path in paths for v in violations(path.read_text(encoding="utf-8"), module_name(path))] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tilerelay.graph.tiling", "import torch"),
        ("tilerelay.graph.tiling", "from triton.language import constexpr"),
        ("tilerelay.graph.tiling", "from tilerelay.protocol import plan"),
        ("tilerelay.graph.tiling", "from ..protocol import plan"),
        ("tilerelay.graph.__init__", "from .. import protocol"),
        ("tilerelay.graph.tiling", "from tilerelay import simulate"),
        ("tilerelay.protocol.plan", "def f():\n    import torch.cuda"),
        ("tilerelay.protocol.plan", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("tilerelay.protocol.plan", "import importlib\nimportlib.import_module('tilerelay.runtime')"),
        ("tilerelay.kernels.ring", "import tilerelay.runtime.launch as launch"),
        ("tilerelay.kernels.ring", "from tilerelay import trace"),
        ("tilerelay.bench.run", "from tilerelay.cli import main"),
        ("tilerelay.simulator", "import torch"),
        ("tilerelay.simulator", "from .kernels import ring"),
        ("tilerelay.trace", "from .protocol import plan"),
        ("tilerelay.errors", "from .graph import tiling"),
        ("tilerelay.__init__", "from .cli import main"),
        ("tilerelay.somewhere_new", ""),
    ],
)
def test_a_forbidden_import_is_reported(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tilerelay.graph.tiling", "import numpy\nfrom .catalog import gemm\nfrom ..errors import TileRelayError"),
        ("tilerelay.graph.__init__", "from .tiling import Tiling"),
        ("tilerelay.protocol.plan", "from tilerelay import trace\nfrom ..graph.tiling import Tiling"),
        ("tilerelay.runtime.launch", "import torch\nfrom ..kernels import ring"),
        ("tilerelay.simulator", "from .protocol import plan\nfrom . import graph, trace"),
        ("tilerelay.__init__", "from .runtime import run"),
        ("tilerelay.__main__", "from .cli import main"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_the_public_names_are_few_and_can_be_imported() -> None:
    package = importlib.import_module(PACKAGE)
    assert 0 < len(set(package.__all__)) == len(package.__all__) <= 20
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
