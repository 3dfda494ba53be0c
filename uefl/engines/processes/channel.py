"""Messages between two processes of one machine: tensors in shared memory, all else through a socket."""

from __future__ import annotations

import pickle
import socket
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from uefl.engines.processes.shared_tensors import Parcel, SharedBuffer, pack

_HEADER = struct.Struct("!Q")  # bytes of a message


class Slot(IntEnum):
    """What a message is about; each kind has its own shared memory."""

    DATA = 0  # silos and network, once per engine
    BROADCAST = 1  # what all silos of a message receive
    TASK = 2  # one silo's part, and its answer
    NEXT_TASK = 3  # of the task that a worker receives while it runs another one


TASK_SLOTS = (Slot.TASK, Slot.NEXT_TASK)


class Message(NamedTuple):
    """A received value that is not unpacked yet, since unpacking may fail."""

    slot: Slot
    parcel: Parcel


class Channel:
    """One end of a connection; the other end may be in another process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sent: dict[Slot, SharedBuffer] = {}  # buffers that the other end has
        self._received: dict[Slot, SharedBuffer] = {}

    def send(self, value: Any, slot: Slot = Slot.TASK) -> None:
        """Send a value; its tensors stay where they are until the next value of this end in the slot."""
        self.send_parcel(slot, pack(value, self._sent.get(slot)))

    def send_parcel(self, slot: Slot, parcel: Parcel) -> None:
        """Send a packed value, and its buffer unless the other end already has it."""
        buffer, handles, num_bytes = parcel.buffer, [], 0
        if buffer and self._sent.get(slot) is not buffer:
            self._sent[slot], num_bytes, handles = buffer, buffer.num_bytes, [buffer.handle]
        content = pickle.dumps((int(slot), num_bytes, parcel.pickled, parcel.layouts))
        socket.send_fds(self.connection, [_HEADER.pack(len(content))], handles)
        self.connection.sendall(content)

    def receive(self) -> Message:
        """Wait for the next message; `EOFError` means that the other end is closed."""
        header, handles, _, _ = socket.recv_fds(self.connection, _HEADER.size, 1, socket.MSG_WAITALL)
        if len(header) < _HEADER.size:
            raise EOFError
        slot_number, num_bytes, pickled, layouts = pickle.loads(self._receive_bytes(*_HEADER.unpack(header)))
        slot = Slot(slot_number)
        if handles:
            self._received[slot] = SharedBuffer(num_bytes, handles[0])
        return Message(slot, Parcel(pickled, layouts, self._received[slot] if layouts else None))

    def _receive_bytes(self, count: int) -> bytearray:
        content = bytearray(count)
        rest = memoryview(content)
        while rest:
            received = self.connection.recv_into(rest)
            if not received:
                raise EOFError
            rest = rest[received:]
        return content

    def close(self) -> None:
        """Close this end; the other one receives an `EOFError`."""
        self.connection.close()
