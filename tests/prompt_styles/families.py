# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The model families that the styles are tested with, and random conversations that their templates accept.

Owns what each template can render; refuses to know how styles work.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from recipe.agent_env.prompt_styles import PromptStyle, get_prompt_style
from tests.prompt_styles import tokenizers


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family: its tokenizer and what its template takes."""

    name: str
    """For test ids."""

    tokenizer: Callable[[], Any]
    """Gives the Hugging Face tokenizer; its template is the reference."""

    style: str = "chat_template"
    """Name of the prompt style."""

    takes_system: bool = True
    """Whether a system message may come first."""

    takes_tools: bool = True
    """Whether tools and calls are rendered."""

    calls_per_turn: int = 3
    """Most calls of one turn."""

    alternates: bool = False
    """Whether user and assistant must take turns."""

    trims: bool = False
    """Whether the template strips message text."""

    moves_start: bool = False
    """Whether tools and system message move when a user message follows: then only tool results are append-only."""

    def build(self) -> PromptStyle:
        """The style for this family; the same object at each call."""
        return _build(self.style, self.tokenizer)


@functools.cache
def _build(style: str, tokenizer: Callable[[], Any]) -> PromptStyle:
    return get_prompt_style(style)(tokenizer())


def forget_styles() -> None:
    """Build every style anew when it is asked for next."""
    _build.cache_clear()


FAMILIES = [
    Family(name="qwen2_5", tokenizer=tokenizers.qwen2_5_tokenizer, style="qwen2_5"),
    Family(name="qwen2_5-template", tokenizer=tokenizers.qwen2_5_tokenizer),
    Family(name="qwen3", tokenizer=tokenizers.qwen3_tokenizer),
    Family(name="llama3_1", tokenizer=tokenizers.llama3_tokenizer, calls_per_turn=1, trims=True),
    Family(name="mistral_nemo", tokenizer=tokenizers.mistral_tokenizer, alternates=True, moves_start=True),
    Family(name="chatml", tokenizer=tokenizers.chatml_tokenizer, takes_tools=False),
    Family(
        name="gemma2",
        tokenizer=tokenizers.gemma2_tokenizer,
        takes_system=False,
        takes_tools=False,
        alternates=True,
        trims=True,
    ),
    Family(name="metaspace", tokenizer=tokenizers.metaspace_tokenizer, takes_tools=False),
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "push",
            "description": 'Push "up" \\ or down, 往上 🙂',
            "parameters": {
                "type": "object",
                "properties": {"direction": {"type": "string", "enum": ["up", "down"]}, "steps": {"type": "integer"}},
                "required": ["direction"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "wait", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]

# Letters whose neighbours merge across the borders of template and text.
_ALPHABET = "ab Z0\n\n\t  .,:;'\"\\/{}<>|#@$é世😀\u0301-_="
texts = st.one_of(
    st.text(alphabet=_ALPHABET, max_size=24),
    st.sampled_from(
        ["", "\n\n", "  x", "\n\nx\n", "x \n", "#####\n#@$.#\n#####", "'s", "123", "</s", "<|im_", "_end|>"]
    ),
)
# A reply begins and ends with a letter: so its tokens do not merge with those of the template around it.
replies = st.builds(lambda text: f"I{text}k", texts)
arguments = st.dictionaries(
    st.sampled_from(["direction", "steps", "q"]), st.one_of(texts, st.integers(-9, 99), st.booleans(), st.none())
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation, as rendered at its end, and where its assistant turns are."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    def turns(self) -> list[int]:
        """Indices of the assistant messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> Conversation:
    """A conversation that the family's template renders, ending with an observation."""
    has_tools = family.takes_tools and draw(st.booleans())
    messages: list[dict[str, Any]] = []
    results_only = family.moves_start
    if family.takes_system and not results_only and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    messages.append({"role": "user", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        calls = family.takes_tools and (results_only and has_tools or draw(st.booleans()))
        if not calls:
            messages.append({"role": "assistant", "content": draw(replies)})
            messages.append({"role": "user", "content": draw(texts)})
            continue
        count = draw(st.integers(1, family.calls_per_turn))
        ids = [f"id{len(messages):05d}{i:02d}" for i in range(count)]
        functions = [
            {"name": draw(st.sampled_from(["push", "wait", 'f"g'])), "arguments": draw(arguments)} for _ in ids
        ]
        messages.append(
            {
                "role": "assistant",
                "content": draw(st.one_of(st.just(""), replies)),
                "tool_calls": [
                    {"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)
                ],
            }
        )
        messages += [{"role": "tool", "tool_call_id": i, "content": draw(texts)} for i in ids]
        if not family.alternates and draw(st.booleans()):
            messages.append({"role": "user", "content": draw(texts)})
    return Conversation(messages, TOOLS if has_tools else None)
