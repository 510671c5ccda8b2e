# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A tokenizer's chat template as a function from messages to pieces of text.

Owns the call of the template, what it is shown of each message, and the stub conversation by which the text after a
reply is found. Refuses to know tokens and what the template looks like.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from recipe.agent_env.prompt_styles.encoder import Piece
from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError
from recipe.agent_env.prompt_styles.messages import ChatMessage
from recipe.agent_env.prompt_styles.placeholders import Placeholders

_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]+")


class TemplateRenderer:
    """Renders conversations with one tokenizer's template; untrusted text stays apart from the template's own."""

    def __init__(self, tokenizer: Any, switches: Mapping[str, Any]) -> None:
        """Check that there is a template and that it knows the switches.

        Args:
            tokenizer: A Hugging Face tokenizer.
            switches: Handed to the template, such as `enable_thinking`.

        Raises:
            PromptStyleError: There is no template, or a switch does not occur in it.
        """
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise PromptStyleError(f"the tokenizer {self.name} has no chat template; set one or use another style")
        unknown = [switch for switch in switches if not re.search(rf"\b{re.escape(switch)}\b", str(template))]
        if unknown:
            raise PromptStyleError(f"the chat template of {self.name} has no switch {', '.join(unknown)}; remove it")
        self._tokenizer = tokenizer
        self._switches = dict(switches)
        self.shows_calls = True
        self.arguments_as_text = False

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, add_header: bool = False) -> str:
        """Render raw messages.

        Raises:
            PromptStyleError: The template refuses them; with its own words.
        """
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_header, **self._switches
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as exc:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise PromptStyleError(f"the chat template of {self.name} refuses messages of {roles}: {exc}") from exc

    def prompt_pieces(self, messages: list[ChatMessage], tools: list[Any] | None, *, add_header: bool) -> list[Piece]:
        """The text of a conversation from its start."""
        stand_ins = Placeholders([*_texts(messages), tools])
        shown = [self._shown(message, stand_ins) for message in messages]
        return stand_ins.pieces(self.render(shown, stand_ins.value(tools), add_header=add_header))

    def pieces_after_reply(self, messages: list[ChatMessage], *, add_header: bool) -> list[Piece]:
        """The text after the words of an assistant turn: its end, the messages, and the header.

        Raises:
            PromptStyleError: The template refuses the messages or leaves out the reply.
        """
        stand_ins = Placeholders(_texts(messages))
        shown = [self._shown(message, stand_ins) for message in messages]
        anchor = str(secrets.randbits(128)).zfill(39)
        rendered = self._after_stub(shown, anchor, add_header)
        before, found, after = rendered.rpartition(anchor)
        if not found:
            raise PromptStyleError(
                f"the chat template of {self.name} leaves out the reply before messages: {before!r:.99}"
            )
        return stand_ins.pieces(after)

    def _after_stub(self, shown: list[Message], anchor: str, add_header: bool) -> str:
        user: Message = {"role": "user", "content": "u"}
        answered = _leading_tools(shown)
        if not answered or not self.shows_calls:
            stub = [user, {"role": "assistant", "content": anchor}]
            return self.render([*stub, *shown], add_header=add_header)
        calls = [self._wire_call(m.get("tool_call_id") or "call00000", anchor, {anchor: anchor}) for m in answered]
        try:
            stub = [user, {"role": "assistant", "content": "", "tool_calls": calls}]
            return self.render([*stub, *shown], add_header=add_header)
        except PromptStyleError:
            if len(calls) == 1:
                raise
            # Some templates allow one call per turn, yet render any number of results.
            stub = [user, {"role": "assistant", "content": "", "tool_calls": calls[:1]}]
            return self.render([*stub, *shown], add_header=add_header)

    def _shown(self, message: ChatMessage, stand_ins: Placeholders) -> Message:
        """A message as the template sees it."""
        shown: Message = {"role": message.role, "content": stand_ins.text(message.content)}
        if message.name is not None:
            shown["name"] = stand_ins.text(message.name)
        if message.tool_call_id is not None:
            shown["tool_call_id"] = _shown_id(message.tool_call_id, stand_ins)
        if message.calls:
            shown["tool_calls"] = [
                self._wire_call(
                    None if call.id is None else _shown_id(call.id, stand_ins),
                    stand_ins.text(call.name),
                    self._shown_arguments(call.arguments, stand_ins),
                )
                for call in message.calls
            ]
        return shown

    def _shown_arguments(self, arguments: Any, stand_ins: Placeholders) -> Any:
        if self.arguments_as_text:
            return stand_ins.text(_arguments_text(arguments))
        return stand_ins.value(arguments)

    def _wire_call(self, call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return call if call_id is None else {"id": call_id, **call}


def _leading_tools(shown: Sequence[Message]) -> list[Message]:
    leading: list[Message] = []
    for message in shown:
        if message["role"] != "tool":
            break
        leading.append(message)
    return leading


def _texts(messages: list[ChatMessage]) -> list[Any]:
    """Everything in the messages that others wrote."""
    texts: list[Any] = []
    for message in messages:
        texts += [message.content, message.name or "", message.tool_call_id or ""]
        for call in message.calls:
            texts += [call.name, call.id or "", call.arguments, _arguments_text(call.arguments)]
    return texts


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _shown_id(call_id: str, stand_ins: Placeholders) -> str:
    """Some templates check the length of ids, so one of letters and digits is shown as it is."""
    return call_id if _PLAIN_ID.fullmatch(call_id) else stand_ins.text(call_id)
