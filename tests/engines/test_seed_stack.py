"""Several seeds in one stack: every seed ends as its run alone, with its own data, weights, noise and decisions."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import (
    LOCAL,
    SHORT_RUN,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_network,
    make_public_images,
    make_short_method,
    make_striped_silo,
    run_rounds,
)
from test_stacked_engine import (
    ALWAYS_EXTENDED,
    OTHER_METHODS,
    PublicLogitsLoss,
    assert_close,
    find_difference,
    make_encoder,
)

from uefl.algorithms import METHODS, centroids
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL, VQFedAvg
from uefl.core.federation import Silo
from uefl.core.kmeans import kmeans_batch
from uefl.engines import serial
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked import two_part_tasks
from uefl.engines.stacked.capture_lock import CAPTURE_LOCK
from uefl.engines.stacked.device_buffers import DeviceBuffers
from uefl.engines.stacked.seed_stack import SeedStack, make_locks, run_together
from uefl.engines.stacked.silo_mapper import SiloMapper
from uefl.engines.stacked.stack_trainer import StackTrainer
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment.rounds import iterate_rounds

SEEDS = (0, 3)
UEFL_METHOD = UEFL(**SHORT_RUN, codebook=ALWAYS_EXTENDED)
METHODS_TO_STACK: dict[str, FedAvg] = {
    "uefl": UEFL_METHOD,
    "uefl, two clients per round": replace(UEFL_METHOD, clients_per_round=2),
    "uefl, stored optimizer state": replace(UEFL_METHOD, local=replace(LOCAL, reset_optimizer=False)),
    "uefl, local batch norm": replace(UEFL_METHOD, batch_norm="local"),
    "uefl, in groups": replace(UEFL_METHOD, group_rounds=2, fine_tuning_epochs=1),
    "vq-fedavg": VQFedAvg(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, extend="none")),
    "centralized": make_short_method(METHODS["centralized"]),
    "centralized with label priors": replace(make_short_method(METHODS["centralized"]), logit_adjustment="local"),
    "loss that reads public images": PublicLogitsLoss(**SHORT_RUN),
    **{name: make_short_method(METHODS[name]) for name in OTHER_METHODS},
}


def make_silos(seed: int) -> list[Silo]:
    """Return silos whose sizes, examples and public images differ by seed."""
    sizes = {"ada": 20 + seed, "bob": 25, "cyd": 18, "dan": 28 - seed}
    silos = [make_striped_silo(n, k, 10 * i + 100 * seed, rotated=i > 1) for i, (n, k) in enumerate(sizes.items())]
    return [replace(silo, public=make_public_images().roll(seed, 0) * (1 + seed / 10)) for silo in silos]


def make_net(method: FedAvg, seed: int) -> Any:
    return make_network(method, seed=seed, encoder_factory=make_encoder)


def run_alone(method: FedAvg, seed: int, device: str = "cpu") -> Any:
    silos = list(method.prepare_silos(make_silos(seed)))
    clients = SerialEngine(silos, make_net(method, seed), seed=seed, dtype=torch.float64, device=device)
    return run_rounds(method, clients)


def run_stacked(method: FedAvg, seeds: tuple[int, ...], **settings: Any) -> dict[int, Any]:
    stack, results = SeedStack(dtype=torch.float64, **settings), {}

    def run_seed(seed: int) -> None:
        clients = stack.open_clients(list(method.prepare_silos(make_silos(seed))), make_net(method, seed), seed)
        results[seed] = run_rounds(method, clients)

    stack.run([partial(run_seed, seed) for seed in seeds])
    return results


def run_in_two_stacks(method: FedAvg, groups: tuple[tuple[int, ...], ...], **settings: Any) -> dict[int, Any]:
    """Run a stack of each group of seeds, all at the same time."""
    locks, results = make_locks(), {}

    def run_seed(stack: SeedStack, seed: int) -> None:
        clients = stack.open_clients(list(method.prepare_silos(make_silos(seed))), make_net(method, seed), seed)
        results[seed] = run_rounds(method, clients)

    stacks = [SeedStack(dtype=torch.float64, locks=locks, own_stream=i > 0, **settings) for i in range(len(groups))]
    run_together([(s, [partial(run_seed, s, seed) for seed in seeds]) for s, seeds in zip(stacks, groups)])
    return results


def assert_equals_runs_alone(method: FedAvg, results: dict[int, Any], device: str = "cpu") -> None:
    for seed, (server, records) in results.items():
        alone, records_alone = run_alone(method, seed, device)
        assert torch.equal(server.access, alone.access)
        assert_close(server.model_state, alone.model_state)
        assert_close(server.method_state, alone.method_state)
        assert [find_difference(a, b) for a, b in zip(records, records_alone, strict=True)] == [""] * len(records)


@pytest.mark.parametrize("name", ["fedavg", "uefl", "ifca", "fedbr"])
def test_seeds_of_two_stacks_at_the_same_time_equal_their_runs_alone(name):
    method = METHODS_TO_STACK[name]
    results = run_in_two_stacks(method, ((0, 3), (4, 7)))
    assert set(results) == {0, 3, 4, 7}
    assert_equals_runs_alone(method, results)


def test_torchs_generators_are_seeded_by_one_thread_at_a_time(monkeypatch):
    """A server of the other stack may draw from them, or seed them, only in its turn, and none captures meanwhile."""
    locks, has_turn = make_locks(), []

    @contextmanager
    def record(_device: torch.device) -> Iterator[None]:
        has_turn.append(locks.turn.locked() and CAPTURE_LOCK.excludes_captures)
        yield

    def run_seed(seed: int) -> None:
        run_rounds(method, stack.open_clients(make_silos(seed), make_net(method, seed), seed))

    method, stack = make_short_method(METHODS["fedbr"]), SeedStack(dtype=torch.float64, locks=locks)
    monkeypatch.setattr(serial, "fork_rng", record)
    stack.run([partial(run_seed, seed) for seed in SEEDS])
    assert has_turn
    assert all(has_turn)


def test_one_seed_of_all_stacks_works_for_later_at_a_time():
    locks, at_work, most = make_locks(), [], []
    stacks = [SeedStack(dtype=torch.float64, locks=locks) for _ in range(2)]

    def work() -> None:
        at_work.append("seed")
        time.sleep(0.02)
        most.append(len(at_work))
        at_work.pop()

    def run_seed(stack: SeedStack, seed: int) -> None:
        run_rounds(method, stack.open_clients(make_silos(seed), make_net(method, seed), seed, work))

    method = make_short_method(FedAvg)
    run_together([(stack, [partial(run_seed, stack, seed) for seed in SEEDS]) for stack in stacks])
    assert len(most) > 8
    assert max(most) == 1


def test_the_bits_do_not_depend_on_which_seed_is_ready_first():
    method, seeds = make_short_method(FedAvg), (0, 3, 4)

    def run_in_order(order: tuple[int, ...]) -> dict[int, Any]:
        stack, results = SeedStack(), {}
        is_open = {seed: threading.Event() for seed in order}

        def run_seed(seed: int) -> None:
            for earlier in order[: order.index(seed)]:
                with stack.yield_turn():
                    assert is_open[earlier].wait(60)
            clients = stack.open_clients(list(method.prepare_silos(make_silos(seed))), make_net(method, seed), seed)
            is_open[seed].set()
            assert clients.number == seeds.index(seed), "its place in the stack"
            results[seed] = run_rounds(method, clients)[0]

        stack.run([partial(run_seed, seed) for seed in seeds])
        return results

    first, second = run_in_order((0, 3, 4)), run_in_order((4, 3, 0))
    for seed in seeds:
        assert have_equal_bits(first[seed].model_state, second[seed].model_state)


def test_an_error_in_one_stack_stops_the_other():
    method, locks, rounds = UEFL_METHOD, make_locks(), []
    stacks = [SeedStack(locks=locks) for _ in range(2)]

    def run_seed(stack: SeedStack, seed: int) -> None:
        for server in iterate_rounds(method, stack.open_clients(make_silos(seed), make_net(method, seed), seed)):
            rounds.append((seed, server.round))
            if seed == 3 and server.round == 1:
                raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        run_together([(s, [partial(run_seed, s, seed)]) for s, seed in zip(stacks, (0, 3))])
    assert (0, method.total_rounds) not in rounds
    assert threading.active_count() == 1


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no signal to a thread")
def test_ctrl_c_waits_for_the_seeds_of_all_stacks():
    """The first stack has ended; a seed of the other one is amid its files."""
    first, second = (SeedStack(locks=locks) for locks in [make_locks()] * 2)
    has_ended, written = threading.Event(), []

    def write_files() -> None:
        with second.yield_turn():
            assert has_ended.wait(20)
            time.sleep(0.3)  # until the first stack has ended, too
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)
            written.append("checkpoint")

    with pytest.raises(KeyboardInterrupt):
        run_together([(first, [has_ended.set]), (second, [write_files])])
    assert written == ["checkpoint"]
    assert threading.active_count() == 1


@pytest.mark.parametrize("name", METHODS_TO_STACK)
def test_each_seed_equals_its_run_alone(name):
    method = METHODS_TO_STACK[name]
    assert_equals_runs_alone(method, run_stacked(method, SEEDS))


@pytest.mark.parametrize("name", ["fedavg", "fccl"])
def test_public_images_are_selected_only_where_a_method_reads_them(name, monkeypatch):
    """FCCL reads them at the end of the training, no other method does; every seed has a set of its own."""
    method, calls = make_short_method(METHODS[name]), []
    select, finish = SiloMapper.select_public_images, type(method).finish_training
    monkeypatch.setattr(SiloMapper, "select_public_images", lambda *a: calls.append("select") or select(*a))
    monkeypatch.setattr(type(method), "finish_training", lambda *a, **kw: calls.append("finish") or finish(*a, **kw))
    run_stacked(method, SEEDS)
    finished = calls.count("finish")
    assert finished > method.total_rounds
    assert calls == (["finish", "select"] if name == "fccl" else ["finish"]) * finished


def test_compiled_steps_read_the_public_images_of_the_seed_that_trains(monkeypatch):
    """One silo at a time: the code that was compiled for a silo of one seed also trains those of the others."""
    monkeypatch.setattr("uefl.engines.stacked.compiler.COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    method = METHODS_TO_STACK["loss that reads public images"]
    assert_equals_runs_alone(method, run_stacked(method, SEEDS, max_stack_size=1, use_compiler=True))


def test_silos_of_all_seeds_are_clustered_at_once_but_in_bounded_memory(monkeypatch):
    """Two seeds of four silos: together, then with room for the features of about two silos."""
    sizes: list[int] = []
    monkeypatch.setattr(centroids, "kmeans_batch", lambda p, k: sizes.append(len(p)) or kmeans_batch(p, k))
    together = run_stacked(UEFL_METHOD, SEEDS)
    assert sizes[0] == 8, "the initial codebook"
    # Images of the largest silo, height and width, channels and the owners of two segments, bytes of a number.
    num_bytes = 2 * 28 * 2 * 2 * (8 + 2) * 8
    monkeypatch.setattr(two_part_tasks, "MAX_PREPARED_BYTES", num_bytes + 100)
    sizes.clear()
    in_parts = run_stacked(UEFL_METHOD, SEEDS)
    assert sum(sizes[:4]) == 8
    assert max(sizes) <= 3
    for seed in SEEDS:
        assert_close(in_parts[seed][0].model_state, together[seed][0].model_state)


def test_silos_of_one_server_that_are_encoded_together_end_as_one_by_one(monkeypatch):
    """As on a GPU, where a run alone also stacks its silos for K-means."""
    monkeypatch.setattr(StackedEngine, "_can_stack_full_splits", lambda _self, _broadcasts: True)
    clients = StackedEngine(make_silos(3), make_net(UEFL_METHOD, 3), seed=3, dtype=torch.float64)
    (server, records), (alone, records_alone) = run_rounds(UEFL_METHOD, clients), run_alone(UEFL_METHOD, 3)
    assert torch.equal(server.access, alone.access)
    assert_close(server.model_state, alone.model_state)
    assert [find_difference(a, b) for a, b in zip(records, records_alone, strict=True)] == [""] * len(records)


def test_a_seed_behind_the_others_catches_up_with_the_same_result():
    """A resumed seed starts in another round; the stack serves the seed that is behind first."""
    method, stack, servers = UEFL_METHOD, SeedStack(dtype=torch.float64), {}

    def run_seed(seed: int, first_rounds: int) -> None:
        net = make_net(method, seed)
        clients = stack.open_clients(make_silos(seed), net, seed)
        server = None
        if first_rounds:
            alone = SerialEngine(make_silos(seed), net, seed=seed, dtype=torch.float64)
            *_, server = iterate_rounds(method, alone, num_rounds=first_rounds)
            clients.client_states = alone.client_states
        *_, servers[seed] = iterate_rounds(method, clients, server)

    stack.run([partial(run_seed, 0, 3), partial(run_seed, 3, 0)])
    for seed in (0, 3):
        assert_close(servers[seed].model_state, run_alone(method, seed)[0].model_state)


def test_captured_steps_are_kept_whichever_seed_asks_first(monkeypatch):
    """A study makes a method for every seed; they are equal, but functions of two objects never are."""
    stack, losses = SeedStack(dtype=torch.float64), []
    copy_stack, wait_for_requests = DeviceBuffers.copy_stack, SeedStack._wait_for_requests

    def record_losses(buffers: DeviceBuffers, clients: Any, updates: Any, lr: float) -> None:
        losses.append([update.loss for update in updates])
        copy_stack(buffers, clients, updates, lr)

    def sort_requests(stack: SeedStack) -> Any:
        return dict(sorted(wait_for_requests(stack).items(), key=lambda r: r[0].seed, reverse=len(losses) % 2 > 0))

    def run_seed(seed: int) -> None:
        method = make_short_method(FedAvg)
        run_rounds(method, stack.open_clients(make_silos(seed), make_net(method, seed), seed))

    monkeypatch.setattr(DeviceBuffers, "copy_stack", record_losses)
    monkeypatch.setattr(SeedStack, "_wait_for_requests", sort_requests)
    stack.run([partial(run_seed, seed) for seed in SEEDS])
    assert len(losses) > 2
    assert all(of_round == losses[0] for of_round in losses)


def test_seeds_on_a_cpu_never_touch_a_gpu(monkeypatch):
    def fail(*_args: Any) -> None:
        raise AssertionError("initializes CUDA where there is a GPU")

    monkeypatch.setattr(torch.cuda, "stream", fail)
    monkeypatch.setattr(torch.cuda, "current_stream", fail)
    assert set(run_stacked(make_short_method(FedAvg), SEEDS)) == set(SEEDS)


def test_work_for_later_is_done_while_the_device_trains(monkeypatch):
    """Both seeds work after the steps of a round are queued, and before the round ends with replies."""
    method, stack = replace(make_short_method(FedAvg), rounds=1, iterations=1), SeedStack(dtype=torch.float64)
    events: list[str] = []
    have_both_worked = threading.Event()
    train, finish = StackedEngine._train_stack, StackTrainer.finish

    def train_stack(*args: Any) -> Any:
        num_steps = train(*args)
        events.append("queued")
        return num_steps

    def finish_stack(*args: Any) -> Any:
        assert have_both_worked.wait(20)
        return finish(*args)

    def work() -> None:
        events.append("work")
        if events.count("work") == len(SEEDS):
            have_both_worked.set()

    def run_seed(seed: int) -> None:
        run_rounds(method, stack.open_clients(make_silos(seed), make_net(method, seed), seed, work))

    monkeypatch.setattr(StackedEngine, "_train_stack", train_stack)
    monkeypatch.setattr(StackTrainer, "finish", finish_stack)
    stack.run([partial(run_seed, seed) for seed in SEEDS])
    assert events[:3] == ["queued", "work", "work"]


def test_an_error_of_one_seed_stops_the_others():
    method, stack, rounds = UEFL_METHOD, SeedStack(), []

    def run_seed(seed: int) -> None:
        for server in iterate_rounds(method, stack.open_clients(make_silos(seed), make_net(method, seed), seed)):
            rounds.append(server.round)
            if seed == 3 and server.round == 2:
                raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        stack.run([partial(run_seed, seed) for seed in (0, 3)])
    assert max(rounds) <= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", METHODS_TO_STACK)
def test_on_cuda_each_seed_equals_its_run_alone(name):
    method = METHODS_TO_STACK[name]
    assert_equals_runs_alone(method, run_stacked(method, SEEDS, device="cuda"), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", METHODS_TO_STACK)
def test_on_cuda_seeds_of_two_stacks_at_the_same_time_equal_their_runs_alone(name):
    method = METHODS_TO_STACK[name]
    assert_equals_runs_alone(method, run_in_two_stacks(method, ((0, 3), (4, 7)), device="cuda"), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_all_threads_of_a_stack_use_the_queue_of_the_first():
    queues = []

    class Listener(SeedStack):
        def _answer(self, requests: Any) -> None:
            queues.append(torch.cuda.current_stream())
            super()._answer(requests)

    def run_seed(seed: int) -> None:
        queues.append(torch.cuda.current_stream())
        run_rounds(method, stack.open_clients(make_silos(seed), make_net(method, seed), seed))

    method = make_short_method(FedAvg)
    with torch.cuda.stream(torch.cuda.Stream()):
        expected, stack = torch.cuda.current_stream(), Listener(dtype=torch.float64, device="cuda")
        stack.run([partial(run_seed, seed) for seed in SEEDS])
    assert len(queues) > 2
    assert all(queue == expected for queue in queues)
