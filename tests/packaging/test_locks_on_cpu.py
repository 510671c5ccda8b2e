# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The lock files are complete and agree with pyproject.toml, and what is installed is what they say."""

import platform
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts.lock import marker_for, notes_of
from tests.packaging.locks import LEFT_OUT_ON_PURPOSE, PROJECT, PYTHONS, read_pins, requirements_of

THIS_PYTHON = ".".join(platform.python_version_tuple()[:2])


def direct_requirements(extras: list[str], python: str) -> list[Requirement]:
    """List what this project asks for with some of its extras, and what the extras of verl among them ask for."""
    direct: list[Requirement] = []
    for extra in ["", *extras]:
        direct += requirements_of(PROJECT, extra, python)
    for requirement in [r for r in direct if r.name == "verl"]:
        for extra in requirement.extras:
            direct += requirements_of("verl", extra, python)
    return direct


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("kind", "extras"), [("cpu", ["cpu", "test", "openenv", "dev"]), ("gpu", ["gpu", "test"])], ids=["cpu", "gpu"]
)
def test_lock_satisfies_what_the_project_asks_for(kind, extras, python):
    pins = read_pins(kind, python)
    if kind == "cpu":
        pins["torch"] = "2.13.0+cpu"
    for requirement in direct_requirements(extras, python):
        name = canonicalize_name(requirement.name)
        if name in (PROJECT, "verl") and name not in pins:
            continue
        assert name in pins, f"requirements/{kind}.txt lacks {requirement} for Python {python}: run `make lock`"
        assert requirement.specifier.contains(pins[name], prereleases=True), (
            f"{name}=={pins[name]} is not {requirement}"
        )


def test_gpu_lock_holds_verls_own_engine_versions():
    pins = read_pins("gpu", "3.12")
    wanted = {r.name: r.specifier for r in requirements_of("verl", "vllm", "3.12") if str(r.specifier).startswith("==")}
    assert {"vllm", "torch", "transformers"} <= wanted.keys()
    assert all(specifier.contains(pins[name]) for name, specifier in wanted.items())


def test_installed_versions_are_the_pinned_ones():
    pins = read_pins("cpu", THIS_PYTHON)
    assert {name: metadata.version(name) for name in pins} == pins


def test_every_requirement_of_every_installed_package_is_met():
    """What `--no-deps` skips: walk the whole graph from this project, each package with the extras asked of it."""
    problems = set()
    queue = [(PROJECT, extra) for extra in ("", "cpu", "test", "openenv", "dev")]
    seen = set(queue)
    while queue:
        name, extra = queue.pop()
        for requirement in requirements_of(name, extra, THIS_PYTHON):
            wanted = canonicalize_name(requirement.name)
            if wanted in LEFT_OUT_ON_PURPOSE:
                continue
            try:
                version = metadata.version(wanted)
            except metadata.PackageNotFoundError:
                problems.add(f"{name} asks for {requirement}, which is not installed")
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                problems.add(f"{name} asks for {requirement}, found {version}")
            for edge in [(wanted, ""), *((wanted, wanted_extra) for wanted_extra in requirement.extras)]:
                if edge not in seen:
                    seen.add(edge)
                    queue.append(edge)
    assert not problems, "\n".join(sorted(problems))


def test_torch_is_the_cpu_build_and_its_companions_are_absent():
    assert metadata.version("torch") == "2.13.0+cpu"
    present = {canonicalize_name(distribution.name) for distribution in metadata.distributions()}
    assert not present & LEFT_OUT_ON_PURPOSE
    assert not any(name.startswith("nvidia-cu") for name in present)


def test_installed_verl_is_in_the_range_that_the_project_accepts():
    (verl,) = [r for r in requirements_of(PROJECT, "", THIS_PYTHON) if r.name == "verl"]
    assert verl.specifier == SpecifierSet(">=0.9.1,<0.10")
    assert verl.specifier.contains(metadata.version("verl"))


@pytest.mark.parametrize(
    ("pythons", "marker"),
    [
        (["3.10", "3.11", "3.12"], ""),
        (["3.11", "3.12"], ' ; python_version >= "3.11"'),
        (["3.10"], ' ; python_version < "3.11"'),
        (["3.11"], ' ; python_version == "3.11"'),
        (["3.10", "3.12"], ' ; python_version == "3.10" or python_version == "3.12"'),
    ],
    ids=["all", "newer", "oldest", "middle", "gap"],
)
def test_marker_names_the_pythons_a_pin_holds_on(pythons, marker):
    assert marker_for(pythons) == marker


def test_comment_above_a_pin_belongs_to_it():
    text = "# file\n\n# why\nRay[default]==2.0\nother==1\n"
    assert notes_of(text) == {"ray": ["# why"], "other": []}
