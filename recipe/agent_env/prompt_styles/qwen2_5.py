# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The format of Qwen2.5-Instruct, written out.

Owns the exact text of the family's chat template (version of September 2024) and nothing else. Reference renderings:
`tests/data/qwen2_5_golden.jsonl`.
"""

import json
from collections.abc import Sequence
from typing import Any

from recipe.agent_env.prompt_styles.base import PromptStyle
from recipe.agent_env.prompt_styles.encoder import Piece, trusted, untrusted
from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError
from recipe.agent_env.prompt_styles.hermes import parse_hermes
from recipe.agent_env.prompt_styles.messages import ChatMessage
from recipe.agent_env.prompt_styles.registry import register_prompt_style
from recipe.agent_env.prompt_styles.replies import CallText

START = "<|im_start|>"
END = "<|im_end|>"
HEADER = f"{START}assistant\n"
DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


@register_prompt_style("qwen2_5")
class Qwen25Style(PromptStyle):
    """Qwen2.5: ChatML turns, tools in the system turn, tool results as `<tool_response>` blocks of a user turn."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """Build the style.

        Args:
            tokenizer: A fast tokenizer with the tokens `<|im_start|>` and `<|im_end|>`.
            options: See `PromptStyle`; the template of this family has no switches.

        Raises:
            PromptStyleError: The tokenizer lacks a token of the format, or an option has no meaning here.
        """
        super().__init__(tokenizer, **options)
        ids = {content: self._encoder.control_id(content) for content in (START, END)}
        missing = [content for content, token_id in ids.items() if token_id is None]
        if missing:
            raise PromptStyleError(
                f"prompt style qwen2_5 needs the tokens {' and '.join(missing)}, which this tokenizer does not have; "
                "use a Qwen model, or prompt style chat_template"
            )
        if self.template_kwargs:
            keys = ", ".join(sorted(self.template_kwargs))
            raise PromptStyleError(f"Qwen2.5's template has no switches ({keys}); remove them or use chat_template")
        if self.tool_parser not in (None, "hermes"):
            raise PromptStyleError(f"Qwen2.5 writes calls as hermes, not {self.tool_parser}; use chat_template")
        self._end_ids = tuple(i for i in (ids[END],) if i is not None)
        stops = (ids[START], ids[END], self._encoder.control_id("<|endoftext|>"))
        self._stop_ids = frozenset(i for i in stops if i is not None)

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """`<|im_end|>`."""
        return self._end_ids

    @property
    def parse_stop_ids(self) -> frozenset[int]:
        """`<|im_end|>`, `<|im_start|>`, `<|endoftext|>`."""
        return self._stop_ids

    def parse_text(self, text: str, tools: Sequence[Message] | None) -> CallText:
        """Take a reply apart: calls stand between `<tool_call>` tags."""
        return parse_hermes(text, tools)

    def prompt_pieces(
        self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, *, add_header: bool
    ) -> list[Piece]:
        """The text of a conversation's start."""
        has_system = bool(messages) and messages[0].role == "system"
        system = untrusted(messages[0].content) if has_system else trusted(DEFAULT_SYSTEM)
        pieces = [trusted(f"{START}system\n"), system]
        if tools:
            pieces.append(trusted(TOOLS_BEFORE))
            for tool in tools:
                pieces += [trusted("\n"), untrusted(_json(tool))]
            pieces.append(trusted(TOOLS_AFTER))
        pieces.append(trusted(f"{END}\n"))
        return pieces + _turns(messages[1:] if has_system else messages, add_header)

    def observation_pieces(self, messages: list[ChatMessage], *, turn_is_closed: bool, add_header: bool) -> list[Piece]:
        """The line break after the turn, the messages, and the header."""
        return [trusted("\n" if turn_is_closed else f"{END}\n"), *_turns(messages, add_header)]


def _turns(messages: list[ChatMessage], add_header: bool) -> list[Piece]:
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            is_first = index == 0 or messages[index - 1].role != "tool"
            is_last = index + 1 == len(messages) or messages[index + 1].role != "tool"
            pieces += [
                trusted(f"{START}user\n<tool_response>\n" if is_first else "\n<tool_response>\n"),
                untrusted(message.content),
                trusted(f"\n</tool_response>{END}\n" if is_last else "\n</tool_response>"),
            ]
        elif message.calls:
            pieces += _call_turn(message)
        else:
            pieces += [trusted(f"{START}{message.role}\n"), untrusted(message.content), trusted(f"{END}\n")]
    return pieces + [trusted(HEADER)] if add_header else pieces


def _call_turn(message: ChatMessage) -> list[Piece]:
    pieces = [trusted(f"{START}assistant")]
    if message.content:
        pieces += [trusted("\n"), untrusted(message.content)]
    for call in message.calls:
        pieces += [
            trusted('\n<tool_call>\n{"name": "'),
            untrusted(call.name),
            trusted('", "arguments": '),
            untrusted(_json(call.arguments)),
            trusted("}\n</tool_call>"),
        ]
    return [*pieces, trusted(f"{END}\n")]


def _json(value: Any) -> str:
    """JSON as chat templates write it: their `tojson` keeps key order and non-ASCII text."""
    return json.dumps(value, ensure_ascii=False)
