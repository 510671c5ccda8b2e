# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A person plays: what may be typed, and a whole game over loopback."""

import io

import pytest

from recipe.agent_env.play import BadInputError, main, read_action
from tests.mock_env_server import MOVE_TOOL, EnvScript, MockEnvServer, Step

TOOLS = [MOVE_TOOL, {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}]


def calls_of(line):
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in read_action(line, TOOLS)["tool_calls"]
    ]


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        ("wait", [("wait", "{}")]),
        ("move direction=up", [("move", '{"direction": "up"}')]),
        ('move direction="up there" steps=2', [("move", '{"direction": "up there", "steps": 2}')]),
        ('move {"direction": "up"}', [("move", '{"direction": "up"}')]),
        ('{"name": "fly", "arguments": {"to": "a; b"}}', [("fly", '{"to": "a; b"}')]),
        ("wait; move direction=up", [("wait", "{}"), ("move", '{"direction": "up"}')]),
        ("I wait; and think", []),
        ("hello", []),
    ],
)
def test_line_is_read(line, calls):
    assert calls_of(line) == calls
    if not calls:
        assert read_action(line, TOOLS)["content"] == line


@pytest.mark.parametrize(
    "line", ["{broken", '{"arguments": {}}', "move {x", "move up", "wait; hello", "move [1]", "mvoe"]
)
def test_broken_call_is_refused(line):
    with pytest.raises(BadInputError):
        read_action(line, TOOLS)


@pytest.fixture
def server():
    with MockEnvServer() as server:
        server.script("game", EnvScript(steps=[Step(reward=0.5), Step(reward=1.0, done=True)]))
        yield server


def play(monkeypatch, capsys, server, typed, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    status = main(["game", "--seed", "3", "--env-url", server.url, *options])
    return status, capsys.readouterr()


def test_game_is_played_to_its_end(monkeypatch, capsys, server):
    typed = "mvoe\nmove direction=sideways\nmove direction=up\nmove direction=up\nmove direction=up\n:quit\n"
    status, shown = play(monkeypatch, capsys, server, typed)
    assert status == 0
    assert "Reach the goal." in shown.out and "up | down | left | right" in shown.out
    assert "there is no tool mvoe; move?" in shown.out
    assert "does not fit" in shown.out
    assert "terminated after 2 turns" in shown.out
    assert "The episode is over" in shown.out
    assert server.episodes[0].closes == 1 and server.live_count == 0


def test_game_may_start_again(monkeypatch, capsys, server):
    status, shown = play(monkeypatch, capsys, server, ":tools\n:prompt\n:help\n:nothing\n:say hi\n:reset\n")
    assert status == 0
    assert shown.out.count("You stand at the start.") == 2
    assert ":nothing is no command" in shown.out


def test_row_of_a_data_file_is_played(monkeypatch, capsys, server, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"env_name": "game", "seed": 5, "env_kwargs": {}}\n')
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["--data", str(data), "--env-url", server.url]) == 0
    assert main(["--data", str(data), "--row", "1", "--env-url", server.url]) == 2
    assert "has rows 0 to 0" in capsys.readouterr().err


def test_failures_are_said_in_a_line(monkeypatch, capsys, server):
    assert main([]) == 2
    assert main(["game", "--env-kwargs", "[1]"]) == 2
    server.fault("status", call="initialize", status=400)
    status, shown = play(monkeypatch, capsys, server, "")
    assert status == 1
    assert "initialize" in shown.err
