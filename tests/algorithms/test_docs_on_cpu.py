# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""docs/algorithms.md: its table is what the estimators give, and its sums come out as it says."""

import re
from pathlib import Path

import pytest
import torch

from recipe.agent_env.algorithms.catalog import ESTIMATORS
from recipe.agent_env.config_checks import _MASKABLE_END_REASONS
from tests.algorithms.batches import STEP_WEIGHT, TOKEN_LAM, compute, make_batch

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
TABLE = re.findall(r"^\| ([a-z_, ]+) \|((?: -?[\d.]+ \|){10})$", PAGE, flags=re.MULTILINE)
TOKENS = [(0, 0), (0, 1), (0, 4), (0, 5), (1, 0), (1, 1), (1, 4), (2, 0), (2, 1), (2, 4)]


def the_example():
    batch = make_batch(
        [[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 0]],
        [[0, 1.0, 0, 0, 0, 2.0], [0, 0, 0, 0, 1.0, 0], [0.0] * 6],
        values=[[0.5, 0.4, 9, 9, 1.0, 0.8], [0.2, 0.3, 9, 9, 0.6, 9], [0.1, 0.2, 9, 9, 0.3, 9]],
        responses=[[11, 12, 7, 8, 13, 14], [15, 16, 7, 8, 17, 0], [15, 16, 9, 8, 17, 0]],
        uids="row",
    )
    batch.non_tensor_batch["uid"][:] = "row"
    probabilities = torch.full((3, 6), 0.5)
    probabilities[0, 4] = probabilities[1, 1] = 0.25
    batch.batch["old_log_probs"] = probabilities.log()
    batch.batch["sum_pi_squared"] = torch.full((3, 6), 0.5)
    batch.batch["reward_baselines"] = torch.full((3,), 2.0)
    return batch


def test_every_allowed_estimator_is_in_the_table():
    named = [name for names, _ in TABLE for name in names.split(", ")]
    assert sorted(named) == sorted(name for name, traits in ESTIMATORS.items() if traits.refusal is None)


@pytest.mark.parametrize(("names", "numbers"), TABLE, ids=[names for names, _ in TABLE])
def test_table_is_what_the_estimators_give(names, numbers):
    expected = [float(number) for number in numbers.replace("|", " ").split()]
    for name in names.split(", "):
        advantages, _ = compute(the_example(), name, num_repeat=3)
        assert [advantages[place] for place in TOKENS] == pytest.approx(expected, abs=6e-5)


def test_settings_of_the_example_are_those_on_the_page():
    assert f"`algorithm.token_lam={TOKEN_LAM}`" in PAGE
    assert f"`algorithm.gigpo_step_weight={STEP_WEIGHT}`" in PAGE


BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_sums_on_the_page_come_out_as_it_says():
    names: dict[str, float] = {}
    num_checked = 0
    for line in "".join(BLOCKS).splitlines():
        exec(line, names)
        if "#" in line:
            said = float(line.split("#")[1])
            assert names[line.split(" = ")[0]] == pytest.approx(said, abs=2e-4), line
            num_checked += 1
    assert num_checked > 40


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_is_explained(name):
    heading = re.search(rf"^### .*\b{name}\b", PAGE, flags=re.MULTILINE)
    refused = f"| `{name}` |" in PAGE
    assert bool(heading) != refused
    assert refused == (ESTIMATORS[name].refusal is not None)


def test_settings_that_the_page_names_exist():
    from recipe.agent_env.config_checks import register_resolvers
    from tests.test_config_on_cpu import composed

    register_resolvers()
    config = composed()
    for section in ("env", "algorithm"):
        for key in set(re.findall(rf"`{section}\.([a-z_]+)", PAGE)):
            assert key in config[section], f"{section}.{key}"
    for words in re.findall(r"masked_end_reasons=\[([a-z_,]+)\]", PAGE):
        assert set(words.split(",")) <= set(_MASKABLE_END_REASONS)
