# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a checkpoint of this recipe holds besides verl's own: one small JSON file beside the loader's state.

Owns the file's name and fields. Knows nothing of trainers.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "agent_env.json"
"""In the folder `global_step_<N>` of a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """State of a run at a step."""

    services: tuple[str, ...] = ()
    """Name and version of every environment that episodes were played on, as the services declared them; sorted."""
    kl_coefficient: float | None = None
    """Value of the controller of KL in the reward; None where that is off."""

    def write(self, folder: str | Path) -> None:
        """Write the file; it is whole or not there."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def read(cls, folder: str | Path) -> "RunState | None":
        """Read the file; None where the checkpoint has none (it was not written by this recipe)."""
        path = Path(folder) / FILE_NAME
        if not path.exists():
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(services=tuple(fields["services"]), kl_coefficient=fields["kl_coefficient"])
