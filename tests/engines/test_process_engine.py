"""The engine `processes` has the bits of the serial engine, whatever happens to its processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import (
    SHORT_RUN,
    SMALL_CODEBOOK,
    drop_seconds,
    have_equal_bits,
    make_clients,
    make_encoder,
    make_short_method,
    make_striped_silo,
    run_rounds,
)
from test_shared_tensors import list_shared_memory
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from uefl.algorithms import METHODS
from uefl.algorithms.fedavg import FedAvg
from uefl.core.errors import InputError, ResumableError
from uefl.core.federation import Batch, ClientModel, Examples, Silo, load_examples, map_examples
from uefl.core.lazy_tensor import LazyTensor, is_lazy
from uefl.engines.processes import channel, process_engine, worker_pool
from uefl.engines.processes.process_engine import ProcessEngine, RemoteTraceback, Schedule, hide_inputs
from uefl.engines.processes.shared_tensors import pack
from uefl.engines.processes.worker_pool import WorkerPool, choose_num_workers, count_cores
from uefl.engines.serial import SerialEngine
from uefl.experiment.train import train

ONE_ROUND = FedAvg(**{**SHORT_RUN, "rounds": 1, "iterations": 1})


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Three processes for all tests here: each imports torch, which takes longer than most of these runs."""
    with WorkerPool(3) as pool:
        pool.start()
        yield pool


def make_law_method(name: str, **fields: Any) -> FedAvg:
    method = replace(make_short_method(METHODS[name]), **fields)
    return replace(method, codebook=method.codebook and replace(SMALL_CODEBOOK, extend=method.codebook.extend))


def run_engine(method: FedAvg, engine: Any = SerialEngine, rounds: int | None = None, **fields: Any) -> tuple[Any, ...]:
    """Run a method and return all that an engine may change."""
    clients = make_clients(method, engine=engine, **fields)
    server, records = run_rounds(method, clients, rounds)
    return server, clients.client_states, [drop_seconds(record) for record in records]


def assert_equal_runs(run: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    (server, client_states, records), (expected_server, expected_states, expected_records) = run, expected
    assert have_equal_bits(server.model_state, expected_server.model_state)
    assert have_equal_bits(server.method_state, expected_server.method_state)
    assert torch.equal(server.access, expected_server.access)
    assert list(client_states) == list(expected_states)
    for name, state in expected_states.items():
        assert have_equal_bits(client_states[name], state)
        assert {n: t.stride() for n, t in client_states[name].items()} == {n: t.stride() for n, t in state.items()}
    assert records == expected_records


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_bits_of_the_serial_engine(name: str, pool: WorkerPool) -> None:
    method = make_law_method(name)
    assert_equal_runs(run_engine(method, partial(ProcessEngine, pool=pool)), run_engine(method))


def test_centralized_training_with_label_priors_has_the_bits_of_the_serial_engine(pool: WorkerPool) -> None:
    method = make_law_method("centralized", logit_adjustment="local")
    assert_equal_runs(run_engine(method, partial(ProcessEngine, pool=pool)), run_engine(method))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_number_of_processes_changes_nothing(num_workers: int, pool: WorkerPool) -> None:
    few = WorkerPool(num_workers)
    few.workers = pool.workers[:num_workers]
    local = replace(SHORT_RUN["local"], reset_optimizer=False)
    method = make_law_method("uefl", clients_per_round=3, batch_norm="local", logit_adjustment="local", local=local)
    assert_equal_runs(run_engine(method, partial(ProcessEngine, pool=few)), run_engine(method))
    assert len(few.workers) == num_workers


def test_rounds_in_groups_have_the_bits_of_the_serial_engine(pool: WorkerPool) -> None:
    method = make_law_method("uefl", group_rounds=2)
    run, expected = run_engine(method, partial(ProcessEngine, pool=pool)), run_engine(method)
    assert_equal_runs(run, expected)
    assert len(expected[-1][-1]["groups"]) > 1


def test_an_ensemble_in_double_precision_has_the_bits_of_the_serial_engine(pool: WorkerPool) -> None:
    method, fields = make_law_method("uefl"), {"dtype": torch.float64, "ensemble_size": 2, "augment": "crop:2+flip"}
    assert_equal_runs(run_engine(method, partial(ProcessEngine, pool=pool), **fields), run_engine(method, **fields))


def test_processes_use_the_settings_of_torch_of_their_parent(pool: WorkerPool) -> None:
    method, numbers = ThreadCounting(**SHORT_RUN, clients_per_round=1), []
    clients = make_clients(method, engine=partial(ProcessEngine, pool=pool))  # type: ignore[arg-type]
    server = method.initialize_server(clients)
    for num_threads in (2, 1):  # the data are sent once, but settings with every message
        torch.set_num_threads(num_threads)
        server = method.run_round(clients, server)
        numbers += server.method_state["threads"].tolist()
    assert numbers == [2.0, 1.0]


@dataclass(frozen=True, kw_only=True)
class ThreadCounting(FedAvg):
    """FedAvg whose silos send the number of their threads."""

    def finish_training(self, *_: Any, **numbers: Any) -> Any:
        del numbers
        return {"threads": torch.tensor([float(torch.get_num_threads())])}, {}

    def update_method_state(self, server: Any, replies: Any) -> Any:
        return server.replace(method_state={"threads": replies[0].extras["threads"]})


def test_data_are_in_memory_once(pool: WorkerPool) -> None:
    clients = make_clients(ONE_ROUND, engine=partial(ProcessEngine, pool=pool))
    server = ONE_ROUND.initialize_server(clients)
    broadcast = ONE_ROUND.make_broadcast(clients, server)
    before, after = [], []
    for answers in (before, after):
        answers += [r.answers["test"] for r in clients.query(ONE_ROUND, "evaluate", broadcast, ("test",))]
        for silo in clients.silos.values():
            silo.test.x.mul_(-3)  # here, and so in every worker
    assert not any(have_equal_bits(one, other) for one, other in zip(before, after, strict=True))


# --- second tasks -----------------------------------------------------------------------------------------------------


MANY_SILOS = [make_striped_silo(f"silo {i:03}", 16 + i, 10 * i) for i in range(12)]


def record_second_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the silos that workers receive while they run another one."""
    second: list[str] = []
    add_task = worker_pool.WorkerHandle.add_task

    def record(worker: worker_pool.WorkerHandle, silo_name: str) -> None:
        second.extend([silo_name] if worker.tasks else [])
        add_task(worker, silo_name)

    monkeypatch.setattr(worker_pool.WorkerHandle, "add_task", record)
    return second


def receive_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be done with their second task before the answer to the first one is read."""
    receive = WorkerPool.receive

    def wait_and_receive(pool: WorkerPool, *, block: bool) -> Any:
        time.sleep(0.05)
        yield from receive(pool, block=block)

    monkeypatch.setattr(WorkerPool, "receive", wait_and_receive)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
def test_a_second_task_has_memory_of_its_own(name: str, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    method, second = make_law_method(name), record_second_tasks(monkeypatch)
    expected = run_engine(method, rounds=2, silos=MANY_SILOS)
    receive_late(monkeypatch)
    assert_equal_runs(run_engine(method, partial(ProcessEngine, pool=pool), rounds=2, silos=MANY_SILOS), expected)
    assert len(second) >= 2, "one in each round"


def test_the_last_silos_go_to_the_workers_that_are_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    num_left: list[int] = []
    give_tasks = ProcessEngine._give_tasks

    def record(engine: ProcessEngine, schedule: Schedule, depth: int, **numbers: int) -> None:
        before = len(schedule.waiting)
        give_tasks(engine, schedule, depth, **numbers)
        num_left.extend([len(schedule.waiting)] if depth == 2 and len(schedule.waiting) < before else [])

    monkeypatch.setattr(ProcessEngine, "_give_tasks", record)
    with WorkerPool(2) as own_pool:
        run_engine(ONE_ROUND, partial(ProcessEngine, pool=own_pool), silos=MANY_SILOS)
    assert min(num_left) == 4, "two per worker"


def test_a_killed_process_gives_back_both_of_its_silos(pool: WorkerPool) -> None:
    method, warnings = replace(SLOW, local=replace(SLOW.local, epochs=20)), list[str]()
    clients = make_clients(method, MANY_SILOS, engine=partial(ProcessEngine, pool=pool, on_warning=warnings.append))
    lost = kill_first_process(clients, pool, 1, MANY_SILOS[-1].name)
    server, _ = run_rounds(method, clients)
    (line,) = warnings
    assert line.endswith(f"silo {MANY_SILOS[-1].name} starts again in another process")
    assert len(lost) == 2
    assert have_equal_bits(server.model_state, run_engine(method, silos=MANY_SILOS)[0].model_state)


# --- lazy silos -------------------------------------------------------------------------------------------------------


def make_lazy_silos(reads: list[str], count: int = 4) -> list[Silo]:
    """Return striped silos whose inputs are read by a function that no other process has; the first stays eager."""

    def make_lazy(name: str, examples: Examples) -> Examples:
        def read(positions: Tensor) -> Tensor:
            reads.append(name)
            return examples.x[positions]

        x: Any = LazyTensor(read, examples.x.shape, examples.x.dtype)
        return examples._replace(x=x)

    silos = [make_striped_silo(f"silo {i:03}", 16 + i, 10 * i) for i in range(count)]
    return [silos[0], *(map_examples(silo, partial(make_lazy, silo.name)) for silo in silos[1:])]


@pytest.mark.parametrize(
    "name", ["fedavg", "uefl", "scaffold", "ditto", "fedcr", "fccl", "ifca", "fine-tuning", "centralized"]
)
def test_lazy_silos_have_the_bits_of_the_serial_engine(name: str, pool: WorkerPool) -> None:
    method = make_law_method(name)
    engine = partial(ProcessEngine, pool=pool, on_warning=pytest.fail)
    silos = make_lazy_silos([])
    assert_equal_runs(run_engine(method, engine, silos=silos), run_engine(method, silos=silos))


def test_a_silo_with_lazy_and_other_inputs_has_the_bits_of_the_serial_engine(pool: WorkerPool) -> None:
    method, silos = make_law_method("uefl"), make_lazy_silos([])
    silos[2] = replace(silos[2], test=load_examples(silos[2].test))
    silos[3] = replace(silos[3], train=load_examples(silos[3].train))
    engine = partial(ProcessEngine, pool=pool, on_warning=pytest.fail)
    assert_equal_runs(run_engine(method, engine, silos=silos), run_engine(method, silos=silos))


def test_a_worker_receives_a_lazy_silo_only_when_it_has_no_other(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = record_second_tasks(monkeypatch)
    run_engine(ONE_ROUND, partial(ProcessEngine, pool=pool), silos=make_lazy_silos([], 12))
    assert {*second} <= {"silo 000"}, "the only one that is in memory"


def test_one_worker_runs_lazy_silos_beside_others(pool: WorkerPool) -> None:
    method, one = make_law_method("scaffold"), WorkerPool(1)
    one.workers = pool.workers[:1]
    engine = partial(ProcessEngine, pool=one, on_warning=pytest.fail)
    silos = make_lazy_silos([])
    assert_equal_runs(run_engine(method, engine, silos=silos), run_engine(method, silos=silos))


def test_of_many_lazy_silos_only_participants_are_read_and_sent(pool: WorkerPool) -> None:
    method = FedAvg(
        **{**SHORT_RUN, "rounds": 1, "iterations": 1}, clients_per_round=2, eval_clients=1, evaluate_every=9
    )
    sizes = []
    for count in (10, 200):
        reads: list[str] = []
        clients = make_clients(method, make_lazy_silos(reads, count), engine=partial(ProcessEngine, pool=pool))
        server = method.initialize_server(clients)
        reads.clear()
        broadcast = method.make_broadcast(clients, server)._replace(round=1, participants=("silo 003", "silo 007"))
        (*_,) = clients.fit(method, broadcast, evaluate=False)
        assert sorted(reads) == ["silo 003", "silo 007"], "the training split of each, once"
        assert all(is_lazy(silo.train.x) for name, silo in clients.silos.items() if name != "silo 000")
        sizes.append((len(clients._data.pickled), clients._data.buffer.num_bytes))
    assert sizes[0] == sizes[1], "what all workers receive does not grow with the number of lazy silos"


def test_what_was_not_sent_cannot_be_read_by_mistake() -> None:
    examples = make_lazy_silos([])[1].test
    (hidden,) = pack([hide_inputs(examples)]).unpack()
    assert (hidden.x.shape, len(hidden.y)) == (examples.x.shape, len(examples.y))
    with pytest.raises(RuntimeError, match="these inputs were not sent to this process"):
        hidden.x[:1]


def test_an_error_of_reading_a_lazy_silo_ends_the_run_with_it() -> None:
    def fail(_positions: Tensor) -> Tensor:
        raise OSError("the disk is gone")

    silos = make_lazy_silos([])
    x: Any = LazyTensor(fail, silos[2].train.x.shape, torch.float32)
    silos[2] = replace(silos[2], train=silos[2].train._replace(x=x))
    with WorkerPool(1) as own_pool:
        clients = make_clients(ONE_ROUND, silos, engine=partial(ProcessEngine, pool=own_pool))  # type: ignore[arg-type]
        with pytest.raises(OSError, match="the disk is gone"):
            run_rounds(ONE_ROUND, clients)
        assert own_pool.workers == []


def test_a_task_without_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no memory is left")

    monkeypatch.setattr(channel, "pack", fail)
    monkeypatch.setattr(WorkerPool, "receive", lambda *_, **__: pytest.fail("waits for an answer to an unsent task"))
    with WorkerPool(1) as own_pool:
        silos = make_lazy_silos([])
        clients = make_clients(ONE_ROUND, silos, engine=partial(ProcessEngine, pool=own_pool))  # type: ignore[arg-type]
        with pytest.raises(OSError, match="no memory is left"):
            run_rounds(ONE_ROUND, clients)
        assert own_pool.workers == []


def test_progress_is_that_of_the_serial_engine(pool: WorkerPool) -> None:
    events: dict[str, list[tuple[str, str]]] = {}
    for name, engine in (("serial", SerialEngine), ("processes", partial(ProcessEngine, pool=pool))):
        clients = make_clients(ONE_ROUND, engine=engine)  # type: ignore[arg-type]
        clients.on_progress = lambda *event, name=name: events.setdefault(name, []).append(event)
        run_rounds(ONE_ROUND, clients)
    assert sorted(events["processes"]) == sorted(events["serial"])
    assert ("ada", "training") in events["serial"]


def test_workers_send_progress_only_if_it_is_shown(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []
    take_answer = ProcessEngine._take_answer

    def record(engine: ProcessEngine, worker: Any, schedule: Schedule, kind: str, *content: Any) -> None:
        answers.append(kind)
        take_answer(engine, worker, schedule, kind, *content)

    monkeypatch.setattr(ProcessEngine, "_take_answer", record)
    clients = make_clients(ONE_ROUND, engine=partial(ProcessEngine, pool=pool))  # type: ignore[arg-type]
    server = ONE_ROUND.initialize_server(clients)
    server = ONE_ROUND.run_round(clients, server)
    assert set(answers) - {"ready"} == {"reply"}
    clients.on_progress = lambda *_: None
    ONE_ROUND.run_round(clients, server)
    assert "progress" in answers, "a display may be added later"


# --- replies that are not taken, or taken late ------------------------------------------------------------------------


def test_replies_left_behind_change_nothing(pool: WorkerPool) -> None:
    """The serial engine trains no silo whose reply is never read, so its client state must not change either."""
    method = make_law_method("scaffold")
    runs = []
    for engine in (SerialEngine, partial(ProcessEngine, pool=pool)):
        clients = make_clients(method, engine=engine)
        server = method.initialize_server(clients)
        broadcast = method.make_broadcast(clients, server)._replace(round=1)
        replies = clients.fit(method, broadcast)
        assert next(replies).silo_name == "ada"
        assert list(clients.client_states) == ["ada"]
        replies.close()
        runs.append((*run_rounds(method, clients, server=server), clients.client_states))
    (serial, _, serial_states), (server, _, states) = runs
    assert have_equal_bits(server.model_state, serial.model_state)
    assert all(have_equal_bits(states[name], serial_states[name]) for name in serial_states)


def test_replies_of_two_messages_can_be_taken_in_turns(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "MAX_HELD_BYTES", 0)
    few = WorkerPool(1)
    few.workers = pool.workers[:1]  # two silos wait when the second message comes
    taken = []
    for engine in (SerialEngine, partial(ProcessEngine, pool=few)):
        clients = make_clients(ONE_ROUND, engine=engine)
        server = ONE_ROUND.initialize_server(clients)
        broadcast = ONE_ROUND.make_broadcast(clients, server)._replace(round=1)
        other = broadcast._replace(model_state={n: t * 2 for n, t in broadcast.model_state.items()})
        pairs = zip(clients.fit(ONE_ROUND, broadcast), clients.fit(ONE_ROUND, other))
        taken.append([(one.tensors, two.tensors) for one, two in pairs])
    for (one, two), (expected_one, expected_two) in zip(*taken, strict=True):
        assert have_equal_bits(one, expected_one)
        assert have_equal_bits(two, expected_two)


def test_the_largest_silos_start_first_but_few_replies_wait() -> None:
    schedule = Schedule({"a": 3, "b": 5, "c": 9, "d": 5, "e": 1}, window=4)
    order = []
    while name := schedule.choose_next():
        schedule.waiting.remove(name)
        order.append(name)
    assert order == ["c", "b", "d", "a"]
    schedule.num_returned = 1
    assert schedule.choose_next() == "e"


# --- processes that end -----------------------------------------------------------------------------------------------


def kill_first_process(clients: Any, pool: WorkerPool, times: int, killed: str = "ada") -> list[str]:
    """Send SIGKILL to the process of a silo, as often as it starts to train; return a list of the silos it had."""
    kills, lost = [], list[str]()

    def on_progress(silo_name: str, activity: str) -> None:
        if (silo_name, activity) == (killed, "training") and len(kills) < times:
            kills.append(next(w for w in pool.workers if next(iter(w.tasks), "") == killed))
            os.kill(kills[-1].process.pid, signal.SIGKILL)
            lost.extend(kills[-1].tasks)

    clients.on_progress = on_progress
    return lost


SLOW = replace(ONE_ROUND, local=replace(ONE_ROUND.local, epochs=100))  # no process is done before it is killed
ADA_ALONE = [make_striped_silo("ada", 20, 0)]


def test_a_killed_process_is_one_line_and_its_silo_starts_again(pool: WorkerPool) -> None:
    warnings: list[str] = []
    clients = make_clients(SLOW, ADA_ALONE, engine=partial(ProcessEngine, pool=pool, on_warning=warnings.append))
    kill_first_process(clients, pool, 1)
    server, _ = run_rounds(SLOW, clients)
    (line,) = warnings
    assert line.startswith("worker process ")
    assert line.endswith(" ended with exit code -9; silo ada starts again in another process")
    assert have_equal_bits(server.model_state, run_engine(SLOW, silos=ADA_ALONE)[0].model_state)


def test_a_silo_that_ends_two_processes_stops_the_run_with_one_line() -> None:
    with WorkerPool(1) as own_pool:
        clients = make_clients(SLOW, ADA_ALONE, engine=partial(ProcessEngine, pool=own_pool))
        kill_first_process(clients, own_pool, 2)
        with pytest.raises(ResumableError, match=r"ended with exit code -9, the second one at silo ada; .* to resume"):
            run_rounds(SLOW, clients)
        assert own_pool.workers == []


def test_a_process_whose_answer_is_not_wanted_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    worker = worker_pool.WorkerHandle()
    worker.channel.connection.shutdown(socket.SHUT_RD)  # so the answer fails, and no end of messages is read before
    assert worker.process.wait(120) == 0
    worker.end()
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_at_the_start_of_a_process_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    """A terminal sends Ctrl-C to all processes; the parent answers it, also while a worker still imports torch."""
    worker = worker_pool.WorkerHandle()
    for _ in range(10):
        os.kill(worker.process.pid, signal.SIGINT)
        time.sleep(0.02)
    assert worker.channel.receive().parcel.unpack() == ("ready",)
    assert worker.end() == 0
    assert capfd.readouterr() == ("", "")


def test_all_memory_and_processes_are_given_back() -> None:
    gc.collect()
    before = list_shared_memory()
    clients = make_clients(ONE_ROUND, engine=partial(ProcessEngine, num_workers=1))
    run_rounds(ONE_ROUND, clients)
    (worker,) = clients._pool.workers
    assert len(list_shared_memory()) > len(before)
    for pid in ("self", worker.process.pid):
        assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text(), "a file there would outlive a killed process"
    clients.release()
    assert worker.process.returncode == 0
    assert not Path(f"/proc/{worker.process.pid}").exists()
    del clients, worker
    gc.collect()
    assert list_shared_memory() == before


# --- what cannot run in another process -------------------------------------------------------------------------------


def make_unpicklable_encoder() -> nn.Module:
    encoder = make_encoder()
    encoder.register_forward_hook(lambda _layer, _inputs, output: output * 1.5)
    return encoder


def make_weight_normed_encoder() -> nn.Module:
    encoder = make_encoder()
    weight_norm(encoder[0])
    return encoder


def make_scripted_encoder() -> nn.Module:
    encoder = make_encoder()
    encoder[2] = torch.jit.script(encoder[2])  # without parameters, as torch warns of copied scripted ones
    return encoder


class Scaled(nn.Sequential):
    """A class that another process would have to import from the script or notebook that runs."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 1.5


class Doubled(Scaled):
    """A class of a module that no other process finds."""


def make_encoder_of_a_script() -> nn.Module:
    Scaled.__module__ = "__main__"
    sys.modules["__main__"].Scaled = Scaled  # type: ignore[attr-defined]
    return Scaled(*make_encoder())


def make_encoder_of_a_lost_module() -> nn.Module:
    Doubled.__module__ = "lost_module"
    sys.modules.setdefault("lost_module", ModuleType("lost_module")).Doubled = Doubled  # type: ignore[attr-defined]
    return Doubled(*make_encoder())


@pytest.mark.parametrize(
    "encoder_factory",
    [
        make_unpicklable_encoder,
        make_weight_normed_encoder,
        make_scripted_encoder,
        make_encoder_of_a_script,
        make_encoder_of_a_lost_module,
    ],
)
def test_a_network_that_cannot_be_sent_runs_here_with_one_line(encoder_factory: Any) -> None:
    method, warnings, fields = make_law_method("fedbn"), list[str](), {"encoder_factory": encoder_factory}
    with WorkerPool(1) as own_pool:
        engine = partial(ProcessEngine, pool=own_pool, on_warning=warnings.append)
        assert_equal_runs(run_engine(method, engine, **fields), run_engine(method, **fields))
        assert own_pool.workers == []
    (line,) = warnings
    assert line.startswith("engine=processes: workers need classes and functions that a module can import (")
    assert line.endswith("; silos run one after another, with the same results")
    assert "\n" not in line


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_a_lack_of_memory_is_not_a_network_that_cannot_be_sent(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("no memory is left")

    monkeypatch.setattr(process_engine, "pack", fail)
    with pytest.raises(error, match="no memory is left"):
        run_engine(ONE_ROUND, partial(ProcessEngine, num_workers=1))


def test_a_method_that_cannot_be_sent_runs_here_with_one_line() -> None:
    class LocalMethod(FedAvg):
        pass

    warnings: list[str] = []
    method = LocalMethod(**SHORT_RUN)
    run = run_engine(method, partial(ProcessEngine, pool=WorkerPool(1), on_warning=warnings.append))
    assert_equal_runs(run, run_engine(method))
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("can_start_processes", lambda: False, "this system cannot send memory from process to process"),
        ("MAX_ATTEMPTS", 2, "no process can be started"),
    ],
)
def test_what_no_process_can_run_runs_here_with_one_line(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_engine, name, value)
    monkeypatch.setattr(worker_pool.sys, "executable", "/no/such/python")
    warnings: list[str] = []
    run = run_engine(ONE_ROUND, partial(ProcessEngine, num_workers=1, on_warning=warnings.append))
    assert_equal_runs(run, run_engine(ONE_ROUND))
    assert [line.startswith(f"engine=processes: {reason}") for line in warnings] == [True]


def test_a_process_that_ends_at_its_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_START", "raise SystemExit(3)")
    warnings: list[str] = []
    run = run_engine(ONE_ROUND, partial(ProcessEngine, num_workers=1, on_warning=warnings.append))
    assert_equal_runs(run, run_engine(ONE_ROUND))
    (line,) = warnings
    assert "ended with exit code 3 at its start; silos run one after another" in line


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    """FedAvg that fails at large silos."""

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        del model
        raise InputError(f"a batch of {len(batch.y)} is not accepted")


def test_an_error_of_a_silo_is_raised_here_with_its_traceback() -> None:
    with WorkerPool(1) as own_pool:
        method = Failing(**SHORT_RUN)
        with pytest.raises(InputError, match="a batch of 8 is not accepted") as raised:
            run_engine(method, partial(ProcessEngine, pool=own_pool))
        assert isinstance(raised.value.__cause__, RemoteTraceback)
        assert "in loss" in str(raised.value.__cause__)
        assert own_pool.workers == []


# --- how many, and from Python ----------------------------------------------------------------------------------------


def test_one_process_per_core_and_thread_but_not_more_than_silos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_pool, "count_cores", lambda: 16)
    assert [choose_num_workers(0, n) for n in (1, 9, 100)] == [1, 9, 16]
    assert [choose_num_workers(3, n) for n in (1, 2, 100)] == [1, 2, 3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert choose_num_workers(0, 100) == 4
    with pytest.raises(InputError, match="workers=-1 must be at least 0"):
        choose_num_workers(-1, 9)
    monkeypatch.undo()
    cores = count_cores()
    for text, expected in (("100000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", cores)):
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(worker_pool, "_CGROUP_LIMIT", tmp_path / "cpu.max")
        assert count_cores() == expected


def test_training_from_python_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = WorkerPool.start

    def record_start(self: WorkerPool) -> None:
        start(self)
        started.extend(w.process for w in self.workers if w.process not in started)

    monkeypatch.setattr(WorkerPool, "start", record_start)
    silos = [make_striped_silo(name, 16, i) for i, name in enumerate("ab")]

    def stop(_record: Any) -> None:
        raise KeyboardInterrupt

    arguments: tuple[Any, ...] = (FedAvg(**SHORT_RUN), silos, make_encoder())
    with pytest.raises(KeyboardInterrupt):
        train(*arguments, num_classes=3, engine="processes", num_workers=1, on_record=stop)
    deadline = time.monotonic() + 120
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [process.returncode for process in started] == [0]
    with pytest.warns(UserWarning, match="engine=processes: workers need classes"):
        train(FedAvg(**SHORT_RUN), silos, make_unpicklable_encoder(), num_classes=3, engine="processes")
