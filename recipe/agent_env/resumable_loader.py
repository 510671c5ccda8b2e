# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The training loader as a checkpoint needs it: which batch comes next, also at an epoch's end and after a broken step.

Owns nothing of what a batch holds. verl 0.9.1 saves the loader's state at the moment of saving: a batch that was handed
out and never trained on counts as done there, and at the end of an epoch verl starts the first epoch's order again.
"""

from collections.abc import Iterator
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader


class ResumableLoader:
    """A StatefulDataLoader that can take its last batch back.

    Args:
        loader: verl's training loader.
    """

    def __init__(self, loader: StatefulDataLoader):
        self._loader = loader
        self._state: dict[str, Any] | None = None
        self._state_before: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or what is left of it."""
        for batch in self._loader:
            self._state_before = self._state
            self._state = self._loader.state_dict()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, after the last batch that was handed out and not given back."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch at which `state` was taken; at the end of an epoch that is an epoch without batches."""
        self._loader.load_state_dict(state)
        self._state = state

    def finish_epoch(self) -> None:
        """Use up the epoch that a loaded state has ended, so that the next one comes in the order that was its turn.

        Raises:
            ValueError: The state was not taken at the end of an epoch.
        """
        if any(True for _ in self._loader):
            raise ValueError("expected a loader state from the end of an epoch, but batches were left in it")

    def give_back_batch(self) -> None:
        """The last batch was not trained on: it comes first after a resume."""
        self._state = self._state_before
