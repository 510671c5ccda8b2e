# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Settings of the algorithm that cannot be right end before Ray starts, with the reason."""

import pytest

from recipe.agent_env.algorithms.catalog import ESTIMATORS
from recipe.agent_env.config_checks import _MASKABLE_END_REASONS, ConfigError, finish_config
from recipe.agent_env.rollout.episode import EndReason
from tests.test_config_on_cpu import composed


def settled(*overrides):
    return finish_config(composed("trainer.logger=console", *overrides))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["algorithm.adv_estimator=optimal_token_baseline"], "several turns.*tir_optimal_token_baseline"),
        (["algorithm.adv_estimator=gdpo"], "several turns.*one number per turn"),
        (["algorithm.adv_estimator=grop"], "adv_estimator=grop: no such estimator; known are .*grpo"),
        (["algorithm.adv_estimator=turn_gae", "critic.enable=False"], "critic.enable=False: leave critic.enable out"),
        (
            ["algorithm.adv_estimator=tir_optimal_token_baseline", "actor_rollout_ref.rollout.n=2"],
            "calculate_sum_pi_squared=True",
        ),
        (
            ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "env.bootstrap_on_truncation=True"],
            "env.bootstrap_on_truncation=True needs a critic.*turn_gae",
        ),
        (
            ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=3"],
            "train_batch_size=4 cannot be cut .*actor.ppo_mini_batch_size=3",
        ),
        (["critic.ppo_mini_batch_size=100"], "critic.ppo_mini_batch_size=100"),
        (["algorithm.use_pf_ppo=True"], "use_pf_ppo=True: verl draws rows again"),
        (["algorithm.rollout_correction.bypass_mode=True"], "bypass_mode=True.*masked rows"),
        (["env.masked_end_reasons=[max_turns]"], r"masked_end_reasons: expected any of .*max_turn.*\['max_turns'\]"),
        (["env.masked_end_reasons=[failed]"], "masked_end_reasons"),
    ],
)
def test_what_cannot_be_right_names_key_and_fix(overrides, match):
    with pytest.raises(ConfigError, match=match):
        settled(*overrides)


@pytest.mark.parametrize("name", sorted(n for n, t in ESTIMATORS.items() if t.min_rollouts > 1 and not t.refusal))
def test_grouped_estimators_need_two_rollouts(name):
    sum_pi_squared = "actor_rollout_ref.actor.calculate_sum_pi_squared=True"
    with pytest.raises(ConfigError, match="rollout.n to 2 or more"):
        settled(f"algorithm.adv_estimator={name}", sum_pi_squared)
    settled(f"algorithm.adv_estimator={name}", sum_pi_squared, "actor_rollout_ref.rollout.n=2")


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "gpg", "turn_gae", "bilevel_gae"])
def test_other_estimators_play_with_one_rollout(name):
    config = settled(f"algorithm.adv_estimator={name}")
    assert config.critic.enable is (True if name.endswith("gae") else None)


def test_own_registered_estimator_is_taken_as_it_is(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_estimators")
    assert settled("algorithm.adv_estimator=mine").algorithm.adv_estimator == "mine"


def test_defaults_of_the_algorithm_stay_verls():
    config = settled()
    assert (config.algorithm.adv_estimator, config.algorithm.gamma, config.algorithm.lam) == ("gae", 1.0, 1.0)
    assert not config.env.bootstrap_on_truncation
    assert list(config.env.masked_end_reasons) == []


def test_maskable_ends_are_words_of_the_closed_set():
    never_trained = {EndReason.FAILED, EndReason.PROMPT_TOO_LONG}
    assert {EndReason(word) for word in _MASKABLE_END_REASONS} == set(EndReason) - never_trained - {
        EndReason.TERMINATED
    }


def test_estimators_are_registered_with_verl_under_their_names():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    import recipe.agent_env.verl_patches  # noqa: F401

    for name in ESTIMATORS:
        assert get_adv_estimator_fn(name)
