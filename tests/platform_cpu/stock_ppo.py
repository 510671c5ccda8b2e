# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's own PPO on the CPU platform: its config, its trainer, its single-turn agent loop, and nothing of this recipe
but `platform_cpu`. Run as a script by the end-to-end tests; takes Hydra overrides.
"""

import os
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from recipe.agent_env.platform_cpu import launch

CONFIG_FOLDER = str(Path(launch.__file__).resolve().parents[1] / "config")


def score_length(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Reward text that holds few letters `e`; every random policy gets varied scores."""
    return 1.0 - solution_str.count("e") / 8


def train(config: DictConfig) -> None:
    """Run verl's PPO loop with the CPU workers."""
    launch.prepare_process(config)
    launch.start_ray(config)
    from verl.trainer.main_ppo_v0 import TaskRunner

    class StockTaskRunner(TaskRunner.__ray_metadata__.modified_class):
        def add_critic_worker(self, config: DictConfig) -> None:
            super().add_critic_worker(config)
            launch.replace_workers(self.role_worker_mapping, config)

    StockTaskRunner().run(config)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train, and print how long it took."""
    start = time.monotonic()
    train(config)
    print(f"stock run took {time.monotonic() - start:.1f} s in process {os.getpid()}")


if __name__ == "__main__":
    main()
