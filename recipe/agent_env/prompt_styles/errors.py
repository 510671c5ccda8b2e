# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The error of this layer, and the type of a chat message.

Owns nothing else, so that every module of the package can import it. A policy's mistake is never an exception here:
it is a `ReplyError` record (see `replies.py`).
"""

from typing import Any

Message = dict[str, Any]
"""One OpenAI chat message: `role`, `content`, and for some roles `tool_calls`, `tool_call_id`, `name`."""


class PromptStyleError(ValueError):
    """A tokenizer, template, option or message that this style cannot turn into exact tokens."""
