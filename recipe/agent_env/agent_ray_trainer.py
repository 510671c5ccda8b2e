# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""AgentRayPPOTrainer: verl's PPO trainer with episodes in place of single-shot generation.

verl's `fit` stays verl's own; the episodes come in through `rollout.agent.agent_loop_manager_class`. Owned here is
what the trainer must do differently because rows are episodes: what validation counts, what is dumped, how a run ends
and how it goes on after that.
"""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import AdaptiveKLController
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.debug import marked_timer

from recipe.agent_env.algorithms.mini_batches import count_trained_rows, update_on_trained_rows
from recipe.agent_env.metrics import validation_columns
from recipe.agent_env.resumable_loader import ResumableLoader
from recipe.agent_env.rollout.agent_loop import EnvAgentLoopManager, RunStoppedError, TooManyFailedEpisodesError
from recipe.agent_env.rollout.batch import VALIDATION_KEYS
from recipe.agent_env.rollout.dump import dump_columns
from recipe.agent_env.run_state import RunState
from recipe.agent_env.validation import with_exact_denominators
from recipe.agent_env.verl_patches import apply_verl_patches

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class AgentRayPPOTrainer(RayPPOTrainer):
    """Trains on episodes of an environment service. Takes RayPPOTrainer's arguments."""

    async_rollout_manager: EnvAgentLoopManager
    train_dataloader: Any

    def __init__(self, *args: Any, **kwargs: Any):
        apply_verl_patches()
        self._is_validating = False
        self._saved_step = 0
        super().__init__(*args, **kwargs)

    def init_workers(self) -> None:
        """verl's workers; what updates them counts trained rows only, see `algorithms.mini_batches`."""
        super().init_workers()
        self.async_rollout_manager.pad_token_id = self.tokenizer.pad_token_id
        self.async_rollout_manager.train_dataset = self.train_dataset
        self.async_rollout_manager.tokenizer = self.tokenizer
        self.async_rollout_manager.steps_per_epoch = len(self.train_dataloader)
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
            RunStoppedError: The run was told to stop; the same, where the run keeps checkpoints.
        """
        try:
            super().fit()
        except TooManyFailedEpisodesError:
            self._save_finished_steps()
            raise
        except RunStoppedError as exc:
            if self.config.trainer.save_freq > 0:
                self._save_finished_steps()
            raise RunStoppedError(str(getattr(exc, "cause", exc))) from None  # Ray's copy quotes its traceback
        finally:
            self.async_rollout_manager.close()

    def _create_dataloader(self, *args: Any) -> None:
        super()._create_dataloader(*args)
        self.train_dataloader = ResumableLoader(self.train_dataloader)

    def _save_finished_steps(self) -> None:
        """Save what the steps so far have learned, after episodes broke off; the next run plays their rows again."""
        if not self._is_validating:  # the step that broke off has changed no weight
            self.global_steps -= 1
            self.train_dataloader.give_back_batch()
        if self.global_steps == self._saved_step:
            logger.warning("no step was finished since the last checkpoint, so none is saved")
            return
        self.checkpoint_manager.sleep_replicas()
        self._save_checkpoint()
        logger.warning("saved global_step_%d under %s", self.global_steps, self.config.trainer.default_local_dir)

    def _save_checkpoint(self) -> None:
        """verl's checkpoint and, before it, a `RunState` in its folder: verl's last file marks the whole complete."""
        RunState(
            services=tuple(sorted(self.async_rollout_manager.services)),
            kl_coefficient=self.kl_ctrl_in_reward.value if self.config.algorithm.use_kl_in_reward else None,
        ).write(Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}")
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def _load_checkpoint(self) -> None:
        """verl's, and what it leaves out: the order of rows after an epoch's end, the KL controller, the services."""
        super()._load_checkpoint()
        self._saved_step = self.global_steps
        if self.global_steps == 0:
            return
        trainer = self.config.trainer
        is_named = trainer.resume_mode == "resume_path"
        folder = Path(trainer.resume_from_path if is_named else trainer.default_local_dir)
        folder = folder if is_named else folder / f"global_step_{self.global_steps}"
        loader_state = folder / "data.pt"
        if self.global_steps % len(self.train_dataloader) == 0 and loader_state.exists():
            self.train_dataloader.load_state_dict(torch.load(loader_state, weights_only=False))
            self.train_dataloader.finish_epoch()
        state = RunState.read(folder)
        if state is None:
            logger.warning("%s holds no state of this recipe: the KL controller starts anew", folder)
            return
        self.async_rollout_manager.known_services = frozenset(state.services)
        if self.config.algorithm.use_kl_in_reward and isinstance(self.kl_ctrl_in_reward, AdaptiveKLController):
            self.kl_ctrl_in_reward.value = state.kl_coefficient

    def _validate(self, merged: bool = False) -> dict[str, Any]:
        self._is_validating = True  # stays so when it raises
        metrics = super()._validate(merged)
        self._is_validating = False
        return metrics

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[Any],
    ) -> dict[str, float]:
        """Validation metrics over the episodes that count; see `metrics.validation_columns` and `validation`."""
        counted = {name: reward_extra_infos_dict[name] for name in ("reward", *VALIDATION_KEYS)}
        columns = validation_columns(data_sources, counted)
        is_played = np.array([reward is not None for reward in columns["reward"]], dtype=bool)
        turns = [np.concatenate(sample_turns)[is_played]] if sample_turns and is_played.any() else []
        return with_exact_denominators(
            super()._val_metrics_update(data_sources, sample_uids, columns, turns),
            data_sources,
            sample_uids,
            columns,
            num_rollouts=self.config.actor_rollout_ref.rollout.val_kwargs.n,
        )

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
