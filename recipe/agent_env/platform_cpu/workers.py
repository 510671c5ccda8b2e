# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's Ray workers on the CPU.

Owns the process group's backend and which rollout client sends weights. Imported only in processes of a CPU run: it
registers the CPU engines before a worker asks for one.
"""

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout import base as rollout_base

from recipe.agent_env.platform_cpu import engines  # noqa: F401

_ROLLOUT_CLIENT = "recipe.agent_env.platform_cpu.weight_sync.WatchedServerAdapter"


class CPUTrainingWorker(TrainingWorker):
    """Critic, and the actor and reference inside `CPUActorRolloutRefWorker`."""

    def __init__(self, config: Any):
        """Start torch.distributed, then verl's worker.

        verl would ask for `cpu:gloo,cpu:gloo`, one device twice, which torch refuses; it skips a started group.
        """
        initialize_global_process_group_ray(backend="cpu:gloo")
        super().__init__(config)


class CPUActorRolloutRefWorker(ActorRolloutRefWorker):
    """Actor, reference and the client of the rollout engine."""

    actor_worker_cls = CPUTrainingWorker
    ref_worker_cls = CPUTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models; vLLM's client is the one whose weight updates have a time limit."""
        rollout_base._ROLLOUT_REGISTRY[("vllm", "async")] = _ROLLOUT_CLIENT
        super().init_model()
