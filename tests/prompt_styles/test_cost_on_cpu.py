# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""P16: what a turn costs does not grow with the number of turns. Counted in characters, not in seconds."""

import pytest

from recipe.agent_env.prompt_styles.encoder import PieceEncoder
from tests.prompt_styles.families import FAMILIES, TOOLS

TURNS = 128


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_characters_given_to_the_tokenizer_are_flat_over_the_turns(family, monkeypatch):
    style = family.build()
    given = []
    plain = PieceEncoder._ordinary_ids
    monkeypatch.setattr(PieceEncoder, "_ordinary_ids", lambda self, text: given.append(len(text)) or plain(self, text))
    style.encode_prompt([{"role": "user", "content": "start"}], TOOLS if family.takes_tools else None)
    sampled = [*style.encode_text("left"), style.end_of_turn_ids[0]]
    per_turn, lengths = [], []
    for turn in range(TURNS):
        given.clear()
        observation = [{"role": "user", "content": f"row {turn:04d}"}]
        delta = style.encode_observation(observation, turn_is_closed=style.is_turn_closed(sampled))
        per_turn.append(sum(given))
        lengths.append(len(delta))
    assert max(per_turn) == min(per_turn)
    assert max(lengths) <= min(lengths) + 4


@pytest.mark.parametrize("family", [FAMILIES[1], FAMILIES[3]], ids=lambda family: family.name)
def test_what_the_template_renders_for_a_turn_is_flat_too(family, monkeypatch):
    """The stub conversation does not grow, and the tools are not rendered again."""
    style = family.build()
    rendered = []
    plain = style._renderer.render
    monkeypatch.setattr(
        style._renderer, "render", lambda *args, **kwargs: rendered.append(plain(*args, **kwargs)) or rendered[-1]
    )
    style.encode_prompt([{"role": "user", "content": "start"}], TOOLS)
    rendered.clear()
    for turn in range(TURNS):
        style.encode_observation([{"role": "user", "content": f"row {turn:04d}"}], turn_is_closed=True)
    assert len(rendered) == TURNS
    assert max(map(len, rendered)) == min(map(len, rendered)) < 600
