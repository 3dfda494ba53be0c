"""Several seeds of one method in one stack: their silos train together, and each seed keeps its own server.

Every seed runs its rounds in a thread of its own, as if alone: own data, weights, noise, decisions and client states. A
request of its server waits until all seeds have made one; then the silos of all seeds that asked for the same task
of the same round run in one stack. So a seed's result depends on the seeds beside it by rounding alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from uefl.core.federation import Broadcast, Examples, Method, Reply, Silo, Split, Tensors
from uefl.core.noise import derive_key
from uefl.engines.serial import (
    collect_personal_tensors,
    collect_public_examples,
    copy_into_network,
    copy_to_device,
)
from uefl.engines.stacked.capture_lock import CAPTURE_LOCK
from uefl.engines.stacked.device_buffers import DeviceBuffers
from uefl.engines.stacked.stacked_engine import StackedEngine

SEPARATOR = "\x1f"  # between the number of a run and a silo name in the label of a stacked silo


class SeedStackStopped(Exception):
    """Another seed of the stack failed, or the user stopped the run."""


class Request(NamedTuple):
    """What a seed's server asks of its silos; requests with equal keys and methods run in one stack."""

    method: Method
    broadcast: Broadcast
    task: str = ""  # of a query; empty for a round of training
    splits: tuple[Split, ...] = ()
    evaluate: bool = False

    def key(self) -> tuple[Hashable, ...]:
        """Return a key that sorts requests by the progress of their run: the queries after a round, then the next."""
        return (self.broadcast.round, self.task, self.splits, self.evaluate, self.broadcast.lr)


@dataclass(eq=False)
class SeedClients:
    """The clients of one seed of a stack; an engine for its server, and its part of the data for the stack."""

    stack: SeedStack
    number: int  # of the seed in its stack
    seed: int
    silos: Sequence[Silo]
    net: nn.Module
    initial_tensors: Tensors
    device: torch.device
    while_waiting: Callable[[], None]  # work of this seed for the time in which the device trains
    client_states: dict[str, Tensors] = field(default_factory=dict)

    @property
    def num_examples(self) -> Mapping[str, int]:
        return {silo.name: len(silo.train.y) for silo in self.silos}

    @property
    def domains(self) -> Mapping[str, str]:
        return {silo.name: silo.domain for silo in self.silos}

    def initial_model_state(self) -> Tensors:
        return {name: t.clone() for name, t in self.initial_tensors.items()}

    def release(self) -> None:
        """Keep the device memory; the stack releases it after the last seed."""

    def get_personal_tensors(self, method: Method, broadcast: Broadcast) -> dict[str, Tensors]:
        """Return by silo the tensors of its own that predictions use."""
        return collect_personal_tensors(
            method, self.net, broadcast, self.seed, self.client_states, self.initial_tensors
        )

    def fit(self, method: Method, broadcast: Broadcast, *, evaluate: bool = True) -> Iterator[Reply]:
        return iter(self.stack.wait_for_replies(self, Request(method, broadcast, evaluate=evaluate)))

    def query(self, method: Method, task: str, broadcast: Broadcast, splits: Sequence[Split]) -> Iterator[Reply]:
        return iter(self.stack.wait_for_replies(self, Request(method, broadcast, task, tuple(splits))))


class SharedLocks(NamedTuple):
    """What the seeds of stacks that run at the same time do one after another."""

    turn: threading.Lock  # of the servers: libraries have global state, such as generators
    side_work: threading.Lock  # more than one seed would slow down the threads that give the device its work


class SeedStack:
    """Run several seeds of one method in one process; each calls `open_clients` in its own thread."""

    def __init__(self, *, locks: SharedLocks | None = None, own_stream: bool = False, **engine_settings: Any) -> None:
        self.device = torch.device(engine_settings.get("device", "cpu"))
        self._engine_settings = engine_settings
        self._stream: torch.cuda.Stream | None = None  # of the device: all threads of a stack use the same queue
        if self.device.type == "cuda":
            self._stream = get_second_stream(self.device) if own_stream else torch.cuda.current_stream(self.device)
        self._lock = threading.Lock()  # of what follows, except the turn
        self._requested = threading.Condition(self._lock)  # the main thread waits for it
        self._answered = threading.Condition(self._lock)  # the threads of seeds wait for it
        self._turn, self._side_work = locks or make_locks()
        self._requests: dict[SeedClients, Request] = {}
        self._replies: dict[SeedClients, list[Reply]] = {}
        self._is_device_busy = False  # with the steps of a round, so seeds may do what nothing waits for
        self._running = 0  # seeds whose thread has not ended
        self._thread = threading.local()  # has the number of the thread's seed
        self._members: list[SeedClients] = []
        self._errors: list[BaseException] = []
        self._is_stopped = False
        self._engine: SeedStackEngine | None = None

    def open_clients(
        self, silos: Sequence[Silo], net: nn.Module, seed: int, while_waiting: Callable[[], None] = lambda: None
    ) -> SeedClients:
        """Return the clients of a seed; called in the seed's thread before its first request.

        While the device trains the silos, the seed's thread calls `while_waiting`, without its turn.
        """
        dtype = self._engine_settings.get("dtype", torch.float32)
        net = copy_to_device(net, self.device, dtype)
        tensors = {name: t.clone() for name, t in net.state_dict().items()}
        silos = sorted(silos, key=lambda silo: silo.name)
        number = self._thread.number
        clients = SeedClients(self, number, seed, silos, net, tensors, self.device, while_waiting)
        with self._lock:
            self._members.append(clients)
        return clients

    def run(self, seeds: Sequence[Callable[[], None]]) -> None:
        """Run the seeds' functions to their end, each in a thread; the first error stops all of them."""
        threads = [threading.Thread(target=self._run_seed, args=pair, daemon=True) for pair in enumerate(seeds)]
        self._running = len(threads)
        for thread in threads:
            thread.start()
        with self._use_stream():
            try:
                while requests := self._wait_for_requests():
                    self._answer(requests)
            except BaseException as error:
                self._errors.append(error)
            finally:
                self.stop()
                for thread in threads:
                    thread.join()
                if self._engine:
                    self._engine.release()
                    self._engine = None
        if self._errors:
            raise self._errors[0]

    def wait_for_replies(self, clients: SeedClients, request: Request) -> list[Reply]:
        """Hand in a request of a seed's server and wait for its replies."""
        with self.yield_turn():
            with self._lock:
                self._requests[clients] = request
                self._requested.notify()
                self._answered.wait_for(lambda: self._is_device_busy or clients in self._replies or self._is_stopped)
            with self._side_work:
                clients.while_waiting()
            with self._lock:
                self._answered.wait_for(lambda: clients in self._replies or self._is_stopped)
        if clients not in self._replies:
            raise SeedStackStopped
        return self._replies.pop(clients)

    @contextmanager
    def yield_turn(self) -> Iterator[None]:
        """Let the servers of other seeds work while this one waits for its silos or the disk."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def _use_stream(self) -> AbstractContextManager[object]:
        """Return the context of this stack's queue; on a CPU, torch's would initialize a GPU that the machine has."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _run_seed(self, number: int, seed: Callable[[], None]) -> None:
        self._thread.number = number
        try:
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # each thread has a current device of its own
            with self._use_stream(), self._turn:
                if not self._is_stopped:
                    seed()
        except SeedStackStopped:
            pass
        except BaseException as error:  # raised again in the main thread
            self._errors.append(error)
            self.stop()
        finally:
            with self._lock:
                self._running -= 1
                self._requested.notify()

    def stop(self) -> None:
        """Let all seeds end where they are; those that wait for replies get none."""
        with self._lock:
            self._is_stopped = True
            self._requested.notify()
            self._answered.notify_all()

    def _wait_for_requests(self) -> dict[SeedClients, Request]:
        """Wait until every seed has a request; return those that are furthest behind. None are left at the end."""
        with self._lock:
            while len(self._requests) < self._running and not self._is_stopped:
                self._requested.wait(timeout=1.0)  # with a timeout, so that Ctrl-C is noticed
            if self._is_stopped or not self._requests:
                return {}
            first = min(self._requests.values(), key=Request.key)
            return {
                clients: self._requests.pop(clients)
                for clients, request in list(self._requests.items())
                if request.key() == first.key() and request.method == first.method
            }

    def _answer(self, requests: Mapping[SeedClients, Request]) -> None:
        if self._engine is None:
            listener = self._note_busy_device
            members = sorted(self._members, key=lambda member: member.number)  # threads open their clients in any order
            self._engine = SeedStackEngine(members, listener, self._turn, **self._engine_settings)
        replies = self._engine.answer(requests)
        with self._lock:
            self._is_device_busy = False
            self._replies.update(replies)
            self._answered.notify_all()

    def _note_busy_device(self) -> None:
        with self._lock:
            self._is_device_busy = True
            self._answered.notify_all()


def make_locks() -> SharedLocks:
    """Return the locks of stacks that run at the same time."""
    return SharedLocks(threading.Lock(), threading.Lock())


@cache
def get_second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a queue of the device beside its usual one, always the same: libraries keep work space for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def run_together(stacks: Sequence[tuple[SeedStack, Sequence[Callable[[], None]]]]) -> None:
    """Run stacks with their seeds at the same time: the device trains one stack while the servers of another work.

    The first error stops all of them.
    """
    errors: list[BaseException] = []
    have_ended = threading.Semaphore(0)

    def run_stack(stack: SeedStack, seeds: Sequence[Callable[[], None]]) -> None:
        try:
            stack.run(seeds)
        except BaseException as error:
            errors.append(error)
            for other, _ in stacks:
                other.stop()
        finally:
            have_ended.release()

    threads = [threading.Thread(target=run_stack, args=pair, daemon=True) for pair in stacks[1:]]
    for thread in threads:
        thread.start()
    run_stack(*stacks[0])  # in this thread, which notices Ctrl-C
    try:
        for _ in stacks:  # Ctrl-C in a thread's `join` would let the thread count as ended
            while not have_ended.acquire(timeout=1.0):
                pass
    except BaseException:
        for stack, _ in stacks:
            stack.stop()
        raise
    finally:
        for thread in threads:
            thread.join()  # until its seeds have written completed rounds
    if errors:
        raise errors[0]


class SeedStackEngine(StackedEngine):
    """A stacked engine over the silos of all runs; a silo's label within it is the number of its run and its name."""

    def __init__(
        self,
        members: Sequence[SeedClients],
        on_steps_queued: Callable[[], None],
        turn: threading.Lock,
        **settings: Any,
    ) -> None:
        self._on_steps_queued, self._turn = on_steps_queued, turn
        self._owners = {self._label(m, silo.name): (m, silo.name) for m in members for silo in m.silos}
        silos = [replace(silo, name=self._label(m, silo.name)) for m in members for silo in m.silos]
        self._methods: list[Method] = []  # of all seeds; equal ones once
        self._stateless: list[Method] = []  # methods whose clients have no state
        self._public_sets = {m: i for i, m in enumerate(members)}  # number of its set of public images
        self._num_public_sets = len(members)
        super().__init__(silos, members[0].net, **settings)

    def answer(self, requests: Mapping[SeedClients, Request]) -> dict[SeedClients, list[Reply]]:
        """Run equal requests of several seeds together."""
        request = next(iter(requests.values()))
        broadcasts = []
        for clients, own in requests.items():
            names, participants = (
                tuple(self._label(clients, n) for n in names)
                for names in (own.broadcast.silo_names, own.broadcast.participants)
            )
            broadcasts.append(own.broadcast._replace(silo_names=names, participants=participants))
            self.client_states.update({self._label(clients, n): s for n, s in clients.client_states.items()})
        replies: dict[SeedClients, list[Reply]] = {clients: [] for clients in requests}
        for reply in self._run(request._replace(method=self._get_first_equal(request.method)), broadcasts):
            clients, name = self._owners[reply.silo_name]
            replies[clients].append(reply._replace(silo_name=name))
            if reply_state := self.client_states.get(reply.silo_name):
                clients.client_states[name] = reply_state
        return replies

    def _get_first_equal(self, method: Method) -> Method:
        """Return one object for all equal methods: captured steps are those of an object's functions."""
        if method not in self._methods:
            self._methods.append(method)
        return self._methods[self._methods.index(method)]

    def _run(self, request: Request, broadcasts: Sequence[Broadcast]) -> Iterator[Reply]:
        if not request.task:
            yield from self._fit_clients(request.method, broadcasts, evaluate=request.evaluate)
        else:
            yield from self._query_servers(request.method, request.task, broadcasts, request.splits)

    def _train_stack(self, method: Method, buffers: DeviceBuffers, broadcast: Broadcast) -> list[int]:
        num_steps = super()._train_stack(method, buffers, broadcast)
        self._on_steps_queued()
        return num_steps

    @contextmanager
    def _fork_rng(self) -> Iterator[None]:
        # Torch's generators are those of all stacks. In this order: who has the second lock never waits for the first.
        with self._turn, CAPTURE_LOCK.work(), super()._fork_rng():
            yield

    def _collect_public_examples(self, silos: Sequence[Silo]) -> Examples:
        """Concatenate the public images of all seeds; all have equally many."""
        del silos
        sets = [collect_public_examples(member.silos) for member in self._public_sets]
        return Examples(*map(torch.cat, zip(*sets)))

    def _get_public_set(self, name: str) -> int:
        return self._public_sets[self._owners[name][0]]

    def _get_public_examples(self, name: str) -> Examples:
        rows = slice(self._get_public_set(name) * self._num_public, (self._get_public_set(name) + 1) * self._num_public)
        return Examples(self.public.x[rows], self.public.y[rows])

    def _get_initial_tensors(self, name: str) -> Tensors:
        return self._owners[name][0].initial_tensors

    def _get_seed(self, name: str) -> int:
        return self._owners[name][0].seed

    def _derive_key(self, name: str, *address: int | str) -> int:
        clients, silo_name = self._owners[name]
        return derive_key(clients.seed, silo_name, *address)

    def _make_client_state(self, method: Method, name: str) -> Tensors:
        if method in self._stateless:
            return {}
        copy_into_network(self.net, self._get_initial_tensors(name))
        client_state = super()._make_client_state(method, name)
        if not client_state:
            self._stateless.append(method)
        return client_state

    def _label(self, clients: SeedClients, silo_name: str) -> str:
        return f"{clients.number}{SEPARATOR}{silo_name}"
