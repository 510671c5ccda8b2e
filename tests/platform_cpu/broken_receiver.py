# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A receiver of weights that breaks when it is told to. Loaded by vLLM inside the engine's process."""

import time
import unittest.mock

from recipe.agent_env.platform_cpu.vllm_extension import CPUWorkerExtension


class BreakableExtension(CPUWorkerExtension):
    """The CPU receiver with a switch: `break_next("receive")`, `break_next("load")` or `break_next("hang")`."""

    _how_to_break = ""

    def break_next(self, how: str) -> None:
        """Let the next weight update fail."""
        self._how_to_break = how

    def update_weights_from_ipc(self, *args, **kwargs) -> None:
        """Fail once if told to, else receive."""
        how, self._how_to_break = self._how_to_break, ""
        if how == "receive":
            raise ArithmeticError("broken on purpose")
        if how == "hang":
            time.sleep(3600)
        if how == "load":
            with unittest.mock.patch.object(
                self.model_runner, "reload_weights", side_effect=ArithmeticError("no room")
            ):
                return super().update_weights_from_ipc(*args, **kwargs)
        super().update_weights_from_ipc(*args, **kwargs)
