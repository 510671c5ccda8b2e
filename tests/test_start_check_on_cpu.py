# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Whether a service that ignores seeds is found out before training, against a live one."""

import json
import logging

import pytest
from omegaconf import OmegaConf

from recipe.agent_env.agent_dataset import AgentDataset
from recipe.agent_env.start_check import SeedIgnoredError, check_seeds
from tests.mock_env_server import EnvScript, MockEnvServer
from tests.test_config_on_cpu import composed


@pytest.fixture(scope="module")
def base_config():
    return composed()


@pytest.fixture
def service():
    with MockEnvServer() as server:
        yield server
        assert server.live_count == 0


def look(config, service, folder, *env_names: str, **changes):
    """Run the check on two rows of each environment."""
    rows = [{"env_name": name, "seed": seed, "env_kwargs": {}} for name in env_names for seed in (3, 4)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config.copy()
    OmegaConf.set_struct(config, False)
    for key, value in {"env__environment_endpoint": service.url, **changes}.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    check_seeds(config, AgentDataset(str(path)))


GRPO = {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__rollout__n": 4}


def test_same_starts_are_fine_and_leave_no_environment(base_config, service, tmp_path, caplog):
    service.script("game", EnvScript())
    look(base_config, service, tmp_path, "game", **GRPO)
    assert len(service.episodes) == 2
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


ELSEWHERE = [{"role": "user", "content": "You stand somewhere else."}]


def ignore_seed(service, **match) -> None:
    """The second environment of a seed starts differently."""
    service.fault("patch", call="initialize", attempt=1, times=None, patch={"observation": ELSEWHERE}, **match)


@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "rloo", "remax"])
def test_ignored_seed_is_an_error_where_rollouts_are_compared(base_config, service, tmp_path, estimator):
    """P90."""
    ignore_seed(service)
    changes = {**GRPO, "algorithm__adv_estimator": estimator}
    with pytest.raises(
        SeedIgnoredError, match=rf"'game' at {service.url}, seed 3 gave two.*somewhere else.*{estimator}"
    ):
        look(base_config, service, tmp_path, "game", **changes)


@pytest.mark.parametrize("changes", [{}, {"actor_rollout_ref__rollout__n": 4}], ids=["one-rollout", "four-rollouts"])
def test_ignored_seed_is_a_warning_where_they_are_not(base_config, service, tmp_path, caplog, changes):
    """P90."""
    ignore_seed(service)
    look(base_config, service, tmp_path, "game", **changes)
    assert "gave two different starts (observation)" in caplog.text


def test_every_environment_of_the_file_is_looked_at(base_config, service, tmp_path):
    ignore_seed(service, env_name="chess", seed=4)
    look(base_config, service, tmp_path, "game", "chess", **GRPO)  # one row each: seed 4 is not seen
    with pytest.raises(SeedIgnoredError, match="'chess'.*seed 4"):
        look(base_config, service, tmp_path, "game", "chess", **GRPO, env__seed_check_rows=2)


def test_check_can_be_left_out(base_config, service, tmp_path):
    look(base_config, service, tmp_path, "game", **GRPO, env__seed_check_rows=0)
    assert service.episodes == []


def test_service_that_is_down_does_not_stop_the_start(base_config, service, tmp_path, caplog):
    """Episodes are restarted and counted later; a service may come up after the trainer."""
    service.fault("status", call="initialize", times=None, status=500)
    look(base_config, service, tmp_path, "game", **GRPO, env__retry_time_s=0.0)
    assert "seeds not looked at" in caplog.text


def test_hanging_service_costs_no_more_than_the_limit_allows(base_config, service, tmp_path, caplog):
    """P70: one call hangs to the limit, the second row is not tried."""
    service.fault("hang", call="initialize", times=None)
    look(base_config, service, tmp_path, "game", **GRPO, env__seed_check_time_s=1.0, env__seed_check_rows=2)
    assert len([r for r in service.received if r.call == "initialize"]) == 1
    assert "env.seed_check_time_s=1 is over" in caplog.text
