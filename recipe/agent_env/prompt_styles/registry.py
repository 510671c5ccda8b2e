# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompt styles by name.

Owns the names; refuses to know what a style does. Our own styles are imported when they are asked for.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from recipe.agent_env.prompt_styles.errors import PromptStyleError

if TYPE_CHECKING:
    from recipe.agent_env.prompt_styles.base import PromptStyle

StyleClass = TypeVar("StyleClass", bound="type[PromptStyle]")

_BUILT_IN = {
    "qwen2_5": "recipe.agent_env.prompt_styles.qwen2_5",
    "chat_template": "recipe.agent_env.prompt_styles.chat_template",
}
_styles: dict[str, "type[PromptStyle]"] = {}


def register_prompt_style(name: str) -> Callable[[StyleClass], StyleClass]:
    """Give a style its name.

    Args:
        name: What `data.agent_prompt_style` says.

    Returns:
        A class decorator.

    Raises:
        PromptStyleError: Another class has the name.
    """

    def register(style: StyleClass) -> StyleClass:
        taken = _styles.get(name)
        if taken is not None and taken.__qualname__ != style.__qualname__:
            raise PromptStyleError(f"prompt style {name!r} is taken by {taken.__module__}.{taken.__qualname__}")
        _styles[name] = style
        return style

    return register


def get_prompt_style(name: str) -> "type[PromptStyle]":
    """The style of a name.

    Args:
        name: A built-in style or one that was registered.

    Returns:
        The class; build it with the model's tokenizer.

    Raises:
        PromptStyleError: Nobody has the name.
    """
    if name not in _styles and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _styles:
        known = ", ".join(sorted({*_styles, *_BUILT_IN}))
        raise PromptStyleError(f"unknown prompt style {name!r}; known: {known}. Register yours before the run starts")
    return _styles[name]
