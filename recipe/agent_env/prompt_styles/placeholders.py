# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rendering a chat template without showing it the text of others.

Owns the stand-ins that a template sees in place of untrusted text, and their replacement afterwards. Refuses to know
which template it is. The stand-ins keep what templates look at: whether text is empty, its leading and trailing white
space, equality and sort order; and they show how often the template wrote them as JSON.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from recipe.agent_env.prompt_styles.encoder import Piece, trusted, untrusted
from recipe.agent_env.prompt_styles.errors import PromptStyleError

# Templates branch on these words of a tool schema, so they are shown as they are.
SCHEMA_WORDS = frozenset(
    "type function name description parameters properties required items enum default title format anyOf oneOf allOf "
    "additionalProperties nullable strict return response arguments minimum maximum minItems maxItems minLength "
    "maxLength pattern const "
    "string number integer boolean object array null".split()
)


class Placeholders:
    """The stand-ins of one rendering."""

    def __init__(self, values: Iterable[Any]) -> None:
        """Give every untrusted string a stand-in.

        Args:
            values: Strings, and lists and objects of them; words of `SCHEMA_WORDS` and blank strings stay.
        """
        # Digits only: no change of case can hurt them, and no text can contain them by chance.
        self._key = str(secrets.randbits(128)).zfill(39)
        strings = {text.strip() for value in values for text in _strings(value)}
        self._originals = sorted(strings, key=lambda text: (text.lower(), text))
        self._numbers = {original: number for number, original in enumerate(self._originals)}
        self._pattern = re.compile(self._key + r'\.(\d+)(\\*)"(?:—|\\+u2014)')

    def text(self, value: str) -> str:
        """The stand-in of a string: its white space, and between that a number, a quote and a dash."""
        core = value.strip()
        if not core:
            return value
        lead, trail = value[: len(value) - len(value.lstrip())], value[len(value.rstrip()) :]
        return f'{lead}{self._key}.{self._numbers[core]:06d}"—{trail}'

    def value(self, value: Any) -> Any:
        """The same value with stand-ins for the strings in it, keys included."""
        if isinstance(value, str):
            return value if value in SCHEMA_WORDS else self.text(value)
        if isinstance(value, dict):
            return {self.value(key) if isinstance(key, str) else key: self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def pieces(self, rendered: str) -> list[Piece]:
        """Put the originals back.

        Args:
            rendered: What the template made of the stand-ins.

        Returns:
            The template's own text and the originals, in order.

        Raises:
            PromptStyleError: The template changed a stand-in, so its place cannot be found.
        """
        pieces: list[Piece] = []
        end = 0
        for match in self._pattern.finditer(rendered):
            pieces.append(trusted(rendered[end : match.start()]))
            pieces.append(untrusted(self._written(match)))
            end = match.end()
        pieces.append(trusted(rendered[end:]))
        if any(piece.is_trusted and self._key in piece.text for piece in pieces):
            raise PromptStyleError(
                "the chat template rewrites the text of messages, so it cannot be kept apart from tokens"
            )
        return [piece for piece in pieces if piece.text]

    def _written(self, match: re.Match[str]) -> str:
        """The original as the template wrote it: each level of JSON doubles the backslashes in front of a quote."""
        text = self._originals[int(match.group(1))]
        for _ in range((len(match.group(2)) + 1).bit_length() - 1):
            text = json.dumps(text, ensure_ascii=not match.group().endswith("—"))[1:-1]
        return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
