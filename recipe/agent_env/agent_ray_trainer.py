# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""AgentRayPPOTrainer: verl's PPO trainer with episodes in place of single-shot generation.

verl's `fit` stays verl's own; the episodes come in through `rollout.agent.agent_loop_manager_class`. Owned here is
what the trainer must do differently because rows are episodes: what validation counts, what is dumped, and how a run
ends.
"""

import logging
import os
from typing import Any

from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.debug import marked_timer

from recipe.agent_env.algorithms.mini_batches import count_trained_rows, update_on_trained_rows
from recipe.agent_env.metrics import validation_columns
from recipe.agent_env.rollout.agent_loop import EnvAgentLoopManager, TooManyFailedEpisodesError
from recipe.agent_env.rollout.dump import dump_columns
from recipe.agent_env.verl_patches import apply_verl_patches

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class AgentRayPPOTrainer(RayPPOTrainer):
    """Trains on episodes of an environment service. Takes RayPPOTrainer's arguments."""

    async_rollout_manager: EnvAgentLoopManager

    def __init__(self, *args: Any, **kwargs: Any):
        apply_verl_patches()
        super().__init__(*args, **kwargs)

    def init_workers(self) -> None:
        """verl's workers; what updates them counts trained rows only, see `algorithms.mini_batches`."""
        super().init_workers()
        self.async_rollout_manager.pad_token_id = self.tokenizer.pad_token_id
        self.actor_rollout_wg.update_actor = count_trained_rows(self.actor_rollout_wg.update_actor)
        if self.use_critic:
            self.critic_wg.train_mini_batch = count_trained_rows(self.critic_wg.train_mini_batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        return update_on_trained_rows(
            super()._update_actor,
            batch,
            mini_batch_size=self.config.actor_rollout_ref.actor.ppo_mini_batch_size
            * self.config.actor_rollout_ref.rollout.n,
            num_ranks=self._get_dp_size(self.actor_rollout_wg, "actor"),
        )

    def _update_critic(self, batch: DataProto) -> DataProto:
        return update_on_trained_rows(
            super()._update_critic,
            batch,
            mini_batch_size=self.config.critic.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n,
            num_ranks=self._get_dp_size(self.critic_wg, "train"),
        )

    def fit(self) -> None:
        """verl's training loop; every environment is closed after it, however it ends.

        Raises:
            TooManyFailedEpisodesError: After a checkpoint of the last finished step was saved.
        """
        try:
            super().fit()
        except TooManyFailedEpisodesError:
            self._save_last_finished_step()
            raise
        finally:
            self.async_rollout_manager.close()

    def _save_last_finished_step(self) -> None:
        """Save what the steps so far have learned; the step that broke off has changed no weight."""
        self.global_steps -= 1
        if self.global_steps < 1:
            logger.warning("no training step was finished, so no checkpoint is saved")
            return
        self._save_checkpoint()
        logger.warning("saved global_step_%d under %s", self.global_steps, self.config.trainer.default_local_dir)

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[Any],
    ) -> dict[str, float]:
        """Validation metrics over the episodes that count; see `metrics.validation_columns`."""
        columns = validation_columns(data_sources, reward_extra_infos_dict)
        return super()._val_metrics_update(data_sources, sample_uids, columns, sample_turns)

    def _log_rollout_data(
        self, batch: DataProto, reward_extra_infos_dict: dict[str, Any], timing_raw: dict, rollout_data_dir: str
    ) -> None:
        """Dump each episode with its text, ids, mask and numbers per token; see `rollout.dump.dump_columns`."""
        with marked_timer("dump_rollout_generations", timing_raw, color="green"):
            self._dump_generations(
                inputs=self.tokenizer.batch_decode(batch.batch["prompts"], skip_special_tokens=True),
                outputs=self.tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True),
                gts=[None] * len(batch),
                scores=batch.batch["token_level_scores"].sum(-1).tolist(),
                reward_extra_infos_dict=dump_columns(batch, self.tokenizer),
                dump_path=rollout_data_dir,
            )
