# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The real client against the real service: what neither can promise alone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from recipe.agent_env.env_client import EnvGoneError, EnvRejectedError
from tests.client.env_client_faces import ACTION, FACES, connect
from tests.env_service.service import Service, serve
from tests.env_service.toy_envs import EchoEnv

both_faces = pytest.mark.parametrize("face", FACES)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve({"echo": EchoEnv}, idle_timeout_s=1.5, max_sessions=64) as running:
        yield running


@contextmanager
def losing_relay(service: Service, steps_to_lose: set[str]) -> Iterator[str]:
    """Forwards every request, but hangs up instead of passing on the answers of the given step indices, once each."""

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name != "Host"}
            answer = requests.request(self.command, service.url + self.path, data=body, headers=headers, timeout=30)
            index = self.headers.get("X-Env-Step-Index")
            if index in steps_to_lose:
                steps_to_lose.discard(index)
                self.close_connection = True
                return
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = forward

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@both_faces
async def test_step_whose_answer_was_lost_is_applied_exactly_once(service, face):
    """P73: the connection breaks after the action was applied; the environment moves by one, not by two."""
    replayed_before = service.stats()["replayed_steps"]
    with losing_relay(service, {"0", "2"}) as url:
        async with connect(face, url) as client:
            session = await client.open(env_name="echo")
            rewards = [(await session.step(ACTION)).reward for _ in range(4)]
            await session.close()
            assert client.stats.retries == 2
    assert rewards == [1.0, 2.0, 3.0, 4.0]
    assert service.stats()["replayed_steps"] == replayed_before + 2


async def test_session_outlives_a_pause_longer_than_the_idle_limit(service):
    """P78: the model may think for longer than the service waits."""
    async with connect("async", service.url) as client:
        session = await client.open(env_name="echo")
        assert (session.capabilities.keepalive, session.capabilities.idle_timeout_s) == (True, 1.5)
        await asyncio.sleep(4)
        assert (await session.step(ACTION)).reward == 1.0


async def test_session_without_keepalive_is_told_that_it_is_gone(service):
    """P78: the sync face sends no keepalive by itself; the error is clear."""
    async with connect("sync", service.url) as client:
        session = await client.open(env_name="echo")
        await asyncio.to_thread(service.wait_for, lambda stats: stats["live_sessions"] == 0)
        with pytest.raises(EnvGoneError, match="no request came for 1.5 s"):
            await session.step(ACTION)


@both_faces
async def test_episodes_beyond_the_services_capacity_all_finish(face):
    """P71: room for 4, 8 episodes."""
    with serve({"echo": EchoEnv}, max_sessions=4, queue_wait_s=0.05) as small:
        async with connect(face, small.url) as client:

            async def play() -> float:
                session = await client.open(env_name="echo")
                try:
                    return (await session.step(ACTION)).reward
                finally:
                    await session.close()

            assert await asyncio.gather(*(play() for _ in range(8))) == [1.0] * 8
        assert small.stats()["live_sessions"] == 0


CROWD = """
import asyncio, signal, sys
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig

async def main(url):
    async with AsyncEnvClient(EnvClientConfig(endpoint=url)) as client:
        sessions = await asyncio.gather(*(client.open(env_name="echo") for _ in range(32)))
        for session in sessions:
            await session.step({"role": "assistant", "content": "up"})
        print("playing", flush=True)
        await asyncio.sleep(600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are started with it ignored
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_client_leaves_no_environment(number):
    """P71: Ctrl-C closes all of them; after SIGKILL the service's idle limit does."""
    with serve({"echo": EchoEnv}, idle_timeout_s=5.0) as service:
        stats = play_until_signal(service, number)
    assert stats["reaped"] == (32 if number == signal.SIGKILL else 0)


def play_until_signal(service: Service, number: signal.Signals) -> dict:
    """Send the signal to a client that holds 32 environments; returns the service's counts once none is left."""
    with subprocess.Popen([sys.executable, "-c", CROWD, service.url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "playing\n"
            assert service.stats()["live_sessions"] == 32
            process.send_signal(number)
            process.wait(timeout=30)
        finally:
            process.kill()
    return service.wait_for(lambda stats: stats["live_sessions"] == 0)


@both_faces
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"env_name": "ecko"}, r"no environment 'ecko'; known: \['echo'\]"),
        ({"env_name": "echo", "env_kwargs": '{"max_steps": 0}'}, "max_steps: expected 1 or more, got 0"),
    ],
)
async def test_refusal_of_the_service_is_passed_on(service, face, arguments, reason):
    async with connect(face, service.url) as client:
        with pytest.raises(EnvRejectedError, match=reason):
            await client.open(**arguments)
