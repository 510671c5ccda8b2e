# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Chat to tokens and back, for each model family: the names that the rest of the recipe uses.

A leaf: imports no torch, ray or verl, and nothing of the recipe outside this folder.
"""

from recipe.agent_env.prompt_styles.base import DEFAULT_MARKER, PromptStyle
from recipe.agent_env.prompt_styles.encoder import Piece, trusted, untrusted
from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError
from recipe.agent_env.prompt_styles.registry import get_prompt_style, register_prompt_style
from recipe.agent_env.prompt_styles.replies import REPLY_ERROR_KINDS, ParsedReply, ReplyError

__all__ = [
    "DEFAULT_MARKER",
    "REPLY_ERROR_KINDS",
    "Message",
    "ParsedReply",
    "Piece",
    "PromptStyle",
    "PromptStyleError",
    "ReplyError",
    "get_prompt_style",
    "register_prompt_style",
    "trusted",
    "untrusted",
]
