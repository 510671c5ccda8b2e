# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The CPU as a verl platform: host memory is the device, gloo the network, Ray's `GPU` resource a count of slots.

Owns the answers to verl's questions about the device. Refuses to know engines, rollouts and configuration. Importing
this module registers the platform under the name `cpu`; verl selects it only by `VERL_PLATFORM=cpu`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

DEVICE = "cpu"


def _make_device_module() -> ModuleType:
    """Build the namespace verl expects where a GPU run has `torch.cuda`.

    `torch.cpu` has the streams but neither memory counters nor random state; verl calls both without asking.
    """

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def no_bytes(*args: Any, **kwargs: Any) -> int:
        return 0

    def memory_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def stream(stream: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    module = ModuleType("recipe.agent_env.platform_cpu.device", "Host memory behind the face of `torch.cuda`.")
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: DEVICE,
        "get_device_name": lambda device=None: DEVICE,
        "set_device": do_nothing,
        "synchronize": do_nothing,
        "Stream": torch.cpu.Stream,
        "Event": torch.cpu.Event,
        "current_stream": torch.cpu.current_stream,
        "stream": stream,
        "empty_cache": do_nothing,
        "ipc_collect": do_nothing,
        "reset_peak_memory_stats": do_nothing,
        "set_per_process_memory_fraction": do_nothing,
        "memory_allocated": no_bytes,
        "max_memory_allocated": no_bytes,
        "memory_reserved": no_bytes,
        "max_memory_reserved": no_bytes,
        "mem_get_info": memory_info,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


_DEVICE_MODULE = _make_device_module()


@PlatformRegistry.register(platform=DEVICE)
class PlatformCPU(PlatformBase):
    """Host memory as the training device; `trainer.n_gpus_per_node` counts worker processes."""

    @property
    def device_name(self) -> str:
        """Return torch's device type."""
        return DEVICE

    @property
    def vendor_name(self) -> str:
        """Return the name under which engines may register for one vendor only; none do."""
        return DEVICE

    @property
    def device_module(self) -> ModuleType:
        """Return the stand-in for `torch.cuda`."""
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        """Return True: every machine has host memory."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False: the CPU never wins verl's search for an accelerator, it has to be asked for by name."""
        return False

    def current_device(self) -> Any:
        """Return what tensors are moved to: a name, as torch refuses verl's `tensor.to(0)` without an accelerator."""
        return DEVICE

    def device_count(self) -> int:
        """Return 1: processes share one host memory."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: work on the CPU is finished when the call returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's only random state."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's only random state."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the system's allocator has no such settings."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache of freed blocks."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return gloo, the backend that torch has for host memory."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable in which Ray hands a worker its logical slots."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Run the block without a profiler range."""
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no device profiler."""

    def ray_resource_name(self) -> str:
        """Return `GPU`: verl's placement groups then count the slots that `ray.init(num_gpus=...)` declares."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return none: Ray's own numbering of the slots is used."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False: verl then sends weights through shared memory."""
        return False

    def cudart(self) -> Any:
        """Return no runtime library."""
        return None
