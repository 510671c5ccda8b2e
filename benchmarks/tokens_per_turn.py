# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 4: processor time that turning chat into tokens costs per turn, as a conversation grows.

Ours (read the reply, tokenise the new observation) against rendering and tokenising the whole chat on every turn. Both
hold Qwen2.5's real vocabulary. Processor time, so that other load on the machine hardly shows.
"""

import time
from typing import Any

from benchmarks.figures import Figure, compare, run_script
from benchmarks.players import encode, make_tokenizer
from benchmarks.simulation import BOARD, MOVE_TOOL, TASK_PROMPT, ReplyMaker
from recipe.agent_env.rollout.ledger import TokenLedger
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer

_REPETITIONS = 9
_REPLY_TOKENS = 60
_OBSERVATION = [{"role": "tool", "tool_call_id": "call_0", "name": "move", "content": f"You moved.\n{BOARD}\n" * 4}]


def turn_costs_ms(num_turns: int) -> tuple[list[float], int]:
    """Processor time of each turn of one conversation through the product's own parts, in milliseconds.

    Returns:
        costs: One per turn.
        num_tokens: Length of the conversation at the end.
    """
    tokenizer = make_tokenizer()
    reply_ids = ReplyMaker(encode)(_REPLY_TOKENS)
    ids, _ = tokenizer.first_prompt(TASK_PROMPT, [{"role": "user", "content": BOARD}], [MOVE_TOOL])
    ledger = TokenLedger(ids)
    costs = []
    for _ in range(num_turns):
        started = time.process_time()
        context = list(ledger.context_ids)  # what the engine is asked with
        ledger.add_sampled(reply_ids, None)
        reply = tokenizer.style.parse_reply(reply_ids, [MOVE_TOOL])
        written, _ = tokenizer.observation_delta(_OBSERVATION, reply_ids)
        ledger.add_written(written)
        costs.append(1000 * (time.process_time() - started))
        assert reply.error is None and len(context) < ledger.num_context_tokens
    return costs, ledger.num_context_tokens


def whole_chat_cost_ms(num_turns: int) -> float:
    """Processor time of rendering and tokenising the chat as it stands after so many turns, in milliseconds."""
    call = {"type": "function", "function": {"name": "move", "arguments": {"direction": "up"}}}
    thought = qwen2_5_tokenizer().decode(ReplyMaker(encode)(_REPLY_TOKENS)).split("<tool_call>")[0]
    messages: list[dict[str, Any]] = [{"role": "system", "content": TASK_PROMPT}, {"role": "user", "content": BOARD}]
    for _ in range(num_turns):
        messages += [{"role": "assistant", "content": thought, "tool_calls": [call]}, *_OBSERVATION]
    started = time.process_time()
    text = qwen2_5_tokenizer().apply_chat_template(
        messages, tools=[MOVE_TOOL], add_generation_prompt=True, tokenize=False
    )
    qwen2_5_tokenizer()(text, add_special_tokens=False)
    return 1000 * (time.process_time() - started)


def measure(quick: bool) -> list[Figure]:
    """Growth from turn 2 to the last, and the comparison at the middle."""
    last, middle = (32, 16) if quick else (128, 64)
    turn_costs_ms(4)
    whole_chat_cost_ms(4)
    runs = [turn_costs_ms(last) for _ in range(_REPETITIONS * 5)]
    # One turn takes under a millisecond, so that a single interruption doubles it: a repetition is the fastest of five.
    groups = [[costs for costs, _ in runs[i : i + 5]] for i in range(0, len(runs), 5)]
    second = [min(costs[1] for costs in group) for group in groups]
    final = [min(costs[-1] for costs in group) for group in groups]
    at_middle = [min(costs[middle - 1] for costs in group) for group in groups]
    whole = [whole_chat_cost_ms(middle) for _ in range(_REPETITIONS)]
    return [
        compare(
            f"tokens_turn_{last}_vs_turn_2",
            f"processor time of turn {last} against that of turn 2 of the same conversation",
            unit="ms",
            ours=final,
            baseline=second,
            goal="< 1.3",
            details={"context_tokens_at_the_end": runs[0][1]},
        ),
        compare(
            f"tokens_turn_{middle}_vs_whole_chat",
            f"processor time of turn {middle} against rendering and tokenising the whole chat",
            unit="ms",
            ours=at_middle,
            baseline=whole,
            inverted=True,
            goal="" if quick else ">= 10",
        ),
    ]


if __name__ == "__main__":
    run_script(measure, __doc__)
