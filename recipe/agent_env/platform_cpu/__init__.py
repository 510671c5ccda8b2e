# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What verl lacks to train on a machine with no GPU, as a verl plugin.

verl imports this package in every process (entry-point group `verl.plugins`, or `VERL_USE_EXTERNAL_MODULES`). It acts
only where `VERL_PLATFORM=cpu`; everywhere else importing it costs a dictionary look-up and changes nothing.

    platform.py       the device: PlatformCPU
    engines.py        FSDP2 actor, reference and critic on host memory
    workers.py        the Ray workers that train and send weights
    weight_sync.py    trainer to rollout, with a time limit
    vllm_extension.py the receiving end inside vLLM
    vllm_metadata.py  the distribution name that verl and vLLM look up
    launch.py         what the entrypoint calls
"""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from recipe.agent_env.platform_cpu import platform  # noqa: F401
