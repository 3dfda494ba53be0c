"""The engine `processes`: silos of one run spread over worker processes, with the bits of the serial engine.

A client is a function of what its silo receives and of its client state, and both come from this process: so any worker
may run any silo, in any order. Replies are returned in the order of the serial engine, in which the server adds them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from uefl.core.errors import InputError, ResumableError
from uefl.core.federation import SPLITS, Broadcast, Examples, Method, Reply, Silo, Split, Tensors, size_in_bytes
from uefl.core.lazy_tensor import LazyTensor, is_lazy
from uefl.engines.processes.channel import Slot
from uefl.engines.processes.shared_tensors import Parcel, pack
from uefl.engines.processes.worker_pool import WorkerHandle, WorkerPool, can_start_processes, choose_num_workers
from uefl.engines.processes.worker_process import EngineParts, TorchSettings, Work, describe_error
from uefl.engines.serial import SerialEngine, ignore_progress

MAX_HELD_BYTES = 2**30  # of replies that wait for the reply of an earlier silo
MAX_ATTEMPTS = 2  # a silo whose process ends twice probably needs more memory than there is


class CannotSpreadError(Exception):
    """Silos cannot run in other processes; the message is the reason."""


class RemoteTraceback(Exception):
    """The traceback of an error in a worker process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Schedule:
    """The silos of one message: which wait, which run, and what those that are done replied."""

    def __init__(self, sizes: dict[str, int], window: int, splits: Collection[Split] = ()) -> None:
        self.names = list(sizes)  # in the order in which replies are returned
        self.sizes, self.window, self.splits = sizes, window, splits
        self.num_returned = 0
        self.waiting = set(self.names)
        self.results: dict[str, tuple[Any, ...]] = {}
        self.attempts = dict.fromkeys(self.names, 0)

    def choose_next(self) -> str:
        """Return the largest waiting silo among the next ones to be returned, or an empty string."""
        near = self.names[self.num_returned : self.num_returned + self.window]
        return max((n for n in near if n in self.waiting), key=lambda n: self.sizes[n], default="")


class ProcessEngine(SerialEngine):
    """Run clients in worker processes; where that is impossible, run them in this one, with a warning.

    `num_workers=0` takes as many processes as there are cores. A `pool` is shared with other engines and stays open.
    """

    def __init__(
        self,
        silos: Sequence[Silo],
        net: nn.Module,
        *,
        num_workers: int = 0,
        pool: WorkerPool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(silos, net, **settings)
        if self.device.type != "cpu":
            raise InputError(f"engine=processes needs device=cpu, not {self.device}; use auto, serial or stacked")
        num_workers = choose_num_workers(num_workers, len(self.silos))
        self._pool, self._owns_pool = pool or WorkerPool(num_workers), pool is None
        self._data: Parcel | None = None
        self._broadcast: Parcel | None = None  # its buffer is reused
        self._schedule = Schedule({}, 1)
        self._is_serial = False  # silos cannot run in other processes

    def fit(self, method: Method, broadcast: Broadcast, *, evaluate: bool = True) -> Iterator[Reply]:
        work = self._make_work(method, broadcast, "fit", evaluate=evaluate)
        splits: set[Split] = {"train", *(method.eval_splits if evaluate else ())}
        splits |= set(method.local_eval_splits if evaluate else ())
        num_done = 0
        for reply in self._spread(work, splits):
            num_done += 1
            yield reply
        yield from super().fit(method, skip_participants(broadcast, num_done), evaluate=evaluate)

    def query(self, method: Method, task: str, broadcast: Broadcast, splits: Sequence[Split]) -> Iterator[Reply]:
        work = self._make_work(method, broadcast, "query", task=task, splits=splits)
        num_done = 0
        for reply in self._spread(work, splits):
            num_done += 1
            yield reply
        yield from super().query(method, task, skip_participants(broadcast, num_done), splits)

    def _make_work(self, method: Method, broadcast: Broadcast, call: str, **arguments: Any) -> Work:
        shows_progress = self.on_progress is not ignore_progress
        return Work(TorchSettings.read(), method, broadcast, call, arguments, shows_progress)

    def release(self) -> None:
        """End the worker processes; a later round starts them again."""
        self._broadcast = None
        if self._owns_pool:
            self._pool.close()

    def _spread(self, work: Work, splits: Collection[Split]) -> Iterator[Reply]:
        """Run silos in worker processes; where that is impossible, warn and return without the remaining replies."""
        if self._is_serial:
            return
        try:
            yield from self._run(work, splits)
        except CannotSpreadError as e:
            self._pool.close()
            self._is_serial = True
            self.on_warning(f"engine=processes: {e}; silos run one after another, with the same results")
        except GeneratorExit:
            raise  # the caller wants no further reply
        except BaseException:
            self._pool.close()  # a message may be half received
            raise

    def _run(self, work: Work, splits: Collection[Split]) -> Iterator[Reply]:
        if not can_start_processes():
            raise CannotSpreadError("this system cannot send memory from process to process")
        self._finish_schedule()
        self._pack(work)
        sizes = {
            name: sum(len(self.silos[name].examples(split).y) for split in splits)
            for name in sorted(work.broadcast.participants)
        }
        held = MAX_HELD_BYTES // max(1, size_in_bytes(work.broadcast.model_state))
        schedule = self._schedule = Schedule(sizes, max(held, 2 * self._pool.num_workers), splits)
        try:
            for name in schedule.names:
                self._exchange(schedule, block=False)
                while name not in schedule.results:
                    self._exchange(schedule, block=True)
                schedule.num_returned += 1
                reply, client_state = take_result(schedule.results.pop(name))
                if work.call == "fit":
                    self.client_states[name] = client_state
                yield reply
        finally:
            schedule.waiting.clear()

    def _finish_schedule(self) -> None:
        """Complete the message before, whose replies the caller may still need: its shared memory is used again."""
        self._schedule.window = len(self._schedule.names)
        while self._schedule.waiting or any(worker.tasks for worker in self._pool.workers):
            self._exchange(self._schedule, block=True)

    def _pack(self, work: Work) -> None:
        """Put what silos receive, and before the first message all data, into shared memory."""
        try:
            if self._data is None:
                parts = EngineParts(
                    {name: silo for name, silo in self.silos.items() if not has_lazy_inputs(silo)},
                    self.public,
                    self.net,
                    self.initial_tensors,
                    self.seed,
                    self.dtype,
                )
                self._data = pack(parts)
                shared: EngineParts = self._data.unpack()
                self.silos |= shared.silos  # so that the data are in memory once
                self.public = shared.public
            self._broadcast = pack(work, self._broadcast and self._broadcast.buffer)
        except (MemoryError, OSError):
            raise  # the memory for the data, whatever their classes are
        except Exception as e:  # of any kind: layers of torch and classes of users raise what they like
            raise CannotSpreadError(explain_pickling_error(describe_error(e))) from None
        if any(b"__main__" in parcel.pickled for parcel in (self._data, self._broadcast)):
            raise CannotSpreadError(explain_pickling_error("not the script that is running"))

    def _exchange(self, schedule: Schedule, *, block: bool) -> None:
        """Give tasks to idle workers, then take what workers have sent."""
        try:
            self._pool.start()
        except OSError as e:
            raise CannotSpreadError(f"no process can be started ({describe_error(e)})") from None
        self._give_tasks(schedule, 1)
        self._give_tasks(schedule, 2, num_left=2 * self._pool.num_workers)  # for those done first
        for worker, answer in self._pool.receive(block=block):
            if answer is None:
                self._replace_worker(worker, schedule)
            else:
                self._take_answer(worker, schedule, *answer)

    def _give_tasks(self, schedule: Schedule, depth: int, num_left: int = 0) -> None:
        """Give a task to workers that have fewer than so many; with a second one they need not wait for this process.

        A lazy silo comes with its task, so a worker receives it only when it has no other.
        """
        for worker in self._pool.workers:
            may_take = len(worker.tasks) < depth and len(schedule.waiting) > num_left
            name = schedule.choose_next() if may_take else ""
            if name and (not worker.tasks or not has_lazy_inputs(self.silos[name])):
                schedule.waiting.remove(name)
                worker.add_task(name)
                self._send_task(worker, name, schedule.splits)

    def _send_task(self, worker: WorkerHandle, name: str, splits: Collection[Split]) -> None:
        assert self._data, "a message is packed before its tasks"
        assert self._broadcast, "a message is packed before its tasks"
        lazy_silo = self._load_silo(name, splits) if has_lazy_inputs(self.silos[name]) else None
        try:
            if worker.data is not self._data:
                worker.channel.send_parcel(Slot.DATA, self._data)
                worker.data = self._data
            if worker.broadcast is not self._broadcast:
                worker.channel.send_parcel(Slot.BROADCAST, self._broadcast)
                worker.broadcast = self._broadcast
            client_state: Tensors = self.client_states.get(name, {})
            worker.channel.send((name, client_state, lazy_silo), worker.tasks[name])
        except ConnectionError:  # no other error of the system, such as a lack of memory for the task
            return  # the process has ended, which is read from its connection

    def _load_silo(self, name: str, splits: Collection[Split]) -> Silo:
        """Return a lazy silo with the inputs of these splits in memory.

        Its file is open in this process alone: a worker receives a silo with its task, and keeps it for that task.
        """
        silo = self.silos[name]
        train, validation, test = (
            self._load_split(name, split) if split in splits else hide_inputs(silo.examples(split)) for split in SPLITS
        )
        return replace(silo, train=train, validation=validation, test=test, public=None, calibration=None)

    def _take_answer(self, worker: WorkerHandle, schedule: Schedule, kind: str, *content: Any) -> None:
        if kind == "ready":
            worker.is_ready = True
        elif kind == "progress":
            self.on_progress(*content)
        elif kind == "warning":
            self.on_warning(*content)
        elif kind == "unloadable":
            raise CannotSpreadError(explain_pickling_error(content[1]))
        else:
            del worker.tasks[content[0]]
            schedule.results[content[0]] = (kind, *content[1:])

    def _replace_worker(self, worker: WorkerHandle, schedule: Schedule) -> None:
        """Let another process do the work of one that has ended."""
        exit_code, names = self._pool.remove(worker), list(worker.tasks)
        ended = f"worker process {worker.process.pid} ended with exit code {exit_code}"
        if not worker.is_ready:
            raise CannotSpreadError(f"{ended} at its start")
        if not names:
            return
        name = names[0]  # the one that ran
        schedule.attempts[name] += 1
        if schedule.attempts[name] == MAX_ATTEMPTS:
            raise ResumableError(
                f"{ended}, the second one at silo {name}; its memory may be too small: run the same command again to "
                "resume, with fewer workers or engine=serial"
            )
        schedule.waiting.update(names)
        self.on_warning(f"{ended}; silo {name} starts again in another process")


def has_lazy_inputs(silo: Silo) -> bool:
    """Return whether a silo reads inputs when it takes part, also one without training examples of its own."""
    return any(is_lazy(silo.examples(split).x) for split in SPLITS)


def hide_inputs(examples: Examples) -> Examples:
    """Return examples whose inputs cannot be read."""
    x: Any = LazyTensor(_raise_unread, examples.x.shape, examples.x.dtype)
    return examples._replace(x=x)


def _raise_unread(_positions: Tensor) -> Tensor:
    raise RuntimeError("these inputs were not sent to this process")


def take_result(result: tuple[Any, ...]) -> tuple[Reply, Tensors]:
    """Return the reply and the client state of a silo, or raise the error of its process."""
    kind, *content = result
    if kind == "failed":
        error, remote_traceback = content
        raise error from RemoteTraceback(remote_traceback)
    reply, client_state = content
    return reply, client_state


def explain_pickling_error(error: str) -> str:
    """Return why a network or a method cannot be sent to another process."""
    return f"workers need classes and functions that a module can import ({error})"


def skip_participants(broadcast: Broadcast, count: int) -> Broadcast:
    """Return a broadcast without its first participants."""
    return broadcast._replace(participants=tuple(sorted(broadcast.participants)[count:]))
