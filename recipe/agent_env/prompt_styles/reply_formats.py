# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How models write calls, by name.

Owns the names and the choice; our own formats are in `hermes.py` and `json_formats.py`, verl's behind
`verl_formats.py`, which is imported only when one of its names is asked for.
"""

from dataclasses import dataclass
from typing import Any

from recipe.agent_env.prompt_styles.encoder import PieceEncoder
from recipe.agent_env.prompt_styles.harmony import END_TOKENS, parse_harmony
from recipe.agent_env.prompt_styles.hermes import parse_hermes
from recipe.agent_env.prompt_styles.json_formats import MISTRAL_OPEN, PYTHON_TAG, parse_llama3_json, parse_mistral
from recipe.agent_env.prompt_styles.replies import CallParser


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyFormat:
    """How replies of a family are read."""

    parse: CallParser
    """Takes the text of a reply apart."""

    end_tokens: tuple[str, ...] = ()
    """Tokens that end a turn in this format, besides the template's."""

    spans_messages: bool = False
    """Whether one turn holds several messages, so that only `end_tokens` end it."""


_OWN = {
    "hermes": ReplyFormat(parse=parse_hermes),
    "llama3_json": ReplyFormat(parse=parse_llama3_json),
    "mistral": ReplyFormat(parse=parse_mistral),
    "gpt-oss": ReplyFormat(parse=parse_harmony, end_tokens=END_TOKENS, spans_messages=True),
}


def get_reply_format(name: str, tokenizer: Any) -> ReplyFormat:
    """The format of a name: one of ours, else one of verl's.

    Args:
        name: `hermes`, `llama3_json`, `mistral`, `gpt-oss`, or a name that verl registers.
        tokenizer: The model's tokenizer; verl's parsers look up tokens.

    Raises:
        PromptStyleError: Nobody has the name.
    """
    if name in _OWN:
        return _OWN[name]
    from recipe.agent_env.prompt_styles.verl_formats import verl_format

    return verl_format(name, tokenizer, own_names=sorted(_OWN))


def choose_format(encoder: PieceEncoder) -> str:
    """The name of the format that a vocabulary was made for, by its tokens; `hermes` when there is no sign."""
    if encoder.control_id(MISTRAL_OPEN) is not None:
        return "mistral"
    if encoder.control_id(PYTHON_TAG) is not None:
        return "llama3_json"
    return "hermes"
