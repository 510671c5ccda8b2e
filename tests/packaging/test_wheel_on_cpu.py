# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The wheel holds the recipe with its data files, nothing else, and lives next to a verl checkout's `recipe/`."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.locks import ROOT

DATA_SUFFIXES = {".py", ".yaml", ".html", ".txt", ".md", ".sh", ".js", ".css", ".typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from this checkout, without network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that stands for site-packages and holds only this project."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def make_verl_checkout(folder: Path) -> Path:
    """Make what matters here of a verl checkout: `recipe/` without an `__init__.py`, holding somebody else's recipe."""
    other = folder / "recipe" / "other"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("NAME = 'other'\n")
    return folder


def import_both(*path: Path) -> subprocess.CompletedProcess:
    """Import the other recipe and this one in a fresh interpreter that sees only the standard library and `path`."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:];"
        "import recipe.other, recipe.agent_env; print(recipe.other.NAME, recipe.agent_env.__file__)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, *map(str, path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_wheel_holds_only_the_recipe_and_its_metadata(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"verl_agent_env-{wheel.name.split('-')[1]}.dist-info/"
    outside = [name for name in names if not name.startswith(("recipe/agent_env/", info))]
    assert outside == []
    assert "recipe/__init__.py" not in names
    assert {Path(name).suffix for name in names if name.startswith("recipe/")} <= DATA_SUFFIXES


def test_wheel_holds_every_tracked_file_of_the_recipe(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "recipe" / "agent_env").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files <= names
    assert "recipe/agent_env/REQUIRED_VERL.txt" in names


def test_wheel_metadata_names_licence_pythons_extras_and_the_verl_plugin(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata_name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        info = metadata_name.removesuffix("METADATA")
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}entry_points.txt").decode())
        assert archive.read(f"{info}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"}
    assert set(metadata.get_all("Provides-Extra")) == {"gpu", "cpu", "test", "openenv", "dev", "mlflow"}
    assert list(entry_points["verl.plugins"].values()) == ["recipe.agent_env.platform_cpu"]


def test_installed_recipe_lives_next_to_a_checkouts_recipes(installed, tmp_path):
    checkout = make_verl_checkout(tmp_path / "verl")
    for path in [(checkout, installed), (installed, checkout)]:
        result = import_both(*path)
        assert result.stdout.split() == ["other", str(installed / "recipe/agent_env/__init__.py")], result.stderr


def test_recipe_dropped_into_a_checkout_is_found_there(installed, tmp_path):
    checkout = make_verl_checkout(tmp_path / "verl")
    shutil.copytree(installed / "recipe" / "agent_env", checkout / "recipe" / "agent_env")
    result = import_both(checkout)
    assert result.stdout.split() == ["other", str(checkout / "recipe/agent_env/__init__.py")], result.stderr


def test_recipe_dropped_into_a_checkout_whose_recipe_folder_is_a_package_is_found_there(installed, tmp_path):
    """Older checkouts have a `recipe/__init__.py`; it hides an installed recipe, so dropping in is the way there."""
    checkout = make_verl_checkout(tmp_path / "verl")
    (checkout / "recipe" / "__init__.py").touch()
    assert "No module named 'recipe.agent_env'" in import_both(checkout, installed).stderr
    shutil.copytree(installed / "recipe" / "agent_env", checkout / "recipe" / "agent_env")
    result = import_both(checkout, installed)
    assert result.stdout.split() == ["other", str(checkout / "recipe/agent_env/__init__.py")], result.stderr


def test_dropped_in_recipe_comes_before_an_installed_one(installed, tmp_path):
    checkout = make_verl_checkout(tmp_path / "verl")
    shutil.copytree(installed / "recipe" / "agent_env", checkout / "recipe" / "agent_env")
    result = import_both(checkout, installed)
    assert result.stdout.split() == ["other", str(checkout / "recipe/agent_env/__init__.py")], result.stderr


def test_required_verl_is_the_version_installed():
    lines = (ROOT / "recipe/agent_env/REQUIRED_VERL.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["verl==0.9.1"]
