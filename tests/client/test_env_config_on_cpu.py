# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The client's settings: what is refused, where the token comes from, what never shows."""

from __future__ import annotations

import pytest

from recipe.agent_env.env_client import EnvClientConfig

URL = "http://localhost:8000"
TOKEN = "s3cret-token"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"endpoint": "localhost:8000"}, "endpoint must look like http://host:port"),
        ({"endpoint": ""}, "endpoint must look like"),
        ({"endpoint": "ftp://host"}, "endpoint must look like"),
        ({"endpoint": "http://host/?a=1"}, "endpoint must look like"),
        ({"endpoint": "http://host:99999"}, "no URL"),
        ({"endpoint": 8000}, "endpoint must be a URL, not int"),
        ({"endpoint": []}, "one service or several different ones"),
        ({"endpoint": ["http://host", "http://host/"]}, "one service or several different ones"),
        ({"endpoint": ["http://host", "host"]}, "endpoint must look like http://host:port"),
        ({"request_timeout_s": 0}, "request_timeout_s must be above 0"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s must be a number of seconds"),
        ({"connect_timeout_s": "5"}, "connect_timeout_s must be a number of seconds"),
        ({"keepalive_s": -1}, "keepalive_s must be at least 0"),
        ({"max_retries": -1}, "max_retries must be an integer of at least 0"),
        ({"max_retries": 1.5}, "max_retries must be an integer"),
        ({"max_concurrent_episodes": 0}, "max_concurrent_episodes must be an integer of at least 1"),
        ({"max_response_bytes": True}, "max_response_bytes must be an integer"),
        ({"retry_wait_s": 9}, "retry_max_wait_s"),
        ({"bearer_token": "a", "bearer_token_env": "B"}, "set only one of"),
        ({"client_key_file": "k.pem"}, "client_key_file needs client_cert_file"),
        ({"headers": {"X-A": "a\r\nX-B: b"}}, "'X-A' must map one line"),
        ({"headers": {"X-A": 3}}, "'X-A' must map one line"),
        ({"proxy": "localhost:3128"}, "proxy must be an http"),
    ],
)
def test_bad_setting_is_refused_by_name(settings, reason):
    with pytest.raises(ValueError, match=reason):
        EnvClientConfig(**{"endpoint": URL, **settings})


def test_credentials_in_the_endpoint_are_refused_and_not_shown():
    with pytest.raises(ValueError, match="must not hold credentials") as caught:
        EnvClientConfig(endpoint=f"http://me:{TOKEN}@host")
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://h:1", "http://h:1/", "http://h:1//"])
def test_trailing_slash_of_the_endpoint_is_dropped(endpoint):
    assert EnvClientConfig(endpoint=endpoint).endpoint == "http://h:1"


def test_endpoints_may_be_one_or_several():
    assert EnvClientConfig(endpoint="http://h:1/").endpoints == ("http://h:1",)
    assert EnvClientConfig(endpoint=["http://h:1/", "http://h:2"]).endpoints == ("http://h:1", "http://h:2")


def test_token_comes_from_value_file_or_variable(tmp_path, monkeypatch):
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("ENV_SERVICE_TOKEN", TOKEN)
    for setting in (
        {"bearer_token": TOKEN},
        {"bearer_token_file": str(token_file)},
        {"bearer_token_env": "ENV_SERVICE_TOKEN"},
    ):
        config = EnvClientConfig(endpoint=URL, headers={"authorization": "Basic other"}, **setting)
        headers = config.resolve_headers()
        assert headers["Authorization"] == f"Bearer {TOKEN}" and "authorization" not in headers
        assert TOKEN not in repr(config) and "Basic" not in repr(config)


@pytest.mark.parametrize(
    "setting",
    [{"bearer_token": ""}, {"bearer_token": "a b"}, {"bearer_token": "a\nb"}, {"bearer_token_env": "NOT_SET"}],
)
def test_unusable_token_is_refused_without_showing_it(setting):
    with pytest.raises(ValueError, match="one non-empty word"):
        EnvClientConfig(endpoint=URL, **setting).resolve_token()


def test_missing_token_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="bearer_token_file .*cannot be read"):
        EnvClientConfig(endpoint=URL, bearer_token_file=str(tmp_path / "none")).resolve_token()


def test_missing_tls_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="none.pem"):
        EnvClientConfig(endpoint="https://h", ca_file=str(tmp_path / "none.pem")).ssl_context()


def test_proxy_variables_count_only_with_trust_env(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    monkeypatch.setenv("no_proxy", "inside")
    assert EnvClientConfig(endpoint=URL).resolve_proxy(URL) is None
    assert EnvClientConfig(endpoint=URL, trust_env=True).resolve_proxy(URL) == "http://proxy:1"
    assert EnvClientConfig(endpoint=URL, trust_env=True).resolve_proxy("http://inside") is None
    assert EnvClientConfig(endpoint=URL, trust_env=True, proxy="http://mine:2").resolve_proxy(URL) == "http://mine:2"
