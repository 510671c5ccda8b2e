# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's FSDP2 engines on host memory.

Owns what differs from a GPU: the value head's attention, the reference policy's offloading. Importing this module
registers the engines for device `cpu`. FSDP1 is left out: it refuses CPU modules with `sync_module_states`.
"""

import dataclasses
from typing import Any

import torch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

_BACKENDS = ["fsdp2"]


class _HostMemoryMixin:
    """Build the FSDP2 module without moving parameters to where they already are."""

    engine_config: Any

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap `module`; a forward-only engine asks for offloading to pinned memory, which only a GPU has."""
        configured = self.engine_config
        self.engine_config = dataclasses.replace(configured, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = configured


@EngineRegistry.register(model_type="language_model", backend=_BACKENDS, device="cpu")
class CPUEngineWithLMHead(_HostMemoryMixin, FSDPEngineWithLMHead):
    """Actor and reference policy."""


@EngineRegistry.register(model_type="value_model", backend=_BACKENDS, device="cpu")
class CPUEngineWithValueHead(_HostMemoryMixin, FSDPEngineWithValueHead):
    """Critic."""

    def _build_module(self) -> torch.nn.Module:
        """Load the model with one value per token and the attention that the config names.

        verl's own loader of value heads asks for flash attention by name. Its loader of language models takes the
        class from the architecture and the attention from the config, so it is used for the value head as well.

        Raises:
            ValueError: The architecture has no token classification class beside it.
        """
        hf_config = self.model_config.hf_config
        architecture = hf_config.architectures[0]
        stem, is_causal_lm, _ = architecture.partition("ForCausalLM")
        if not is_causal_lm and not architecture.endswith("ForTokenClassification"):
            raise ValueError(
                f"critic.model.path: architecture {architecture!r} is neither *ForCausalLM nor *ForTokenClassification"
            )
        if is_causal_lm:
            hf_config.architectures = [f"{stem}ForTokenClassification"]
        hf_config.num_labels = 1
        hf_config.classifier_dropout = 0.0
        self.model_config.model_type = "language_model"
        try:
            return super()._build_module()
        finally:
            self.model_config.model_type = "value_model"
