# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The platform and the plugin: loaded where it is asked for, silent everywhere else, and complete for verl's calls."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from verl.plugin.platform import PlatformRegistry

from recipe.agent_env.platform_cpu.platform import PlatformCPU

PACKAGE = "recipe.agent_env.platform_cpu"


def run_python(code: str, platform: str | None) -> str:
    """Run `code` in a fresh interpreter with VERL_PLATFORM set to `platform`; return its last line."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    if platform is not None:
        env["VERL_PLATFORM"] = platform
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_verl_loads_the_plugin_by_its_entry_point():
    """verl tells of a plugin that fails to load at debug level only, so ask for the result."""
    code = "from verl.utils.device import get_device_name, get_nccl_backend as b; print(get_device_name(), b())"
    assert run_python(code, "cpu") == "cpu gloo"


def test_plugin_changes_nothing_on_other_platforms():
    code = (
        "import sys, verl; from verl.plugin.platform import PlatformRegistry as R; "
        f"print({PACKAGE!r} in sys.modules, R.get('cpu'), 'vllm' in sys.modules, '{PACKAGE}.platform' in sys.modules)"
    )
    assert run_python(code, "nvidia") == "True None False False"


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, {PACKAGE}; print(sorted({{'torch', 'verl', 'vllm', 'ray'}} & sys.modules.keys()))"
    assert run_python(code, None) == "[]"


def test_importing_launch_imports_nothing_heavy():
    code = f"import sys, {PACKAGE}.launch; print(sorted({{'torch', 'verl', 'vllm', 'ray'}} & sys.modules.keys()))"
    assert run_python(code, None) == "[]"


def test_platform_is_registered_but_never_detected():
    assert PlatformRegistry.get("cpu") is PlatformCPU
    assert PlatformCPU().is_available() and not PlatformCPU().is_platform_available(use_smi_check=True)


def test_tensors_move_to_the_current_device():
    platform = PlatformCPU()
    assert torch.ones(1).to(platform.current_device()).device.type == platform.device_name
    assert torch.device(platform.device_module.current_device()).type == "cpu"


def test_slots_are_counted_as_rays_gpus():
    platform = PlatformCPU()
    assert platform.ray_resource_options(0.5) == {"num_gpus": 0.5}
    assert platform.ray_resource_name() == "GPU" and not platform.is_ipc_supported()


def test_nothing_of_a_gpu_is_promised():
    platform = PlatformCPU()
    assert platform.get_device_capability() == (None, None)
    assert platform.cudart() is None and platform.get_collective_module() is None
    with platform.nvtx_range("step"):
        platform.profiler_start()
        platform.profiler_stop()


# What verl 0.9.1 calls on `get_torch_device()` in its FSDP engine, checkpoints, profiler and weight transfer.
@pytest.mark.parametrize(
    "name, args",
    [
        ("empty_cache", ()),
        ("synchronize", ()),
        ("ipc_collect", ()),
        ("set_device", (0,)),
        ("memory_allocated", ()),
        ("max_memory_allocated", ()),
        ("memory_reserved", ()),
        ("max_memory_reserved", ()),
        ("mem_get_info", ()),
        ("reset_peak_memory_stats", ()),
        ("current_stream", ()),
        ("device_count", ()),
        ("get_device_name", ()),
        ("manual_seed_all", (1,)),
    ],
)
def test_device_module_answers(name, args):
    getattr(PlatformCPU().device_module, name)(*args)


def test_device_module_streams_are_context_managers():
    with PlatformCPU().device_module.stream(None) or nullcontext():
        pass


def test_random_state_comes_back():
    device = PlatformCPU().device_module
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_seed_sets_torchs_state():
    PlatformCPU().manual_seed_all(5)
    first = torch.rand(3)
    PlatformCPU().manual_seed(5)
    assert torch.equal(first, torch.rand(3))
