# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The receiving end of the weight sync inside vLLM's CPU worker.

vLLM's CPU linear layers repack their weights for the CPU's kernels and drop the parameter they were loaded into, so
verl's in-place load has nothing to load into. vLLM's own `reload_weights` rebuilds the layers from checkpoint-shaped
tensors; here it is fed with what the trainer sent. Refuses to know the sender.
"""

import os
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """Named in `rollout.engine_kwargs.vllm.worker_extension_cls`; vLLM mixes it into its worker."""

    def __new__(cls, **kwargs: Any) -> "CPUWorkerExtension":
        """verl asks for batch-invariant kernels with `rollout.full_determinism`; vLLM has none for the CPU."""
        os.environ["VLLM_BATCH_INVARIANT"] = "0"
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive all tensors of the model and swap them in.

        Args:
            peft_config: Set when only an adapter is sent.
            base_sync_done: verl's note that the base weights were sent before.
            use_shm: True: tensors come through shared memory.

        Raises:
            NotImplementedError: An adapter was sent.
        """
        if peft_config:
            raise NotImplementedError("the CPU platform syncs full weights only: set model.lora.merge=True or rank 0")
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        )
        weights: list[tuple[str, torch.Tensor]] = []

        def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            # The sender reuses the bucket's memory: on the CPU `.to(device)` is a view of it, not a copy.
            weights.extend((name, tensor.clone()) for name, tensor in bucket)

        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(weights_iterator=iter(weights))
