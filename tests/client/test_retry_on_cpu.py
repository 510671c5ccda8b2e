# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The retry rules by themselves, on a clock that only their own waits move."""

import time

import pytest
from tenacity import Retrying

from recipe.agent_env.client.protocol import EnvProtocol
from recipe.agent_env.client.retry import retry_options
from recipe.agent_env.env_client import EnvClientConfig, EnvUnreachableError

CONFIG = EnvClientConfig(endpoint="http://service")


def outlast(outage_s: float, monkeypatch, call=None) -> float:
    """Carry out a call at a service that is down for so long; returns when it got through, in seconds."""
    call = call or EnvProtocol(CONFIG, CONFIG.endpoints[0]).initialize(env_name="game", seed=0, env_kwargs={})
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def attempt() -> float:
        if now < outage_s:
            raise EnvUnreachableError("down", may_have_been_applied=False, is_transient=True)
        return now

    monkeypatch.setattr(time, "monotonic", lambda: now)
    return Retrying(**retry_options(CONFIG, call, lambda: None), sleep=sleep)(attempt)


def test_an_outage_of_20_seconds_is_waited_out_by_default(monkeypatch):
    """P80: a service that is restarted costs time, and no attempt."""
    assert 20.0 <= outlast(20.0, monkeypatch) <= CONFIG.retry_time_s


def test_no_retry_starts_after_the_time_limit(monkeypatch):
    with pytest.raises(EnvUnreachableError):
        outlast(CONFIG.retry_time_s + 0.1, monkeypatch)


def test_health_is_told_soon(monkeypatch):
    """P80: whoever asks for it does not want to sit the outage out."""
    health = EnvProtocol(CONFIG, CONFIG.endpoints[0]).health()
    assert outlast(1.0, monkeypatch, health) < 3.0
    with pytest.raises(EnvUnreachableError):
        outlast(3.1, monkeypatch, health)
