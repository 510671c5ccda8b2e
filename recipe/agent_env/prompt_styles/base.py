# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a prompt style is: one model family's way from chat to tokens and back.

Owns the interface and everything that is the same for all families: ordinary text, truncation, decoding a reply.
Refuses to know episodes, masks and limits. Imports no torch, ray or verl.

Rules that hold for every style:

- The first prompt and every later piece are encoded once; sampled ids are never re-encoded.
- Only the template's own text can become control tokens (`encoder.py`).
- What the policy writes is kept as sampled. A reply is read up to its first turn token (end of turn, start of turn, end
  of text); what stands after that is in the ids and in the mask, but is parsed as nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from recipe.agent_env.prompt_styles.encoder import Piece, PieceEncoder, Side, without_surrogates
from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError
from recipe.agent_env.prompt_styles.messages import ChatMessage, normalise
from recipe.agent_env.prompt_styles.replies import CallText, ParsedReply, build_reply
from recipe.agent_env.prompt_styles.truncation import ends_of_huge, truncate

DEFAULT_MARKER = "\n[... cut ...]\n"
"""Stands where `truncate_text` took text away."""


class PromptStyle(ABC):
    """Turns messages into token ids and sampled ids into a message, for one model family."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_parser: str | None = None,
        stop: Sequence[str] = (),
        strict_history: bool = False,
        **template_kwargs: Any,
    ) -> None:
        """Build the style for one tokenizer.

        Args:
            tokenizer: The model's Hugging Face fast tokenizer.
            tool_parser: How the model writes calls; None: the style's own choice.
            stop: Strings at which the engine shall end a turn, besides the end-of-turn token.
            strict_history: Refuse a chat template that rewrites earlier turns, instead of keeping them as sampled.
            template_kwargs: Switches of the chat template, such as `enable_thinking`.

        Raises:
            PromptStyleError: The tokenizer lacks what the format needs, or an option has no meaning in this style.
        """
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise PromptStyleError(f"stop: expected a list of texts, none of them empty, got {stop!r}")
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self.stop = list(stop)
        self.strict_history = strict_history
        self.template_kwargs = template_kwargs
        self._encoder = PieceEncoder(tokenizer)

    @property
    @abstractmethod
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn in this family; the first is the one added to a turn that lacks it."""

    @property
    @abstractmethod
    def parse_stop_ids(self) -> frozenset[int]:
        """Ids at which the reading of a reply ends."""

    @abstractmethod
    def prompt_pieces(
        self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, *, add_header: bool
    ) -> list[Piece]:
        """The text of a conversation's start."""

    @abstractmethod
    def observation_pieces(self, messages: list[ChatMessage], *, turn_is_closed: bool, add_header: bool) -> list[Piece]:
        """The text between the last sampled token of a turn and the next sampled token."""

    @abstractmethod
    def parse_text(self, text: str, tools: Sequence[Message] | None) -> CallText:
        """Take the text of a reply apart. Must not raise, whatever the text."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids at which the engine must end a turn."""
        return list(self.end_of_turn_ids)

    def encode_prompt(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, add_header: bool = True
    ) -> list[int]:
        """Encode the start of an episode.

        Args:
            messages: System message, history and first observation, in order.
            tools: OpenAI tool schemas; None or empty when there are none.
            add_header: End with the header after which the model writes.

        Returns:
            Token ids of the whole prompt.

        Raises:
            PromptStyleError: A message has a shape that no rule covers.
        """
        pieces = self.prompt_pieces(normalise(messages), tools or None, add_header=add_header)
        return self._encoder.encode(pieces, at_start=True)

    def encode_observation(
        self, messages: list[Message], *, turn_is_closed: bool, add_header: bool = True
    ) -> list[int]:
        """Encode what stands between two sampled turns; all of it has mask 0.

        Args:
            messages: What the environment answered; may be empty.
            turn_is_closed: `is_turn_closed` of the turn before. If False, the end-of-turn token comes first.
            add_header: End with the header after which the model writes.

        Returns:
            Token ids that extend the sampled turn.

        Raises:
            PromptStyleError: A message has a shape that no rule covers.
        """
        pieces = self.observation_pieces(normalise(messages), turn_is_closed=turn_is_closed, add_header=add_header)
        return self._encoder.encode(pieces)

    def is_turn_closed(self, sampled_ids: Sequence[int]) -> bool:
        """Whether the last sampled token ends the turn."""
        return len(sampled_ids) > 0 and sampled_ids[-1] in self.end_of_turn_ids

    def is_reply_complete(self, sampled_ids: Sequence[int]) -> bool:
        """Whether the reply ended at a token or string that ends a turn, and was not cut by its limit."""
        if not sampled_ids:
            return False
        if sampled_ids[-1] in self.stop_token_ids or sampled_ids[-1] in self.parse_stop_ids:
            return True
        text = self.reply_text(sampled_ids) if self.stop else ""
        return any(end in text for end in self.stop)

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text: whatever it spells, no control token comes out."""
        return self._encoder.encode_text(text)

    def truncate_text(self, text: str, max_tokens: int, side: Side, marker: str = DEFAULT_MARKER) -> str:
        """Shorten text so that it encodes to at most `max_tokens` tokens.

        Args:
            text: Any text; returned as it is when it fits.
            max_tokens: Limit for the text with its marker; 0 or less gives an empty text.
            side: Where text is taken away, as verl's `data.truncation` means it: `left` keeps the end, `right` keeps
                the beginning, `middle` keeps both.
            marker: Put where text was taken away; left out when it alone would fill the limit.

        Returns:
            The text, cut between characters as a reader sees them.
        """
        return truncate(self._encoder, text, max_tokens, side, marker)

    def ends_of_huge(self, text: str, max_tokens: int) -> str:
        """Leave out the middle of a text that is far too long, before anything is encoded.

        Args:
            text: Any text.
            max_tokens: What it may have at most.

        Returns:
            The text itself, or its two ends where its length alone says that it has more than `max_tokens` tokens.
            These have more than `max_tokens` as well, and `truncate_text` to `max_tokens` or fewer gives the same.
        """
        return ends_of_huge(self._encoder, text, max_tokens)

    def is_surely_longer(self, text: str, max_tokens: int) -> bool:
        """Whether the length of a text alone says that it has more than `max_tokens` tokens."""
        text = without_surrogates(text)
        if len(text) <= max_tokens:
            return False
        bound = self._encoder.max_chars(text, max_tokens)
        return bound is not None and len(text) > bound

    def reply_text(self, sampled_ids: Sequence[int]) -> str:
        """The text of a reply up to its first turn token, which is left out."""
        stops = self.parse_stop_ids
        if not stops.isdisjoint(sampled_ids):
            end = next(i for i, token_id in enumerate(sampled_ids) if token_id in stops)
            sampled_ids = sampled_ids[:end]
        return self._encoder.decode(sampled_ids)

    def parse_reply(self, sampled_ids: Sequence[int], tools: list[dict[str, Any]] | None) -> ParsedReply:
        """Read a sampled reply. Never raises, whatever was sampled.

        Args:
            sampled_ids: As the engine returned them.
            tools: OpenAI tool schemas; a call of another name is an error. None: names are not checked.

        Returns:
            The assistant message, the first error or None, and how many calls were found and broken.
        """
        text = self.reply_text(sampled_ids)
        return build_reply(self.parse_text(text, tools), text.encode("utf-8", "surrogatepass"), tools)
