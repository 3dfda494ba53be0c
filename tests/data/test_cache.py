import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from making import as_folder, as_zip, idx_files, png

from uefl.data import cache
from uefl.data.images import Images
from uefl.data.places import cache_folder
from uefl.data.sources import read

FILES = {f"{s}/{c}/{i}.png": png(n) for n, (s, c, i) in enumerate(
    (s, c, i) for s in ("a", "b") for c in ("x", "y") for i in range(3))}  # fmt: skip


def cached():
    return sorted((cache_folder() / "decoded").glob("*"))


def same(one, two):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(vars(one).values(), vars(two).values(), strict=True)
    )


def test_the_second_load_is_a_memory_map_of_the_same(tmp_path):
    path = str(as_zip(tmp_path / "t.zip", FILES))
    first = read("folder", path)
    (file,) = cached()
    wrote = file.stat().st_mtime_ns
    second = read("folder", path)
    assert same(first, second)
    assert file.stat().st_mtime_ns == wrote, "read, not written again"
    assert str(file) in Path("/proc/self/maps").read_text()
    assert second.silos == ("a", "b")


def test_the_same_bytes_elsewhere_are_the_same_entry_and_other_bytes_another(tmp_path):
    read("folder", str(as_zip(tmp_path / "t.zip", FILES)))
    (tmp_path / "copy.zip").write_bytes((tmp_path / "t.zip").read_bytes())
    read("folder", str(tmp_path / "copy.zip"))
    assert len(cached()) == 1
    read("folder", str(as_zip(tmp_path / "t.zip", FILES | {"a/x/9.png": png(99)})))
    assert len(cached()) == 2
    read("folder", str(tmp_path / "copy.zip"), size=4)
    assert len(cached()) == 3


def test_a_changed_folder_is_read_again(tmp_path):
    before = read("folder", str(as_folder(tmp_path, FILES)))
    time.sleep(0.01)
    as_folder(tmp_path, {"a/x/0.png": png(99)})
    after = read("folder", str(tmp_path))
    assert not torch.equal(before.x[0], after.x[0])


def damaged(data, how):
    if how == "payload":
        return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
    if how == "about":
        return data.replace(b'"x\\', b'"z\\', 1)
    return {"empty": b"", "truncated": data[: len(data) // 2], "noise": os.urandom(500), "huge": b"\xff" * 64}[how]


@pytest.mark.parametrize("how", ["empty", "truncated", "noise", "huge", "payload", "about"])
def test_a_damaged_entry_is_decoded_anew(tmp_path, how):
    path = str(as_zip(tmp_path / "t.zip", FILES))
    first = read("folder", path)
    (file,) = cached()
    whole = file.read_bytes()
    assert damaged(whole, how) != whole
    # A new file, as a crash of the machine would leave it: writing into a mapped one would change `first` itself.
    file.unlink()
    file.write_bytes(damaged(whole, how))
    assert cache.load(file) is None
    assert same(first, read("folder", path))
    assert file.read_bytes() == whole


def test_a_refused_source_leaves_nothing_in_the_cache(tmp_path):
    path = str(as_zip(tmp_path / "t.zip", FILES | {"b/y/9.png": b"?"}))
    with pytest.raises(ValueError, match=r"9\.png"):
        read("folder", path)
    assert cached() == []


WRITER = """
import sys, torch
from pathlib import Path
from uefl.data import cache
from uefl.data.images import Images
x = torch.full((2000, 3, 64, 64), 7, dtype=torch.uint8)
n = len(x)
images = Images("big", x, torch.zeros(n, dtype=torch.int64), ("a",), torch.zeros(n, dtype=torch.bool))
print("ready", flush=True)
while True:
    cache.store(images, Path(sys.argv[1]))
"""


def test_a_killed_writer_leaves_the_whole_or_nothing(tmp_path):
    file = tmp_path / "big.safetensors"
    for wait in (0.02, 0.1):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert not file.exists() or cache.load(file) is not None
    assert {p.suffix for p in tmp_path.iterdir()} <= {".safetensors", ".tmp"}


def tiny():
    return Images("t", torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1).long(), ("a",), torch.zeros(1).bool())


def test_a_write_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "taken.safetensors").mkdir()
    (tmp_path / "taken.safetensors" / "x").write_bytes(b"")
    with pytest.raises(OSError, match="taken"):
        cache.store(tiny(), tmp_path / "taken.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.safetensors"]


def test_what_the_killed_left_is_swept_after_a_day(tmp_path):
    old, young = tmp_path / ".old-1.tmp", tmp_path / ".young-1.tmp"
    for left in (old, young):
        as_folder(left, {"half": b"half"})
    os.utime(old, (1, 1))
    cache.store(tiny(), tmp_path / "t.safetensors")
    assert (old.exists(), young.exists()) == (False, True)
    assert (tmp_path / "t.safetensors").stat().st_mode & 0o044, "a group may share the cache"


def test_images_arrive_also_where_nothing_can_be_cached(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert len(read("folder", str(as_folder(tmp_path / "t", FILES))).y) == len(FILES)


def test_a_library_without_write_permission_stays_untouched(tmp_path, monkeypatch):
    as_folder(tmp_path / "library" / "mnist", idx_files())
    (tmp_path / "library").chmod(0o555)
    monkeypatch.setenv("UEFL_DATA", str(tmp_path / "library"))
    try:
        assert len(read("mnist").y) == 8
        assert [p.name for p in (tmp_path / "library").iterdir()] == ["mnist"]
        assert len(cached()) == 1
    finally:
        (tmp_path / "library").chmod(0o755)


def test_data_are_looked_for_in_uefl_data_then_in_the_cache(tmp_path, monkeypatch):
    as_folder(tmp_path / "xdg" / "uefl" / "mnist", idx_files((1, 1)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert read("mnist").y.tolist() == [1] * 4
    as_folder(tmp_path / "mine" / "mnist", idx_files((2, 2)))
    monkeypatch.setenv("UEFL_DATA", str(tmp_path / "mine"))
    assert read("mnist").y.tolist() == [2] * 4
    assert read("mnist", str(tmp_path / "xdg" / "uefl" / "mnist")).y.tolist() == [1] * 4
