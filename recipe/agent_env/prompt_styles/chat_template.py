# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Any model family, by the chat template that its tokenizer carries.

Owns how a template that only renders whole conversations gives the text between two turns: it renders a stub of a user
message and a reply, with the new messages behind, and takes what follows the reply. So a turn costs the same however
long the episode is. Refuses to know any family: what they differ in is probed when the style is built.

Earlier turns stay as they were sampled, also where the template would write them differently in a whole conversation
(drop thinking, move the tools, change the header). Such a template is named in one warning, or refused with
`strict_history`.
"""

import logging
from collections.abc import Sequence
from typing import Any

from recipe.agent_env.prompt_styles.base import PromptStyle
from recipe.agent_env.prompt_styles.encoder import Piece, trusted
from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError
from recipe.agent_env.prompt_styles.messages import ChatMessage
from recipe.agent_env.prompt_styles.registry import register_prompt_style
from recipe.agent_env.prompt_styles.replies import CallText
from recipe.agent_env.prompt_styles.reply_formats import choose_format, get_reply_format
from recipe.agent_env.prompt_styles.template_probe import probe
from recipe.agent_env.prompt_styles.template_renderer import TemplateRenderer

logger = logging.getLogger(__name__)

THINK, END_THINK = "<think>", "</think>"


@register_prompt_style("chat_template")
class ChatTemplateStyle(PromptStyle):
    """The tokenizer's own template, with a parser of calls by name."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """Build the style and probe the template.

        Args:
            tokenizer: A fast tokenizer with a chat template.
            options: See `PromptStyle`. `tool_parser` is one of ours (`hermes`, `llama3_json`, `mistral`) or one of
                verl's; when it is left out, the tokens of the vocabulary decide.

        Raises:
            PromptStyleError: The template cannot be used (see `template_probe`), does not know a switch, or rewrites
                earlier turns while `strict_history` is set; or nobody has the parser.
        """
        super().__init__(tokenizer, **options)
        self._renderer = TemplateRenderer(tokenizer, self.template_kwargs)
        self._facts = probe(self._renderer, self._encoder)
        self._format = get_reply_format(self.tool_parser or choose_format(self._encoder), tokenizer)
        known_ends = [self._encoder.control_id(text) for text in self._format.end_tokens]
        self._format_ends = [token_id for token_id in known_ends if token_id is not None]
        self._end_ids = tuple(dict.fromkeys((*self._facts.end_ids, *self._format_ends)))
        self._thinks = self._encoder.control_id(END_THINK) is not None or END_THINK in str(tokenizer.chat_template)
        if self._facts.rewrites:
            self._report_rewrites("; ".join(self._facts.rewrites))

    def _report_rewrites(self, how: str) -> None:
        text = f"the chat template of {self._renderer.name} rewrites earlier turns: it {how}"
        if self.strict_history:
            raise PromptStyleError(f"{text}. Set strict_history to false to keep them as sampled")
        logger.warning("%s. They are kept as they were sampled.", text)

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """What the template puts behind an assistant turn, and what the model's call format adds."""
        return self._end_ids

    @property
    def parse_stop_ids(self) -> frozenset[int]:
        """End of turn, start of turn, end of text; none where a turn holds several messages."""
        if self._format.spans_messages:
            return frozenset()
        eos = self.tokenizer.eos_token_id
        return frozenset((*self._end_ids, *self._facts.start_ids, *([] if eos is None else [eos])))

    @property
    def stop_token_ids(self) -> list[int]:
        """The end-of-turn tokens; where a turn holds several messages, only those that end it as a whole."""
        return self._format_ends if self._format.spans_messages else list(self._end_ids)

    def prompt_pieces(
        self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, *, add_header: bool
    ) -> list[Piece]:
        """The text of a conversation's start."""
        return self._renderer.prompt_pieces(messages, tools, add_header=add_header)

    def observation_pieces(self, messages: list[ChatMessage], *, turn_is_closed: bool, add_header: bool) -> list[Piece]:
        """What the template puts between a reply and the next one."""
        pieces = self._renderer.pieces_after_reply(messages, add_header=add_header)
        end, after = self._after_end(pieces)
        return after if turn_is_closed else [trusted(end), *after]

    def _after_end(self, pieces: list[Piece]) -> tuple[str, list[Piece]]:
        """The first end-of-turn token and everything behind it."""
        for index, piece in enumerate(pieces):
            passed = ""
            for text, token_id in self._encoder.split(piece.text) if piece.is_trusted else []:
                passed += text
                if token_id in self._facts.end_ids:
                    return text, [trusted(piece.text[len(passed) :]), *pieces[index + 1 :]]
        raise PromptStyleError(
            f"the chat template of {self._renderer.name} does not end the turn before these messages"
        )

    def parse_text(self, text: str, tools: Sequence[Message] | None) -> CallText:
        """Take a reply apart; a call inside the thinking is no call, and thinking is no content."""
        return self._format.parse(self._without_thinking(text), tools)

    def _without_thinking(self, text: str) -> str:
        if not self._thinks:
            return text
        thought, closed, answer = text.partition(END_THINK)
        if closed:
            return answer.lstrip("\n")
        is_open = self._facts.opens_thinking or thought.lstrip().startswith(THINK)
        return "" if is_open else text
