# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python -m recipe.agent_env.play`: a person plays an environment of the service in the terminal.

Owns what may be typed and how an episode is shown. The calls are the client's, as a policy's would be.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipe.agent_env.env_client import EnvClient, EnvError, EnvSession, Message
from recipe.agent_env.tools.service_arguments import add_service_arguments, client_config

_EXAMPLES = """\
examples:
  python -m recipe.agent_env.play sokoban-v0
  python -m recipe.agent_env.play sokoban-v0 --seed 7 --env-kwargs '{"max_steps": 30}' --env-url http://localhost:8001
  python -m recipe.agent_env.play --data data/sokoban/test.parquet --row 3
  printf 'push_up\\npush_left\\n' | python -m recipe.agent_env.play sokoban-v0

what to type:
  push_up                                  a tool by name
  move direction=up steps=2                with arguments; each is read as JSON, else as text
  move {"direction": "up"}                 the same as JSON
  {"name": "move", "arguments": {...}}     a call as models write it
  push_up; push_left                       several calls in one turn
  anything else                            a plain message
  :tools  :prompt  :reset  :say TEXT  :help  :quit
"""

_HELP = _EXAMPLES.partition("what to type:\n")[2]


class BadInputError(ValueError):
    """The person's line cannot be sent; the text says why."""


def read_action(line: str, tools_schema: list[dict[str, Any]]) -> Message:
    """What a person typed as an assistant message.

    Args:
        line: One line, not empty.
        tools_schema: Tools of the environment; only their names make a line a call.

    Raises:
        BadInputError: It looks like a call but cannot be read as one.
    """
    names = {str(tool.get("function", tool).get("name")) for tool in tools_schema}
    parts = [part.strip() for part in _split_calls(line)]
    calls = [_read_call(part, names) for part in parts]
    if not all(calls):
        if any(calls):
            raise BadInputError("some of these are calls and some are not; send the text with :say TEXT")
        return {"role": "assistant", "content": line, "tool_calls": []}
    wire_calls = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(call for call in calls if call is not None)
    ]
    return {"role": "assistant", "content": "", "tool_calls": wire_calls}


def _split_calls(line: str) -> list[str]:
    """Parts between semicolons that stand outside quotes and braces."""
    parts, depth, is_quoted, start = [], 0, False, 0
    for i, letter in enumerate(line):
        if letter == '"' and (i == 0 or line[i - 1] != "\\"):
            is_quoted = not is_quoted
        elif not is_quoted and letter in "{[":
            depth += 1
        elif not is_quoted and letter in "}]":
            depth -= 1
        elif letter == ";" and depth <= 0 and not is_quoted:
            parts.append(line[start:i])
            start = i + 1
    return [part for part in [*parts, line[start:]] if part.strip()] or [line]


def _read_call(part: str, names: set[str]) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments, or None where the text is no call."""
    if part.startswith("{"):
        try:
            call = json.loads(part)
        except ValueError as exc:
            raise BadInputError(f"this is no JSON: {exc}") from exc
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadInputError('a call as JSON is {"name": "...", "arguments": {...}}')
        return call["name"], _object(call.get("arguments") or {})
    name, _, rest = part.partition(" ")
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        if close:
            raise BadInputError(f"there is no tool {name}; {close[0]}? Text is sent with :say TEXT")
        return None
    rest = rest.strip()
    if rest.startswith("{"):
        try:
            return name, _object(json.loads(rest))
        except ValueError as exc:
            raise BadInputError(f"the arguments of {name} are no JSON object: {exc}") from exc
    pairs = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', rest)
    if rest and re.sub(r'\w+=("(?:[^"\\]|\\.)*"|\S+)', "", rest).strip():
        raise BadInputError(f"write the arguments of {name} as key=value or as JSON; send text with :say TEXT")
    return name, {key: _json_or_text(value) for key, value in pairs}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadInputError(f"arguments are a JSON object, not {value!r}")
    return value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Game:
    """One episode in the terminal.

    Args:
        session: Open environment.
        console: Where to show it.
    """

    def __init__(self, session: EnvSession, console: Console):
        self._session = session
        self._console = console
        self.total = 0.0
        """Rewards so far."""
        self.num_turns = 0
        """Steps taken."""
        self.is_over = session.is_terminated
        """Whether the environment ended the episode."""

    def show_start(self) -> None:
        """The task, the tools and the first observation."""
        self.show_prompt()
        self.show_tools()
        self._show_messages(self._session.observation)
        if self.is_over:
            self._console.print("[yellow]The episode is over before its first turn.[/]")

    def show_prompt(self) -> None:
        """The system text."""
        self._console.rule("task", style="dim", align="left")
        self._console.print(escape(self._session.task_prompt or "(no task prompt)"), highlight=False)

    def show_tools(self) -> None:
        """One line per tool."""
        table = Table("tool", "arguments", "", box=None, padding=(0, 3, 0, 0), header_style="dim")
        for tool in self._session.tools_schema:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {}
            required = parameters.get("required") or []
            arguments = ", ".join(
                f"{name}{'' if name in required else '?'}: {_kind(schema)}"
                for name, schema in (parameters.get("properties") or {}).items()
            )
            table.add_row(
                f"[bold]{escape(str(function.get('name')))}[/]",
                escape(arguments),
                escape(str(function.get("description", ""))),
            )
        self._console.print(table if self._session.tools_schema else "[dim]no tools: type text[/]")

    def play(self, line: str) -> None:
        """One line of a person that is no command.

        Raises:
            BadInputError: The line cannot be sent, or a call does not fit its schema.
            EnvError: The service failed.
        """
        action = read_action(line, self._session.tools_schema)
        problem = self._session.check_tool_calls(action)
        if problem is not None:
            raise BadInputError(problem)
        if len(action["tool_calls"]) > 1 and not self._session.allow_parallel_tool_call:
            raise BadInputError("this environment takes one call per turn")
        self._send(action)

    def say(self, text: str) -> None:
        """Send text without a call."""
        self._send({"role": "assistant", "content": text, "tool_calls": []})

    def reset(self, seed: int | None) -> None:
        """Start over."""
        self._session.reset(seed=seed)
        self.total, self.num_turns, self.is_over = 0.0, 0, self._session.is_terminated
        self.show_start()

    def _send(self, action: Message) -> None:
        result = self._session.step(action)
        self.total += result.reward
        self.num_turns += 1
        self.is_over = result.terminated or result.truncated
        self._show_messages(result.observation)
        colour = "green" if result.reward > 0 else "red" if result.reward < 0 else "dim"
        self._console.print(f"[{colour}]reward {result.reward:+g}[/]  [dim]total {self.total:+g}[/]", highlight=False)
        if result.info:
            self._console.print(f"[dim]info {escape(json.dumps(result.info)[:300])}[/]", highlight=False)
        if self.is_over:
            how = "terminated" if result.terminated else "truncated"
            self._console.print(f"[bold]{how} after {self.num_turns} turns, return {self.total:+g}[/]", highlight=False)

    def _show_messages(self, messages: list[Message]) -> None:
        for message in messages:
            self._console.rule(escape(message["role"]), style="dim", align="left")
            self._console.print(escape(message["content"]), highlight=False, soft_wrap=True)


def _kind(schema: Any) -> str:
    """A parameter's schema in a few words."""
    if not isinstance(schema, dict):
        return "any"
    if schema.get("enum"):
        return " | ".join(map(str, schema["enum"]))
    return str(schema.get("type", "any"))


def _lines(console: Console) -> Iterator[str]:
    """What is typed, or piped in, until its end."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = console.input("[bold cyan]> [/]" if is_terminal else "").strip()
        except EOFError:
            return
        if line:
            if not is_terminal:
                console.print(f"[bold cyan]> {escape(line)}[/]", highlight=False)
            yield line


def run(session: EnvSession, console: Console, seed: int | None) -> None:
    """Play until the person leaves.

    Raises:
        EnvError: The service failed.
    """
    game = Game(session, console)
    game.show_start()
    console.print("[dim]:help says what can be typed[/]")
    for line in _lines(console):
        command, _, rest = line.partition(" ")
        try:
            if command in (":quit", ":q", ":exit"):
                return
            elif command == ":tools":
                game.show_tools()
            elif command == ":prompt":
                game.show_prompt()
            elif command == ":help":
                console.print(escape(_HELP), highlight=False)
            elif command == ":reset":
                game.reset(int(rest) if rest.strip() else seed)
            elif game.is_over:
                console.print("[yellow]The episode is over; :reset starts again, :quit leaves.[/]")
            elif command == ":say":
                game.say(rest)
            elif line.startswith(":"):
                console.print(f"[yellow]{escape(command)} is no command; :help lists them.[/]")
            else:
                game.play(line)
        except (BadInputError, ValueError) as exc:
            console.print(f"[yellow]{escape(str(exc))}[/]", highlight=False)


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.agent_env.play",
        description="Play an environment of the service yourself, through the client that training uses.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("env_name", nargs="?", help="environment's name at the service")
    parser.add_argument("--seed", type=int, help="seed of its start; by default the service's choice")
    parser.add_argument("--env-kwargs", default="{}", metavar="JSON", help="its options, a JSON object")
    parser.add_argument("--data", metavar="FILE", help="play a row of this data file instead")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="which row, counted from 0 (%(default)s)")
    add_service_arguments(parser)
    return parser


def _what_to_play(args: argparse.Namespace) -> tuple[str, int | None, Any]:
    """Name, seed and options.

    Raises:
        ValueError: Neither a name nor a data file, or a row that is not there.
    """
    if args.data is None:
        if args.env_name is None:
            raise ValueError("name an environment, or a data file with --data")
        return args.env_name, args.seed, _object(_json_or_text(args.env_kwargs))
    from recipe.agent_env.agent_dataset import AgentDataset

    dataset = AgentDataset(args.data)
    if not 0 <= args.row < len(dataset):
        raise ValueError(f"--row {args.row}: {args.data} has rows 0 to {len(dataset) - 1}")
    spec = dataset.spec(args.row)
    return spec.env_name, spec.seed, spec.env_kwargs


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, 1 when the service failed, 2 for wrong arguments.
    """
    args = build_parser().parse_args(arguments)
    console = Console()
    try:
        env_name, seed, env_kwargs = _what_to_play(args)
        config = client_config(args)
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    try:
        with EnvClient(config) as client:
            run(client.open(env_name=env_name, seed=seed, env_kwargs=env_kwargs), console, seed)
    except EnvError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
