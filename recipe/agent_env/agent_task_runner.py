# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The Ray actor that builds the trainer from the config and runs it.

Owns which classes play which role. verl's own task runner names its trainer class in the middle of one method, so the
method is written here once more over verl's helpers (`BaseTaskRunner`, verl 0.9.1, trainer/main_ppo_v0.py).
"""

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.logging_utils import configure_verl_logging

from recipe.agent_env.agent_ray_trainer import AgentRayPPOTrainer
from recipe.agent_env.platform_cpu.launch import replace_workers
from recipe.agent_env.start_check import check_seeds


class AgentTaskRunnerBase(BaseTaskRunner):
    """Builds and runs an AgentRayPPOTrainer in the process that it lives in."""

    def run(self, config: DictConfig) -> None:
        """Train until the config says so.

        Args:
            config: Finished config, see `config_checks.finish_config`.

        Raises:
            SeedIgnoredError: Before any worker is started, see `start_check.check_seeds`.
        """
        configure_verl_logging()
        trainer = self.build_trainer(config)
        check_seeds(config, trainer.train_dataset)
        trainer.init_workers()
        trainer.fit()

    def build_trainer(self, config: DictConfig) -> AgentRayPPOTrainer:
        """The trainer with its data sets; no worker is started yet."""
        _, ray_worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        replace_workers(self.role_worker_mapping, config)
        resource_pool_manager = self.init_resource_pool_mgr(config)

        model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        tokenizer, processor = model_config.tokenizer, model_config.processor
        train_dataset = create_rl_dataset(
            config.data.train_files, config.data, tokenizer, processor, max_samples=config.data.train_max_samples
        )
        val_dataset = create_rl_dataset(
            config.data.val_files,
            config.data,
            tokenizer,
            processor,
            is_train=False,
            max_samples=config.data.val_max_samples,
        )
        return AgentRayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=resource_pool_manager,
            ray_worker_group_cls=ray_worker_group_cls,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train_dataset),
        )


AgentTaskRunner = ray.remote(AgentTaskRunnerBase)
