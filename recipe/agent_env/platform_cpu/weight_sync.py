# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sending weights from the trainer to vLLM with a time limit, and with the receiver's own error when it fails.

verl's sender blocks in ZeroMQ until the receiver answers; a receiver that raised or hangs leaves the run waiting for
ever. Here every wait of the sender also watches the call that runs the receiver. Owns the watching; refuses to know
what the receiver does with the weights. Nothing in it is particular to the CPU.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import shared_memory
from typing import Any

import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

DEFAULT_TIMEOUT_S = 300.0
TIMEOUT_KEY = "weight_sync_timeout_s"

# How long one look at the socket lasts before the receiver is looked at again, in milliseconds.
_POLL_MS = 100


class WeightSyncError(RuntimeError):
    """The rollout engine did not take the trainer's weights; going on would sample from stale ones."""


class _WatchedSocket:
    """A REQ socket whose waits end when the receiver fails or the deadline passes."""

    def __init__(self, socket: zmq.Socket, check_receiver: Callable[[], None], deadline: "Deadline"):
        self.first_payload: Any = None
        self._socket = socket
        self._check_receiver = check_receiver
        self._deadline = deadline

    def send_pyobj(self, payload: Any) -> None:
        """Send once a receiver is connected; a REQ socket without a peer would block."""
        if self.first_payload is None:
            self.first_payload = payload
        self._wait(zmq.POLLOUT, "connect")
        self._socket.send_pyobj(payload)

    def recv(self) -> bytes:
        """Return the receiver's acknowledgement."""
        self._wait(zmq.POLLIN, "acknowledge a bucket of weights")
        return self._socket.recv()

    def bind(self, address: str) -> None:
        """Listen at `address`."""
        self._socket.bind(address)

    def close(self) -> None:
        """Close at once: what was not sent by now has no reader."""
        self._socket.close(linger=0)

    def _wait(self, event: int, what: str) -> None:
        while not self._socket.poll(_POLL_MS, event):
            if self._check_receiver_unless(event):
                return
            self._deadline.check(what)

    def _check_receiver_unless(self, event: int) -> bool:
        """Raise if the receiver is gone; True if what was waited for came in the meantime."""
        try:
            self._check_receiver()
        except WeightSyncError:
            # The receiver may have answered and finished between the two looks.
            if self._socket.poll(0, event):
                return True
            raise
        return False


class Deadline:
    """One time limit over all waits of one weight update."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raise WeightSyncError when the time is over; `what` names what was waited for."""
        if self.remaining_s() == 0.0:
            raise WeightSyncError(
                f"weight sync: the rollout engine did not {what} within {self.timeout_s:g} s; see the engine's log, "
                f"or raise actor_rollout_ref.rollout.custom.{TIMEOUT_KEY} for a slow machine"
            )


class WatchedWeightSender(BucketedWeightSender):
    """verl's bucketed sender over a socket that gives up with a reason."""

    def __init__(self, *, receiver: Future | None, deadline: Deadline, **kwargs: Any):
        """Take what `BucketedWeightSender` takes, and what to watch.

        Args:
            receiver: Completes when the receiving call ends; None when this rank has no receiver of its own.
            deadline: Shared by all waits.
            **kwargs: `zmq_handle`, `bucket_size_mb`, `use_shm`.
        """
        super().__init__(**kwargs)
        self._receiver = receiver
        self._deadline = deadline

    def _init_socket(self) -> None:
        super()._init_socket()
        socket: Any = self.socket
        self.socket: Any = _WatchedSocket(socket, self._check_receiver, self._deadline)

    def _cleanup(self) -> None:
        """Also remove a buffer whose announcement nobody answered: verl takes note of it only after the answer."""
        announced = self.socket.first_payload if self.socket is not None and self.shm is None else None
        super()._cleanup()
        if self.use_shm and announced is not None:
            segment = shared_memory.SharedMemory(name=announced["name"])
            segment.close()
            segment.unlink()

    def _check_receiver(self) -> None:
        if self._receiver is None or not self._receiver.done():
            return
        error = self._receiver.exception()
        if error is None:
            raise WeightSyncError("weight sync: the rollout engine stopped receiving before the last bucket was sent")
        raise WeightSyncError(f"weight sync: the rollout engine failed to load them: {_reason(error)}") from error


class WatchedServerAdapter(ServerAdapter):
    """verl's client of the vLLM server, with a time limit on weight updates."""

    @property
    def timeout_s(self) -> float:
        """Seconds one weight update may take, `actor_rollout_ref.rollout.custom.weight_sync_timeout_s`."""
        return float((self.config.custom or {}).get(TIMEOUT_KEY, DEFAULT_TIMEOUT_S))

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send `(name, tensor)` pairs to the engine and wait until it has taken them over.

        Args:
            weights: Generator of names and full tensors.
            global_steps: Training step of these weights, kept by the server for its replies.
            wire_format: `named_tensors`; other formats are verl's, without a time limit.
            **kwargs: For the receiver: `peft_config`, `base_sync_done`.

        Raises:
            WeightSyncError: The receiver failed (its error is the cause) or took longer than `timeout_s`.
        """
        if wire_format != "named_tensors":
            return await super().update_weights(weights, global_steps, wire_format, **kwargs)
        deadline = Deadline(self.timeout_s)
        call = await self._execute_method(
            "update_weights_from_ipc", non_block=True, kwargs={**kwargs, "use_shm": self.use_shm}
        )
        receiver = None if call is None else call.future()
        sender = WatchedWeightSender(
            receiver=receiver,
            deadline=deadline,
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
        )
        await sender.async_send_weights(weights)
        if receiver is not None:
            await self._finish(asyncio.wrap_future(receiver), deadline, "take over the weights")
        if self._has_server:
            await self._finish(self.server_handle.clear_kv_cache.remote(), deadline, "clear its caches")
            if global_steps is not None:
                await self._finish(self.server_handle.set_global_steps.remote(global_steps), deadline, "note the step")

    async def _finish(self, awaitable: Any, deadline: Deadline, what: str) -> None:
        try:
            await asyncio.wait_for(awaitable, timeout=deadline.remaining_s())
        except asyncio.TimeoutError:
            deadline.check(what)
            raise
        except Exception as error:
            raise WeightSyncError(f"weight sync: the rollout engine failed to {what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    # A RayTaskError prints the traceback of the other process; its cause is the error itself.
    return str(getattr(error, "cause", None) or error)
