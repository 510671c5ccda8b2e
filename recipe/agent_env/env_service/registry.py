# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environment names and what builds each of them.

Owns: the closed set of names that a service offers, and how a class is named on the command line.
Refuses to know: sessions and HTTP. Nothing outside the registry can be constructed by a request.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from recipe.agent_env.env_service.errors import ServiceError

EnvironmentFactory = Callable[..., Any]
"""Called with the row's `env_kwargs`; returns an object with the interface of `environment.Environment`."""


class EnvironmentRegistry:
    """A mapping of environment names to factories."""

    def __init__(self, factories: dict[str, EnvironmentFactory] | None = None) -> None:
        self._factories: dict[str, EnvironmentFactory] = {}
        self._signatures: dict[str, inspect.Signature | None] = {}
        for name, factory in (factories or {}).items():
            self.register(name, factory)

    def register(self, name: str, factory: EnvironmentFactory) -> None:
        """Offer an environment.

        Args:
            name: What rows and requests call it.
            factory: A class, or a function that returns an environment.

        Raises:
            ValueError: The name is empty or taken, or the class lacks `reset` or `step`.
        """
        if not name or name != name.strip():
            raise ValueError(f"environment name {name!r}: expected text without blanks around it")
        if name in self._factories:
            raise ValueError(f"environment name {name!r} is registered twice")
        if not callable(factory):
            raise ValueError(f"environment {name!r}: expected a class or a function, got {type(factory).__name__}")
        if inspect.isclass(factory):
            missing = [method for method in ("reset", "step") if not callable(getattr(factory, method, None))]
            if missing:
                raise ValueError(f"environment {name!r}: class {factory.__qualname__} has no method {missing[0]!r}")
        self._factories[name] = factory
        try:
            self._signatures[name] = inspect.signature(factory)
        except (TypeError, ValueError):
            self._signatures[name] = None

    @property
    def names(self) -> list[str]:
        """The names on offer, sorted."""
        return sorted(self._factories)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, for worker processes: factories travel by their import path."""
        return EnvironmentRegistry, (self._factories,)

    def check(self, name: str, env_kwargs: dict[str, Any]) -> None:
        """Refuse a request that could never build an environment.

        Raises:
            ServiceError: 404 for an unknown name, 422 for arguments the factory does not take.
        """
        if name not in self._factories:
            raise ServiceError(
                404, "unknown_environment", f"no environment {name[:80]!r}; known: {self.names}", known=self.names
            )
        signature = self._signatures[name]
        if signature is not None:
            try:
                signature.bind(**env_kwargs)
            except TypeError as error:
                raise ServiceError(422, "bad_env_kwargs", f"{name}: {error}; signature is {signature}") from None

    def create(self, name: str, env_kwargs: dict[str, Any]) -> Any:
        """Build one environment. Whatever the factory raises passes through."""
        return self._factories[name](**env_kwargs)


def load_factory(spec: str) -> EnvironmentFactory:
    """Import what `package.module:attribute` names.

    Raises:
        ValueError: The text has another form, or the module or attribute does not exist.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"environment {spec!r}: expected package.module:Class")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"environment {spec!r}: {error}; start from the folder that holds {module_name!r}") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ValueError(f"environment {spec!r}: {module_name} has no {part!r}")
        target = getattr(target, part)
    return target
