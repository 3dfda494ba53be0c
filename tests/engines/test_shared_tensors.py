"""Values that go through shared memory come back with the same bits, memory layout and identity."""

import os
import socket
from pathlib import Path

import pytest
import torch

from uefl.core.federation import Examples, Reply, Silo
from uefl.engines.processes.channel import Channel, Slot
from uefl.engines.processes.shared_tensors import ALIGNMENT, pack


def list_shared_memory() -> list[str]:
    """Mapped and open memory of this process without a name in any folder."""
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:uefl" in line]
    handles = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [*mapped, *(target for target in handles if "memfd:uefl" in target)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.tensor(3),
        torch.tensor([True, False, True]),
        torch.empty(0, 7),
        torch.arange(5, dtype=torch.int32),
        torch.randn(3).bfloat16(),
        torch.randn(3, dtype=torch.float64),
    ],
    ids=lambda t: f"{t.dtype} {list(t.shape)} {list(t.stride())}",
)
def test_a_tensor_keeps_its_bits_type_and_strides(tensor):
    before = torch.ones(1, dtype=torch.uint8)  # so that the tensor is not the first in the buffer
    _, (first,), copy = pack((before, [tensor], {"again": tensor})).unpack()
    assert torch.equal(first, tensor)
    assert (first.dtype, first.stride()) == (tensor.dtype, tensor.stride())
    assert copy["again"] is first, "a tensor that occurs twice is stored once"
    assert not tensor.numel() or first.data_ptr() % ALIGNMENT == 0


def test_a_slice_is_stored_without_the_rest_of_its_tensor():
    parcel = pack(torch.randn(1000, 1000)[:, 0])
    assert parcel.buffer.num_bytes <= 1000 * 4 + ALIGNMENT


def test_a_network_keeps_frozen_and_tied_weights():
    layer = torch.nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    net = torch.nn.Sequential(layer, torch.nn.Linear(3, 3))
    net[1].weight = layer.weight
    copied = pack(net).unpack()
    assert copied[1].weight is copied[0].weight
    assert isinstance(copied[0].weight, torch.nn.Parameter)
    assert (copied[0].weight.requires_grad, copied[0].bias.requires_grad) == (True, False)
    assert torch.equal(copied[0].weight, layer.weight)


def test_views_change_with_the_next_value_and_copies_do_not():
    parcel = pack(torch.zeros(4))
    view, copy = parcel.unpack(), parcel.unpack(copy=True)
    assert pack(torch.ones(4), parcel.buffer).buffer is parcel.buffer, "a buffer that is large enough is used again"
    assert (view.tolist(), copy.tolist()) == ([1.0] * 4, [0.0] * 4)


def test_messages_of_any_size_arrive_in_order_and_their_memory_is_given_back():
    before, (one, other) = list_shared_memory(), socket.socketpair()
    sender, receiver = Channel(one), Channel(other)
    for n in (3, 5, 4, 100_000):  # the buffer grows twice
        sender.send(Reply("a", n, {"w": torch.full((n,), float(n))}, note="x" * n))
        reply = receiver.receive().parcel.unpack(copy=True)
        assert (reply.num_examples, reply.note) == (n, "x" * n)
        assert torch.equal(reply.tensors["w"], torch.full((n,), float(n)))
    sender.send("no tensor")
    assert receiver.receive().parcel.unpack() == "no tensor"
    assert len(list_shared_memory()) > len(before)
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()
    del sender, receiver, one, other
    assert list_shared_memory() == before


def test_a_parcel_for_several_ends_is_in_memory_once():
    examples = Examples(torch.randn(5, 2), torch.arange(5))
    parcel, ends = pack(Silo("a", examples, examples, examples)), [socket.socketpair() for _ in range(2)]
    silos = []
    for one, other in ends:
        with one, other:
            Channel(one).send_parcel(Slot.DATA, parcel)
            silos.append(Channel(other).receive().parcel.unpack())
    silos[0].train.x.fill_(7)
    assert silos[1].test.x.tolist() == parcel.unpack().train.x.tolist() == [[7.0, 7.0]] * 5
