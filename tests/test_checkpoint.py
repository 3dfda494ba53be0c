"""A checkpoint is the server and what silos keep, whole; a kill leaves the old one or the new one."""

import os
from dataclasses import replace

import pytest
import torch
from stripes import LOCAL, ROUNDS, WORDS, clients, play, same

from uefl.algorithms import UEFL, Alone, Book, FedAvg, Scaffold
from uefl.checkpoint import load_checkpoint, load_tensors, save_checkpoint, save_tensors, write_text
from uefl.engines import Serial, Stacked
from uefl.federation import Server

EAGER = Book(words=6, segments=2, warm_up=1, gamma=0.0, errors=0)


def example():
    state = {
        "w": torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last),
        "half": torch.randn(3).bfloat16(),
        "double": torch.randn(2, dtype=torch.float64),
        "count": torch.tensor(7),
        WORDS: torch.zeros(0, 5),
        "a.name/with a slash": torch.ones(1),
    }
    return Server(
        ("ada", "bob/1", "ümit"),
        state,
        torch.ones(3, 0, dtype=torch.bool),
        {"first_words": torch.tensor(3), "c": torch.randn(2)},
        round=4,
        iteration=2,
        settled=True,
        pending={"round": 4, "silos": {"ada": {"accuracy": 0.1 + 0.2}}, "who": ["ada"], "judged": False},
    )


def test_everything_comes_back_as_it_was(tmp_path):
    server = example()
    kept = {
        "ada": {"m.v": torch.randn(2)},
        "bob/1": {"optimizer.0.step.w": torch.tensor(3.0)},
        "ümit": {"b": torch.ones(1)},
    }
    save_checkpoint(tmp_path / "c", server, kept)
    found, memory = load_checkpoint(tmp_path / "c", "cpu")
    for field in ("silos", "round", "iteration", "settled", "pending", "records"):
        assert getattr(found, field) == getattr(server, field), field
    for one, other in ((found.state, server.state), (found.memory, server.memory)):
        assert same(one, other)
        assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in other.items()}
        assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in other.items()}
    assert torch.equal(found.access, server.access)
    assert found.access.dtype == torch.bool
    assert memory.keys() == kept.keys()
    assert all(same(memory[who], kept[who]) for who in kept)


def test_the_ledger_comes_back_bit_by_bit(tmp_path):
    access = torch.rand(3, 17, generator=torch.Generator().manual_seed(0)) > 0.5
    save_checkpoint(tmp_path / "c", example().but(access=access), {})
    assert torch.equal(load_checkpoint(tmp_path / "c", "cpu")[0].access, access)


def test_saving_leaves_no_temporary_file_and_changes_no_tensor(tmp_path):
    server = example()
    before = {n: t.clone() for n, t in server.state.items()}
    save_checkpoint(tmp_path / "c", server, {})
    assert same(server.state, before)
    assert os.listdir(tmp_path) == ["c"]


def test_a_torn_temporary_file_hurts_nobody(tmp_path):
    """What a kill in the middle of writing leaves behind, under this process's name and another's."""
    save_checkpoint(tmp_path / "c", example(), {})
    whole = (tmp_path / "c").read_bytes()
    for pid in (os.getpid(), 1):
        (tmp_path / f".c.{pid}").write_bytes(whole[: len(whole) // 2])
    assert load_checkpoint(tmp_path / "c", "cpu")[0].round == 4
    save_checkpoint(tmp_path / "c", example().but(round=5), {})
    assert load_checkpoint(tmp_path / "c", "cpu")[0].round == 5


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", example(), {})
    write_text(tmp_path / "t", "old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def fails(*_):
                raise OSError("disk full")

            patch.setattr(os, name, fails)
            with pytest.raises(OSError, match="disk full"):
                save_checkpoint(tmp_path / "c", example().but(round=9), {})
            with pytest.raises(OSError, match="disk full"):
                write_text(tmp_path / "t", "new")
        assert load_checkpoint(tmp_path / "c", "cpu")[0].round == 4
        assert (tmp_path / "t").read_text() == "old"


def test_tensors_travel_with_a_header(tmp_path):
    save_tensors(tmp_path / "m", {"x": torch.arange(3)}, {"classes": ["a", "ü"], "n": 1.5})
    tensors, values = load_tensors(tmp_path / "m")
    assert tensors["x"].tolist() == [0, 1, 2]
    assert values == {"classes": ["a", "ü"], "n": 1.5}


RUNS = {
    "uefl": UEFL(**ROUNDS, codebook=EAGER),
    "newest words, kept optimisers": UEFL(
        **{**ROUNDS, "iterations": 3, "local": replace(LOCAL, fresh=False)}, codebook=replace(EAGER, kept="newest")
    ),
    "local norms, some silos": FedAvg(**ROUNDS, norms="local", participation=2),
    "clipped": FedAvg(**{**ROUNDS, "local": replace(LOCAL, clip=0.5)}),
    "scaffold, clipped": Scaffold(**{**ROUNDS, "local": replace(Scaffold().suited(LOCAL), clip=0.5)}),
    "alone": Alone(**ROUNDS),
}


def stripped(records):
    """Without the clock."""
    return [
        {
            **{n: v for n, v in r.items() if "seconds" not in n},
            "silos": {w: {n: v for n, v in mine.items() if n != "seconds"} for w, mine in r["silos"].items()},
        }
        for r in records
    ]


@pytest.mark.parametrize("kind", [Serial, Stacked])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_reloaded_after_every_round_ends_in_the_same_bits(name, kind, tmp_path):
    method = RUNS[name]
    engine = clients(method, engine=kind)
    whole, records = play(method, engine)
    server, found = None, []
    for _ in range(method.budget):
        fresh = clients(method, engine=kind)
        if server is not None:
            server, fresh.memory = load_checkpoint(tmp_path / "c", "cpu")
        server, more = play(method, fresh, 1, server)
        found += more
        save_checkpoint(tmp_path / "c", server, fresh.memory)
    assert same(server.state, whole.state)
    assert same(server.memory, whole.memory)
    assert torch.equal(server.access, whole.access)
    assert stripped(found) == stripped(records)
    assert fresh.memory.keys() == engine.memory.keys()
    assert all(same(fresh.memory[who], engine.memory[who]) for who in engine.memory)


def test_names_come_back_in_the_order_they_had(tmp_path):
    """Members 0 to 11 would be sorted as 0, 1, 10, 11, 2, and be given each other's words."""
    state = {f"members.{i}.codebook.words": torch.ones(1) for i in range(12)}
    save_checkpoint(tmp_path / "c", example().but(state=state), {})
    assert list(load_checkpoint(tmp_path / "c", "cpu")[0].state) == list(state)
