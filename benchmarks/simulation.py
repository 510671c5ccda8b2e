# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An inference engine and an environment service that only take time, and a clock that skips the waiting.

Owns the workload (how long every reply and every environment call takes, fixed by a seed, so that all sides of a
comparison meet the same delays), the engine, the service on a loopback port, and the event loop that makes minutes of
waiting pass at once. Knows nothing of who plays the episodes.
"""

import asyncio
import json
import resource
import selectors
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import numpy as np

_T = TypeVar("_T")

TASK_PROMPT = "You push boxes onto targets on a grid. Call move with a direction on every turn until all are in place."
MOVE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move one step.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": ["up", "down", "left", "right"]}},
            "required": ["direction"],
        },
    },
}
CALL_TEXT = '<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call><|im_end|>'
BOARD = "######\n#_.__#\n#_$__#\n#_@__#\n#____#\n######"
THOUGHT = (
    "The box stands one field below its target and I stand right below the box, so one push upwards puts it there. "
    "Before I push I check that no wall is in the way and that the box can still be reached from the other side. "
)


# ---- the clock -------------------------------------------------------------------------------------------------------


class _SkippingSelector(selectors.DefaultSelector):
    """Reports input that is there; where a selector would sleep, moves the clock on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0
        self.num_thread_calls = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.num_thread_calls:  # a thread works for the loop: its processor time moves the clock
            return super().select(0.0005)
        if timeout is None:
            return super().select(None)
        self.skipped_s += timeout
        return []


class SkippingEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is this process's processor time plus all the time that it would have slept.

    A sleep costs nothing, while Python that runs holds everything up as it does in life. Since only processor time
    counts, other load on the machine hardly shows. Both ends of every connection must live on this loop.
    """

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds on the clock."""
        return time.process_time() + self._skipping.skipped_s

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """As in any loop; the clock does not skip while the thread works."""
        future = super().run_in_executor(executor, func, *args)
        self._skipping.num_thread_calls += 1
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, future: "asyncio.Future[Any]") -> None:
        self._skipping.num_thread_calls -= 1


def run_timed(work: Callable[[], Awaitable[_T]], *, real_clock: bool = False) -> tuple[float, float, _T]:
    """Run a coroutine on a loop of its own.

    Args:
        work: Makes the coroutine.
        real_clock: Sleep for real, to check the other clock.

    Returns:
        elapsed_s: By the loop's clock.
        cpu_s: Processor time of the process.
        result: What the coroutine returned.
    """
    loop = asyncio.SelectorEventLoop() if real_clock else SkippingEventLoop()
    asyncio.set_event_loop(loop)
    try:
        started, cpu_started = loop.time(), time.process_time()
        result = loop.run_until_complete(work())
        elapsed_s, cpu_s = loop.time() - started, time.process_time() - cpu_started
        loop.run_until_complete(loop.shutdown_default_executor())
        return elapsed_s, cpu_s, result
    finally:
        asyncio.set_event_loop(None)
        loop.close()


# ---- the workload ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """How one episode will go, whoever plays it."""

    reply_lengths: list[int]
    """Tokens of each turn's reply."""
    step_s: list[float]
    """Duration of each environment step, in seconds."""
    start_s: float
    """Duration of the environment's start, in seconds."""

    @property
    def num_turns(self) -> int:
        """Turns until the environment says done."""
        return len(self.reply_lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A batch of episodes and the engine that plays them."""

    plans: list[EpisodePlan]
    """One per episode."""
    token_s: float = 0.01
    """Seconds per sampled token of one sequence."""
    prefill_s: float = 0.02
    """Seconds until the first token."""
    concurrency: int = 256
    """Sequences that the engine decodes at once."""

    def generate_s(self, num_tokens: int) -> float:
        """Duration of one reply once the engine has taken it."""
        return self.prefill_s + self.token_s * num_tokens

    def engine_s(self, plan: EpisodePlan) -> float:
        """Engine time of one episode."""
        return sum(self.generate_s(n) for n in plan.reply_lengths)

    def bound_s(self) -> float:
        """No schedule can be faster: the longest single episode, or the engine's work over its concurrency."""
        longest = max(plan.start_s + self.engine_s(plan) + sum(plan.step_s) for plan in self.plans)
        return max(longest, sum(self.engine_s(plan) for plan in self.plans) / self.concurrency)


def make_workload(
    num_episodes: int, *, seed: int, max_turn: int = 10, start_median_s: float = 0.1, step_median_s: float = 0.05
) -> Workload:
    """Heavy-tailed lengths and delays.

    Reply lengths are lognormal (median 60 tokens, sigma 0.7, 24 to 512), environment delays lognormal (sigma 1, at most
    5 s), and an episode takes 3 to `max_turn` turns.
    """
    rng = np.random.default_rng(seed)

    def delays(median_s: float, size: int) -> list[float]:
        return np.minimum(rng.lognormal(np.log(median_s), 1.0, size), 5.0).tolist()

    plans = []
    for _ in range(num_episodes):
        num_turns = int(rng.integers(min(3, max_turn), max_turn + 1))
        lengths = np.clip(rng.lognormal(np.log(60), 0.7, num_turns), 24, 512).astype(int).tolist()
        plans.append(
            EpisodePlan(
                reply_lengths=lengths,
                step_s=delays(step_median_s, num_turns),
                start_s=delays(start_median_s, 1)[0],
            )
        )
    return Workload(plans=plans)


class ReplyMaker:
    """Replies of any length: thought cut to size, then a canonical tool call.

    Args:
        encode: Text to token ids, control tokens matched.
    """

    def __init__(self, encode: Callable[[str], list[int]]):
        self._call_ids = encode(CALL_TEXT)
        self._thought_ids = encode(THOUGHT * 16)

    def __call__(self, num_tokens: int) -> list[int]:
        """A reply of this many tokens, never fewer than the call needs."""
        return self._thought_ids[: max(0, num_tokens - len(self._call_ids))] + self._call_ids


# ---- the engine ------------------------------------------------------------------------------------------------------


class SimulatedEngine:
    """Takes as long as a server with this many slots would, first come, first served."""

    def __init__(self, workload: Workload, make_reply: ReplyMaker):
        self._workload = workload
        self._make_reply = make_reply
        self._slots = asyncio.Semaphore(workload.concurrency)

    async def reply(self, plan: EpisodePlan, turn: int) -> list[int]:
        """Sample the reply of one turn."""
        ids = self._make_reply(plan.reply_lengths[turn])
        async with self._slots:
            await asyncio.sleep(self._workload.generate_s(plan.reply_lengths[turn]))
        return ids


# ---- connections ---------------------------------------------------------------------------------------------------


def allow_many_connections(count: int) -> None:
    """Raise the limit on open files as far as both ends of so many connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count + 256)), hard))


def open_http(num_connections: int, *, limit_s: float = 300.0) -> aiohttp.ClientSession:
    """A plain aiohttp session that may hold as many connections as there are episodes.

    Args:
        num_connections: Most open ones.
        limit_s: Longest request; the default is aiohttp's own.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=num_connections), timeout=aiohttp.ClientTimeout(total=limit_s)
    )


# ---- the environment service -----------------------------------------------------------------------------------------

_FETCHES: dict[str, dict[str, Any]] = {
    "task-prompt": {"task_prompt": TASK_PROMPT},
    "tools-schema-openai": {"tools_schema": [MOVE_TOOL]},
    "allow-parallel-tool-call": {"allow_parallel_tool_call": False},
}


class SimulatedService:
    """Speaks the environment protocol over real loopback connections, at a few microseconds of processor time a call.

    The seed of `initialize` is the number of the episode in the workload.
    """

    def __init__(self, plans: list[EpisodePlan]):
        self._plans = plans
        self._num_opened = 0
        self._played: dict[str, int] = {}
        self._canned = {name: _http_answer(body) for name, body in _FETCHES.items()}
        self._closed = _http_answer({"message": "closed"})
        self._step_answers = {done: _http_answer(_step_body(done)) for done in (False, True)}
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> "SimulatedService":
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()

    def answer(self, operation: str, env_id: str, body: bytes) -> tuple[float, bytes]:
        """Delay in seconds and the whole HTTP answer of one call."""
        if operation == "step":
            plan = self._plans[int(env_id.split("-")[0])]
            turn = self._played[env_id]
            self._played[env_id] = turn + 1
            return plan.step_s[turn], self._step_answers[turn + 1 == plan.num_turns]
        if operation == "initialize":
            number = json.loads(body)["seed"]
            env_id = f"{number}-{self._num_opened}"
            self._num_opened += 1
            self._played[env_id] = 0
            observation = [{"role": "user", "content": BOARD}]
            start = {"message": "open", "env_id": env_id, "observation": observation, "info": {}}
            return self._plans[number].start_s, _http_answer(start)
        if operation == "close":
            return 0.0, self._closed
        return 0.0, self._canned[operation]


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; requests have a Content-Length or no body."""

    def __init__(self, service: SimulatedService):
        self._service = service
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            place = head.lower().find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            parts = head.split(b" ", 2)[1].decode().split("/")
            delay_s, answer = self._service.answer(parts[-1], parts[-2], body)
            if delay_s > 0:
                asyncio.get_running_loop().call_later(delay_s, self._write, answer)
            else:
                self._write(answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def _http_answer(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


def _step_body(done: bool) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": "call_0", "name": "move", "content": f"You moved.\n{BOARD}"}
    return {"observation": [message], "reward": 1.0 if done else -0.1, "done": done, "truncated": False, "info": {}}
