# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Builds the three engines of a CPU run in this process, without Ray, and prints what came out as JSON.

python tests/platform_cpu/engine_probe.py MODEL_FOLDER
"""

import copy
import json
import os
import sys
from pathlib import Path

import hydra

from recipe.agent_env.platform_cpu import launch

CONFIG_FOLDER = Path(launch.__file__).resolve().parents[1] / "config"


def main(model: str) -> None:
    """Build critic, actor and reference policy from the composed config and run one forward pass in each."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        overrides = [f"hydra.searchpath=[file://{CONFIG_FOLDER}]", "+platform=cpu"]
        overrides += [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
        overrides += [f"{role}.ppo_micro_batch_size_per_gpu=2" for role in ("critic", "actor_rollout_ref.actor")]
        config = hydra.compose("ppo_trainer", overrides=overrides)
    launch.prepare_process(config)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")

    import torch
    from torch.distributed.tensor import DTensor
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.config import HFModelConfig
    from verl.workers.engine import EngineRegistry

    from recipe.agent_env.platform_cpu import engines  # noqa: F401

    initialize_global_process_group_ray(backend="cpu:gloo")
    critic = omega_conf_to_dataclass(config.critic)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor_model = omega_conf_to_dataclass(config.actor_rollout_ref.model, dataclass_type=HFModelConfig)
    ref_engine = copy.copy(actor.engine)
    ref_engine.forward_only = True
    roles = {
        "critic": ("value_model", critic.model, critic.engine, critic.optim, critic.checkpoint),
        "actor": ("language_model", actor_model, actor.engine, actor.optim, actor.checkpoint),
        "ref": ("language_model", copy.deepcopy(actor_model), ref_engine, actor.optim, actor.checkpoint),
    }
    report = {}
    for role, (model_type, model_config, engine_config, optim, checkpoint) in roles.items():
        engine_config.use_remove_padding = model_config.use_remove_padding
        model_config.model_type = model_type
        engine = EngineRegistry.new(
            model_type=model_type,
            backend=engine_config.strategy,
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optim,
            checkpoint_config=checkpoint,
        )
        engine.initialize()
        with torch.no_grad():
            output = engine.module(input_ids=torch.arange(6).reshape(2, 3), use_cache=False)
        parameters = dict(engine.module.named_parameters())
        report[role] = {
            "engine": type(engine).__name__,
            "module": type(engine.module).__name__,
            "attention": engine.module.config._attn_implementation,
            "model_type": model_config.model_type,
            "forward_only": engine.engine_config.forward_only,
            "has_optimizer": engine.optimizer is not None,
            "sharded": all(isinstance(parameter, DTensor) for parameter in parameters.values()),
            "devices": sorted({str(parameter.device) for parameter in parameters.values()}),
            "dtypes": sorted({str(parameter.dtype) for parameter in parameters.values()}),
            "output": list(output.logits.shape),
            "exported": {name: list(tensor.shape) for name, tensor in engine.get_per_tensor_param()[0]}
            == {name: list(parameter.shape) for name, parameter in parameters.items()},
        }
    print(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
