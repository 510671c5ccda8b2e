# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Names, specs and what the command line makes of them."""

import pickle
from pathlib import Path

import pytest

from recipe.agent_env.env_service.__main__ import TOKEN_VARIABLE, build_registry, read_token
from recipe.agent_env.env_service.registry import EnvironmentRegistry, load_factory
from tests.env_service.toy_envs import EchoEnv, PlainEnv

ECHO = "tests.env_service.toy_envs:EchoEnv"
PLAIN = "tests.env_service.toy_envs:PlainEnv"


class NoStep:
    def reset(self, seed, options):
        """Only half of the interface."""


@pytest.mark.parametrize(
    ("name", "factory", "match"),
    [
        ("", EchoEnv, "expected text"),
        (" x", EchoEnv, "expected text"),
        ("x", 3, "expected a class"),
        ("x", NoStep, "no method 'step'"),
    ],
)
def test_bad_registration_is_refused(name, factory, match):
    with pytest.raises(ValueError, match=match):
        EnvironmentRegistry().register(name, factory)


def test_name_is_taken_once():
    registry = EnvironmentRegistry({"x": EchoEnv})
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("x", PlainEnv)


def test_registry_travels_to_another_process():
    copy = pickle.loads(pickle.dumps(EnvironmentRegistry({"x": EchoEnv})))
    assert copy.names == ["x"] and isinstance(copy.create("x", {}), EchoEnv)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("nonsense", "expected package.module:Class"),
        ("no_such_module:X", "start from the folder"),
        ("tests.env_service.toy_envs:Nobody", "has no 'Nobody'"),
    ],
)
def test_bad_spec_is_refused_with_the_reason(spec, match):
    with pytest.raises(ValueError, match=match):
        load_factory(spec)


@pytest.mark.parametrize(
    ("specs", "names", "expected"),
    [
        ([ECHO], [], ["EchoEnv"]),
        ([ECHO], ["echo-v0"], ["echo-v0"]),
        ([f"a={ECHO}", PLAIN], ["b"], ["a", "b"]),
        ([ECHO, PLAIN], ["a", "b"], ["a", "b"]),
    ],
)
def test_command_line_names_environments(specs, names, expected):
    assert build_registry(specs, names).names == expected


def test_left_over_name_is_an_error():
    with pytest.raises(ValueError, match="no environment left"):
        build_registry([ECHO], ["a", "b"])


def test_token_comes_from_file_or_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "from-variable")
    assert read_token(None) == "from-variable"
    (tmp_path / "token").write_text("from-file\n")
    assert read_token(tmp_path / "token") == "from-file"


def test_missing_or_empty_token_file_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="No such file"):
        read_token(tmp_path / "nothing")
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(ValueError, match="empty"):
        read_token(tmp_path / "token")
