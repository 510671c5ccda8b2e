# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Run the real service on a loopback port, in a thread or as a process, and talk to it.

Owns: starting and stopping it for tests. Refuses to know: what is tested.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests
import uvicorn

from recipe.agent_env.env_service.app import create_app
from recipe.agent_env.env_service.registry import EnvironmentRegistry
from recipe.agent_env.env_service.settings import ServiceSettings

REPOSITORY = Path(__file__).parents[2]


class Service:
    """A running service and a plain HTTP client for it."""

    def __init__(self, url: str, backend: Any = None) -> None:
        self.url = url
        self.backend = backend
        self.http = requests.Session()

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """Send anything."""
        return self.http.request(method, self.url + path, timeout=30, **options)

    def initialize(self, env_name: str = "echo", seed: int | None = 0, **env_kwargs: Any) -> requests.Response:
        """Send `initialize`."""
        body = {"env_name": env_name, "seed": seed, "env_kwargs": env_kwargs}
        return self.request("POST", "/api/environment/initialize", json=body)

    def open(self, env_name: str = "echo", seed: int | None = 0, **env_kwargs: Any) -> str:
        """Open an environment and return its id."""
        answer = self.initialize(env_name, seed, **env_kwargs)
        assert answer.status_code == 200, answer.text
        return answer.json()["env_id"]

    def post(self, env_id: str, operation: str, **options: Any) -> requests.Response:
        """Send a POST of a session."""
        return self.request("POST", f"/api/environment/{env_id}/{operation}", **options)

    def get(self, env_id: str, operation: str) -> requests.Response:
        """Send a GET of a session."""
        return self.request("GET", f"/api/environment/{env_id}/{operation}")

    def step(self, env_id: str, action: dict[str, Any] | None = None, index: int | None = None) -> requests.Response:
        """Send a step; by default a message without calls."""
        headers = {} if index is None else {"X-Env-Step-Index": str(index)}
        return self.post(env_id, "step", json={"action": action or say("hello")}, headers=headers)

    def close(self, env_id: str) -> requests.Response:
        """Send `close`."""
        return self.post(env_id, "close")

    def stats(self) -> dict[str, Any]:
        """The `/stats` object."""
        return self.request("GET", "/stats").json()

    def wait_for(self, is_true: Callable[[dict[str, Any]], bool], timeout_s: float = 30.0) -> dict[str, Any]:
        """Poll `/stats` until `is_true` of it."""
        deadline = time.monotonic() + timeout_s
        while not is_true(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        return stats


def say(text: str) -> dict[str, Any]:
    """An action without calls."""
    return {"role": "assistant", "content": text, "tool_calls": []}


def call(name: str, arguments: dict[str, Any] | None = None, call_id: str = "call_0") -> dict[str, Any]:
    """An action with one call."""
    function = {"name": name, "arguments": json.dumps(arguments or {})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


@contextlib.contextmanager
def serve(environments: dict[str, Callable[..., Any]], **settings: Any) -> Iterator[Service]:
    """Run the service in a thread of this process."""
    app = create_app(EnvironmentRegistry(environments), ServiceSettings(**settings))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    service = Service(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.backend)
    try:
        while not server.started:
            assert thread.is_alive(), "the service did not start"
            time.sleep(0.005)
        yield service
    finally:
        service.http.close()
        server.should_exit = True
        thread.join()


class Process:
    """The service as its command line starts it."""

    def __init__(self, popen: "subprocess.Popen[str]", service: Service, first_line: str) -> None:
        self.popen = popen
        self.service = service
        self.first_line = first_line

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        self.popen.send_signal(number)
        return self.popen.wait(timeout=30)


@contextlib.contextmanager
def serve_process(*arguments: str, command: list[str] | None = None, **environment: str) -> Iterator[Process]:
    """Run the service as a process of its own, on a free port."""
    command = command or [sys.executable, "-m", "recipe.agent_env.env_service"]
    popen = subprocess.Popen(
        [*command, *arguments, "--port", "0"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert popen.stdout is not None and popen.stderr is not None
        line = popen.stdout.readline()
        assert "http://" in line, popen.stderr.read()
        url = line.split(" at ")[1].split()[0]
        yield Process(popen, Service(url), line)
    finally:
        if popen.poll() is None:
            popen.terminate()
        if popen.stdout is not None and not popen.stdout.closed:
            popen.communicate(timeout=30)
