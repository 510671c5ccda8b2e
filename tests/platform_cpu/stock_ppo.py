# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's own PPO on the CPU platform: its config, its trainer, its single-turn agent loop, and nothing of this recipe
but `platform_cpu`. Run as a script with Hydra overrides; the end-to-end tests read the file it leaves.

The trainer is watched, not changed: it notes how far the engine's log-probabilities are from the trainer's, leaves out
the weight sync after the steps in `SKIP_SYNC_AFTER`, and breaks the receiver after the last step
if it is one that can be broken.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from recipe.agent_env.platform_cpu import launch

SKIP_SYNC_AFTER = {2}


def score_letters(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Reward text with few letters `e`: any random policy gets scores that differ."""
    return 1.0 - solution_str.count("e") / 8


def _error_of(action: Any) -> tuple[str, float]:
    """Return the text of what `action` raises, and the seconds it took."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def make_watched_trainer(record: dict[str, Any]) -> type:
    """Return verl's trainer with notes taken into `record`."""
    import ray
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class WatchedTrainer(RayPPOTrainer):
        def fit(self) -> None:
            sync = self.checkpoint_manager.update_weights

            def sync_unless_left_out(global_steps: int) -> None:
                if global_steps in SKIP_SYNC_AFTER:
                    return
                start = time.monotonic()
                sync(global_steps)
                record["sync_s"].append(time.monotonic() - start)

            self.checkpoint_manager.update_weights = sync_unless_left_out
            super().fit()
            extension = self.config.actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls
            if not extension.endswith("BreakableExtension"):
                return
            for how in ("receive", "load", "hang"):
                server = self.llm_server_manager.get_replicas()[0]._server_handle
                ray.get(server.collective_rpc.remote("break_next", args=(how,)))
                record[how] = _error_of(lambda: sync(self.global_steps))

        def _compute_old_log_prob(self, batch: Any) -> Any:
            result = super()._compute_old_log_prob(batch)
            mask = batch.batch["response_mask"].bool()
            gap = (result[0].batch["old_log_probs"] - batch.batch["rollout_log_probs"])[mask].abs()
            record["gap"][self.global_steps] = gap.max().item()
            record["entropy"][self.global_steps] = result[0].batch["entropys"][mask].mean().item()
            return result

        def _update_actor(self, batch: Any) -> Any:
            return self._note_gradient("actor", super()._update_actor(batch))

        def _update_critic(self, batch: Any) -> Any:
            return self._note_gradient("critic", super()._update_critic(batch))

        def _note_gradient(self, who: str, output: Any) -> Any:
            record["grad_norm"] += output.meta_info["metrics"][f"{who}/grad_norm"]
            return output

    return WatchedTrainer


def train(config: DictConfig) -> dict[str, Any]:
    """Run verl's PPO loop with the CPU workers; return what was noted."""
    launch.start_ray(config)
    import ray
    from verl.trainer import main_ppo_v0

    class StockTaskRunner(main_ppo_v0.TaskRunner.__ray_metadata__.modified_class):
        def add_critic_worker(self, config: DictConfig) -> None:
            super().add_critic_worker(config)
            launch.replace_workers(self.role_worker_mapping, config)

    record: dict[str, Any] = {"gap": {}, "entropy": {}, "grad_norm": [], "sync_s": []}
    main_ppo_v0.RayPPOTrainer = make_watched_trainer(record)
    try:
        StockTaskRunner().run(config)
    finally:
        ray.shutdown()
    return record


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train and write `record.json` into the current folder."""
    start = time.monotonic()
    record = train(config)
    record["total_s"] = time.monotonic() - start
    Path("record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
    # Ray's and vLLM's threads outlive the run; nothing is left for them to do.
    sys.stdout.flush()
    os._exit(0)
