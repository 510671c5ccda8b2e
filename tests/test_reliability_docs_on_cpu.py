# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""docs/reliability.md names a test behind each promise: they must be there."""

import ast
import re
from functools import lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "reliability.md"
TRANSPORT_PAINS = (68, 69, 70, 71, 72, 73, 74, 76, 78, 79, 80, 81, 82, 83, 85, 88, 89)
"""Numbers of the known pains of transport, failures and scale."""


@lru_cache
def functions_of(path: str) -> set[str]:
    """Names of the test functions of a file; empty when it is not there."""
    file = REPOSITORY / path
    if not file.is_file():
        return set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, functions)}


def test_every_named_test_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE.read_text())
    assert len(named) > 50
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []
    files = re.findall(r"`(tests/[\w/]+\.py)`", PAGE.read_text())
    assert all((REPOSITORY / path).is_file() for path in files)


def test_every_promise_names_a_test():
    """Each row of a table and each point of a list."""
    text = PAGE.read_text()
    points = re.split(r"\n- ", text.split("## How often")[1].split("## The chaos suite")[0])[1:]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert [promise[:60] for promise in points + rows if "::test_" not in promise] == []


def test_every_known_pain_of_transport_is_named_by_a_test():
    texts = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__)]
    missing = [n for n in TRANSPORT_PAINS if not any(re.search(rf"\bP{n}\b", text) for text in texts)]
    assert missing == []
