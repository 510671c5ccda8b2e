# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Our deltas against those of verl's continuous-token builders, for families that verl knows.

verl's builders encode message text together with the template, so they cannot keep it apart from control tokens; that
is why they are compared with here, and not used.
"""

import pytest
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, QwenContinuousTokenBuilder

from tests.prompt_styles.families import FAMILIES, TOOLS

CALL = {"id": "call00001", "type": "function", "function": {"name": "wait", "arguments": {}}}
START = [{"role": "user", "content": "map"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TOOL = {"role": "tool", "tool_call_id": "call00001", "content": "\n  moved 往上\n"}
USER = {"role": "user", "content": "go on"}


@pytest.mark.parametrize(
    ("name", "builder"),
    [
        ("qwen2_5", QwenContinuousTokenBuilder),
        ("qwen3", QwenContinuousTokenBuilder),
        ("llama3_1", ContinuousTokenBuilder),
    ],
)
@pytest.mark.parametrize("observation", [[TOOL], [TOOL, USER], [USER]], ids=["tool", "tool and user", "user"])
def test_delta_is_the_one_of_verl(name, builder, observation):
    family = next(family for family in FAMILIES if family.name == name)
    style, tokenizer = family.build(), family.tokenizer()
    sampled = [*style.encode_text("x"), style.end_of_turn_ids[0]]
    merged = builder(tokenizer).merge_context_tokens(START, [*START, *observation], sampled, tools=TOOLS)
    assert sampled + style.encode_observation(observation, turn_is_closed=True) == merged.token_ids
