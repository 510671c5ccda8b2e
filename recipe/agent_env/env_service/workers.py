# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sessions in worker processes, behind one front.

Owns: starting, watching and replacing the processes; which of them holds a session; the frames between them.
Refuses to know: HTTP, and what a request means: bodies pass through unread. Each worker runs an ordinary
`SessionStore`, so every promise about a session holds in it.

A worker that dies takes its sessions along (they answer 410) and is replaced. One that stops answering for longer than
any call may take is killed first. Workers end when the front ends, however that happens: they read its end of a socket.
"""

import asyncio
import logging
import multiprocessing
import pickle
import re
import signal
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from recipe.agent_env.env_service.capacity import CapacityGate
from recipe.agent_env.env_service.counters import Counters, merge
from recipe.agent_env.env_service.errors import ServiceError
from recipe.agent_env.env_service.registry import EnvironmentRegistry
from recipe.agent_env.env_service.sessions import Answer, SessionStore
from recipe.agent_env.env_service.settings import ServiceSettings

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!I")
_START_TIMEOUT_S = 60.0
_SNAPSHOT_INTERVAL_S = 1.0
_RESPAWN_PAUSE_S = 1.0
_PREFIX = re.compile(r"w(\d+)g(\d+)-")


class ProcessBackend:
    """`settings.workers` processes that hold the sessions.

    Args:
        registry: The environments on offer; its factories must be importable by name in another process.
        settings: Limits of the whole service.
    """

    def __init__(self, registry: EnvironmentRegistry, settings: ServiceSettings) -> None:
        self._registry = registry
        self._settings = settings
        self._gate = CapacityGate(settings.max_sessions)
        self._workers: dict[int, Worker] = {}
        self._generations = dict.fromkeys(range(settings.workers), 0)
        self._past = Counters().snapshot()
        self._refused = 0
        self._is_draining = False
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start every worker and wait until it answers.

        Raises:
            RuntimeError: A worker did not come up.
        """
        self._watchers = [asyncio.create_task(self._keep_alive(slot)) for slot in self._generations]
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(self._workers) < self._settings.workers:
            failed = next((task for task in self._watchers if task.done()), None)
            if failed is not None or time.monotonic() > deadline:
                error = failed.exception() if failed is not None else None
                await self.shutdown()
                raise RuntimeError("a worker process of the environment service did not start") from error
            await asyncio.sleep(0.02)

    async def shutdown(self) -> None:
        """Have every worker close its sessions, then end the processes."""
        self._is_draining = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        workers = list(self._workers.values())
        self._workers.clear()
        await asyncio.gather(*(worker.stop(self._settings.close_timeout_s + 1.0) for worker in workers))

    async def call(self, operation: str, env_id: str, body: bytes, step_index: str | None = None) -> Answer:
        """Pass one request to the worker that holds the session; `initialize` goes to the one with the fewest."""
        if operation == "initialize":
            return await self._initialize(body)
        match = _PREFIX.match(env_id)
        slot, generation = (int(match[1]), int(match[2])) if match else (-1, -1)
        worker = self._workers.get(slot)
        if worker is None or worker.generation != generation:
            if 0 <= generation <= self._generations.get(slot, -1):
                if operation == "close":
                    return Answer(body=b'{"message":"already lost with its worker process"}')
                raise ServiceError(410, "session_gone", "the environment is gone: its worker process ended")
            raise ServiceError(404, "unknown_session", f"no environment with id {env_id[:60]!r} is open here")
        return await worker.call(operation, env_id, body, step_index)

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Counters of all workers, past ones included."""
        snapshots = await asyncio.gather(*(worker.fetch_snapshot() for worker in self._workers.values()))
        total = merge([self._past, *snapshots])
        total["counts"]["refused"] += self._refused
        return total, {
            "max_sessions": self._gate.limit,
            "waiting": self._gate.num_waiting,
            "workers": len(self._workers),
        }

    async def _initialize(self, body: bytes) -> Answer:
        if self._is_draining:
            raise ServiceError(503, "shutting_down", "the service is shutting down", self._settings.retry_after_s)
        if not await self._gate.acquire(self._settings.queue_wait_s):
            self._refused += 1
            raise ServiceError(
                503,
                "at_capacity",
                f"{self._gate.limit} environments are open, which is the limit",
                self._settings.retry_after_s,
            )
        worker = min(self._workers.values(), key=lambda candidate: candidate.num_places, default=None)
        if worker is None:
            self._gate.release()
            raise ServiceError(503, "no_worker", "no worker process is up just now", self._settings.retry_after_s)
        worker.num_places += 1
        try:
            return await worker.call("initialize", "", body, None)
        except BaseException:
            worker.give_back_place()
            raise

    async def _keep_alive(self, slot: int) -> None:
        """Run the worker of one slot, and the next one when it has died."""
        while True:
            generation = self._generations[slot]
            try:
                worker = await Worker.start(self._registry, self._settings, slot, generation, self._gate.release)
            except RuntimeError as error:
                if generation == 0:
                    raise
                logger.error("%s; trying again", error)
                await asyncio.sleep(_RESPAWN_PAUSE_S)
                continue
            self._workers[slot] = worker
            await worker.wait_until_dead(self._settings.call_timeout_s + 10.0)
            del self._workers[slot]
            self._generations[slot] += 1
            logger.error("worker %d died with %d sessions; starting another", slot, worker.num_places)
            last = worker.snapshot
            last["counts"]["lost"] += worker.num_places
            self._past = merge([self._past, {**last, "live_by_name": {}}])
            worker.give_back_all_places()
            await asyncio.sleep(_RESPAWN_PAUSE_S)


class Worker:
    """The front's end of one worker process.

    Its socket is closed wherever a process ends. Left to the garbage collector it would be closed in any thread, and a
    uvloop whose sockets are closed from another thread aborts the whole process.
    """

    def __init__(
        self,
        process: BaseProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        generation: int,
        on_place_free: Callable[[], None],
    ) -> None:
        self.generation = generation
        self.num_places = 0
        self.snapshot: dict[str, Any] = Counters().snapshot()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._on_place_free = on_place_free
        self._is_dead = False
        self._last_frame = time.monotonic()
        self._next_id = 1
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read_for_ever())

    @classmethod
    async def start(
        cls,
        registry: EnvironmentRegistry,
        settings: ServiceSettings,
        slot: int,
        generation: int,
        on_place_free: Callable[[], None],
    ) -> "Worker":
        """Start a process and wait for its first sign of life.

        Raises:
            RuntimeError: It ended, or said nothing for a minute.
        """
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=run_worker,
            args=(registry, settings, f"w{slot}g{generation}-", theirs),
            name=f"env-worker-{slot}",
            daemon=False,  # a daemon could not start processes of its own, as some environments do
        )
        await asyncio.to_thread(process.start)
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            await asyncio.wait_for(_read_frame(reader), _START_TIMEOUT_S)
        except BaseException as error:
            process.kill()
            writer.close()
            if isinstance(error, (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError)):
                raise RuntimeError(f"worker {slot} did not start; see its output above") from error
            raise
        return cls(process, reader, writer, generation, on_place_free)

    async def call(self, operation: str, env_id: str, body: bytes, step_index: str | None) -> Answer:
        """Have the worker's store answer.

        Raises:
            ServiceError: What the store raised; or 500 when the worker died meanwhile.
        """
        if self._is_dead:
            raise _worker_died()
        request_id, self._next_id = self._next_id, self._next_id + 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        try:
            _write_frame(self._writer, (request_id, operation, env_id, body, step_index))
            answer = await future
        finally:
            self._pending.pop(request_id, None)
        if isinstance(answer, ServiceError):
            raise answer
        return answer

    async def fetch_snapshot(self) -> dict[str, Any]:
        """The worker's counters now, or its last report when it does not answer at once."""
        try:
            await asyncio.wait_for(self.call("report", "", b"", None), _SNAPSHOT_INTERVAL_S)
        except (asyncio.TimeoutError, ServiceError):
            logger.warning("%s does not report", self._process.name)
        return self.snapshot

    def give_back_place(self) -> None:
        """Count one session less."""
        if not self._is_dead:
            self.num_places -= 1
            self._on_place_free()

    def give_back_all_places(self) -> None:
        """Count no session any more, after the worker's death."""
        for _ in range(self.num_places):
            self._on_place_free()
        self.num_places = 0

    async def wait_until_dead(self, silence_s: float) -> None:
        """Return once the process is gone; kill it when it says nothing for `silence_s` seconds."""
        while not self._reading.done():
            await asyncio.wait({self._reading}, timeout=_SNAPSHOT_INTERVAL_S)
            if time.monotonic() - self._last_frame > silence_s:
                logger.error("%s is silent for %.0f s: killed", self._process.name, silence_s)
                self._process.kill()
        self._process.kill()
        self._writer.close()
        await asyncio.to_thread(self._process.join)

    async def stop(self, timeout_s: float) -> None:
        """Have the worker close its sessions and end; kill it when it does not."""
        try:
            await asyncio.wait_for(self.call("shutdown", "", b"", None), timeout_s)
        except (asyncio.TimeoutError, ServiceError, ConnectionError):
            pass
        self._writer.close()
        await asyncio.to_thread(self._process.join, 1.0)
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self._reading.cancel()

    async def _read_for_ever(self) -> None:
        try:
            while True:
                request_id, payload = await _read_frame(self._reader)
                self._last_frame = time.monotonic()
                if request_id > 0:
                    future = self._pending.get(request_id)
                    if future is not None and not future.done():
                        future.set_result(payload)
                elif payload is None:
                    self.give_back_place()
                else:
                    self.snapshot = payload
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._is_dead = True
            for future in self._pending.values():
                if not future.done():
                    future.set_result(_worker_died())


def _worker_died() -> ServiceError:
    return ServiceError(500, "worker_died", "the worker process of the environment ended; the session is lost")


# ---- the worker's side ---------------------------------------------------------------------------------------------


def run_worker(registry: EnvironmentRegistry, settings: ServiceSettings, id_prefix: str, front: socket.socket) -> None:
    """Main function of a worker process: answer the front's frames until it hangs up."""
    # The front decides when to end; a Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(_serve_front(registry, settings, id_prefix, front))


async def _serve_front(
    registry: EnvironmentRegistry, settings: ServiceSettings, id_prefix: str, front: socket.socket
) -> None:
    reader, writer = await asyncio.open_connection(sock=front)
    store = SessionStore(registry, settings, id_prefix, on_removed=lambda: _write_frame(writer, (0, None)))
    await store.start()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request_id: int, operation: str, env_id: str, body: bytes, step_index: str | None) -> None:
        try:
            if operation == "shutdown":
                await store.shutdown()
                _write_frame(writer, (request_id, Answer(body=b"{}")))
            elif operation == "report":
                _write_frame(writer, (0, store.counters.snapshot()))
                _write_frame(writer, (request_id, Answer(body=b"{}")))
            else:
                _write_frame(writer, (request_id, await store.call(operation, env_id, body, step_index)))
        except ServiceError as error:
            _write_frame(writer, (request_id, error))
        except Exception as error:
            logger.exception("bug in a worker")
            bug = ServiceError(500, "internal_error", f"a bug of the service ({type(error).__name__})")
            _write_frame(writer, (request_id, bug))

    async def report() -> None:
        while True:
            _write_frame(writer, (0, store.counters.snapshot()))
            await asyncio.sleep(_SNAPSHOT_INTERVAL_S)

    reporting = asyncio.create_task(report())
    try:
        while True:
            task = asyncio.create_task(answer(*await _read_frame(reader)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        await store.shutdown()
    finally:
        reporting.cancel()


# ---- frames: length, then a pickled tuple (both ends are this program) ---------------------------------------------


async def _read_frame(reader: asyncio.StreamReader) -> Any:
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return pickle.loads(await reader.readexactly(length))


def _write_frame(writer: asyncio.StreamWriter, content: tuple[Any, ...]) -> None:
    body = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    writer.write(_HEADER.pack(len(body)) + body)
