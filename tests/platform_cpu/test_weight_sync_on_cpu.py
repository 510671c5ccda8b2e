# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The watched sender against verl's own receiver, over real sockets and shared memory, without Ray and vLLM."""

import asyncio
import gc
import threading
from concurrent.futures import Future
from multiprocessing import shared_memory

import pytest
import torch
from verl.plugin.platform import platform_manager
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from recipe.agent_env.platform_cpu.platform import PlatformCPU
from recipe.agent_env.platform_cpu.weight_sync import Deadline, WatchedWeightSender, WeightSyncError

WEIGHTS = {f"layer.{i}": torch.full((64, 1024), float(i)) for i in range(10)}


# A failed transfer leaves verl's buffer in the frames of its traceback, where it cannot be closed in order.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def cpu_platform(monkeypatch):
    monkeypatch.setattr(platform_manager, "_current_platform", PlatformCPU())
    yield
    gc.collect()


@pytest.fixture
def handle(tmp_path):
    return f"ipc://{tmp_path}/weights.sock"


def send(handle, receiver, timeout_s=60.0):
    """Send WEIGHTS in buckets of 1 MB."""
    sender = WatchedWeightSender(
        receiver=receiver, deadline=Deadline(timeout_s), zmq_handle=handle, bucket_size_mb=1, use_shm=True
    )
    asyncio.run(sender.async_send_weights(iter(WEIGHTS.items())))


def start_receiver(handle, on_bucket):
    """Receive in a thread; the future completes as the receiving call does."""
    future: Future = Future()

    def receive():
        try:
            receiver = BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
            future.set_result(receiver.receive_weights(on_bucket))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=receive, daemon=True).start()
    return future


def test_all_weights_arrive_in_several_buckets(handle):
    received, lasts = {}, []

    def keep(bucket, is_last):
        received.update((name, tensor.clone()) for name, tensor in bucket)
        lasts.append(is_last)

    future = start_receiver(handle, keep)
    send(handle, future)
    future.result(timeout=30)
    assert received.keys() == WEIGHTS.keys() and all(torch.equal(received[name], WEIGHTS[name]) for name in WEIGHTS)
    assert len(lasts) > 1 and lasts[-1] and not any(lasts[:-1])


def test_a_receiver_that_failed_before_it_connected_is_reported(handle):
    future: Future = Future()
    future.set_exception(ArithmeticError("no room for the weights"))
    with pytest.raises(WeightSyncError, match="no room for the weights") as caught:
        send(handle, future)
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_a_receiver_that_fails_in_the_middle_is_reported(handle):
    """verl's receiver raises once more while it cleans up; the first error stays in the chain."""

    def fail(bucket, is_last):
        raise ArithmeticError("shape mismatch in layer.0")

    with pytest.raises(WeightSyncError, match="failed to load them") as caught:
        send(handle, start_receiver(handle, fail))
    causes = (caught.value.__cause__, caught.value.__cause__.__context__)
    assert any(isinstance(cause, ArithmeticError) for cause in causes)


def test_a_receiver_that_ends_early_without_error_is_reported(handle):
    future: Future = Future()
    future.set_result(None)
    with pytest.raises(WeightSyncError, match="stopped receiving before the last bucket"):
        send(handle, future)


def test_a_receiver_that_never_connects_is_given_up(handle):
    with pytest.raises(WeightSyncError, match="did not connect within 0.5 s; .*weight_sync_timeout_s"):
        send(handle, Future(), timeout_s=0.5)


def test_a_receiver_that_hangs_in_the_middle_is_given_up(handle):
    released = threading.Event()
    future = start_receiver(handle, lambda bucket, is_last: released.wait(60))
    with pytest.raises(WeightSyncError, match="did not acknowledge a bucket of weights within 4 s"):
        send(handle, future, timeout_s=4.0)
    released.set()


@pytest.mark.parametrize("receiver", ["absent", "broken"])
def test_a_failed_sender_leaves_neither_socket_nor_shared_memory(handle, tmp_path, monkeypatch, receiver):
    """verl's sender forgets a buffer whose announcement was never answered."""
    names = []
    create = bucketed_weight_transfer.create_shared_memory

    def create_and_note(size, name):
        names.append(name)
        return create(size, name)

    def fail(bucket, is_last):
        raise ArithmeticError

    monkeypatch.setattr(bucketed_weight_transfer, "create_shared_memory", create_and_note)
    future = Future() if receiver == "absent" else start_receiver(handle, fail)
    with pytest.raises(WeightSyncError):
        send(handle, future, timeout_s=0.2 if receiver == "absent" else 60.0)
    assert not (tmp_path / "weights.sock").exists()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=names[0])
