import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from file_factories import make_idx_files, make_png, write_folder, write_zip

from uefl.core.paths import get_cache_folder
from uefl.data import SOURCES, cache, sources
from uefl.data.images import Images
from uefl.data.readers.embedded import read_digits
from uefl.data.sources import read_images

FILES = {f"{s}/{c}/{i}.png": make_png(n) for n, (s, c, i) in enumerate(
    (s, c, i) for s in ("a", "b") for c in ("x", "y") for i in range(3))}  # fmt: skip


def list_cached_files():
    return sorted((get_cache_folder() / "decoded").glob("*"))


def are_equal(first, second):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(vars(first).values(), vars(second).values(), strict=True)
    )


def test_second_load_is_a_memory_map_of_the_same_images(tmp_path):
    path = str(write_zip(tmp_path / "t.zip", FILES))
    first = read_images("folder", path)
    (file,) = list_cached_files()
    written_at = file.stat().st_mtime_ns
    second = read_images("folder", path)
    assert are_equal(first, second)
    assert file.stat().st_mtime_ns == written_at, "the file is not written again"
    assert str(file) in Path("/proc/self/maps").read_text()
    assert second.silos == ("a", "b")


def test_cache_key_depends_on_bytes_and_image_size_but_not_on_the_path(tmp_path):
    read_images("folder", str(write_zip(tmp_path / "t.zip", FILES)))
    (tmp_path / "copy.zip").write_bytes((tmp_path / "t.zip").read_bytes())
    read_images("folder", str(tmp_path / "copy.zip"))
    assert len(list_cached_files()) == 1
    read_images("folder", str(write_zip(tmp_path / "t.zip", FILES | {"a/x/9.png": make_png(99)})))
    assert len(list_cached_files()) == 2
    read_images("folder", str(tmp_path / "copy.zip"), image_size=4)
    assert len(list_cached_files()) == 3


def test_embedded_images_are_decoded_once_per_version_of_their_package(monkeypatch):
    read: list[str] = []
    source = replace(SOURCES["digits"], reader=lambda *_: read.append("digits") or read_digits())
    monkeypatch.setattr(sources, "SOURCES", {"digits": source})
    first, second = read_images("digits"), read_images("digits")
    assert are_equal(first, second)
    assert read == ["digits"]
    monkeypatch.setattr(sources, "version", lambda _package: "9.9")
    read_images("digits")
    assert read == ["digits", "digits"]
    assert len(list_cached_files()) == 2


def test_changed_folder_is_read_again(tmp_path):
    before = read_images("folder", str(write_folder(tmp_path, FILES)))
    file = tmp_path / "a/x/0.png"
    written_at = file.stat().st_mtime_ns
    write_folder(tmp_path, {"a/x/0.png": make_png(99)})
    os.utime(file, ns=(written_at, written_at + 10_000_000))  # the clock of a file system may tick later
    after = read_images("folder", str(tmp_path))
    assert not torch.equal(before.x[0], after.x[0])


def damage(data, how):
    if how == "payload":
        return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
    if how == "fields":
        return data.replace(b'"x\\', b'"z\\', 1)
    return {"empty": b"", "truncated": data[: len(data) // 2], "noise": os.urandom(500), "huge": b"\xff" * 64}[how]


@pytest.mark.parametrize("how", ["empty", "truncated", "noise", "huge", "payload", "fields"])
def test_damaged_cache_file_is_decoded_again(tmp_path, how):
    path = str(write_zip(tmp_path / "t.zip", FILES))
    first = read_images("folder", path)
    (file,) = list_cached_files()
    complete = file.read_bytes()
    assert damage(complete, how) != complete
    # A new file, as after a crash of the machine: writing into the mapped file would change `first`.
    file.unlink()
    file.write_bytes(damage(complete, how))
    assert cache.load(file) is None
    assert are_equal(first, read_images("folder", path))
    assert file.read_bytes() == complete


def test_rejected_source_is_not_cached(tmp_path):
    path = str(write_zip(tmp_path / "t.zip", FILES | {"b/y/9.png": b"?"}))
    with pytest.raises(ValueError, match=r"9\.png"):
        read_images("folder", path)
    assert list_cached_files() == []


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


def test_killed_writer_leaves_a_complete_file_or_none(tmp_path):
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


def make_tiny_images():
    return Images("t", torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1).long(), ("a",), torch.zeros(1).bool())


def test_failed_write_leaves_no_files(tmp_path):
    (tmp_path / "taken.safetensors").mkdir()
    (tmp_path / "taken.safetensors" / "x").write_bytes(b"")
    with pytest.raises(OSError, match="taken"):
        cache.store(make_tiny_images(), tmp_path / "taken.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.safetensors"]


def test_stale_temporary_folders_are_removed_after_a_day(tmp_path):
    old, recent = tmp_path / ".old-1.tmp", tmp_path / ".recent-1.tmp"
    for folder in (old, recent):
        write_folder(folder, {"half": b"half"})
    os.utime(old, (1, 1))
    cache.store(make_tiny_images(), tmp_path / "t.safetensors")
    assert (old.exists(), recent.exists()) == (False, True)


def test_decoded_images_are_readable_by_their_owner_only(tmp_path):
    cache.store(make_tiny_images(), tmp_path / "decoded" / "t.safetensors")
    assert stat.S_IMODE((tmp_path / "decoded").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "decoded" / "t.safetensors").stat().st_mode) == 0o600


def test_images_are_read_even_if_the_cache_is_not_writable(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert len(read_images("folder", str(write_folder(tmp_path / "t", FILES))).y) == len(FILES)


def test_data_folder_without_write_permission_is_not_modified(tmp_path, monkeypatch):
    write_folder(tmp_path / "library" / "mnist", make_idx_files())
    (tmp_path / "library").chmod(0o555)
    monkeypatch.setenv("UEFL_DATA", str(tmp_path / "library"))
    try:
        assert len(read_images("mnist").y) == 8
        assert [p.name for p in (tmp_path / "library").iterdir()] == ["mnist"]
        assert len(list_cached_files()) == 1
    finally:
        (tmp_path / "library").chmod(0o755)


def test_data_are_searched_in_uefl_data_then_in_the_cache(tmp_path, monkeypatch):
    write_folder(tmp_path / "xdg" / "uefl" / "mnist", make_idx_files((1, 1)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert read_images("mnist").y.tolist() == [1] * 4
    write_folder(tmp_path / "data" / "mnist", make_idx_files((2, 2)))
    monkeypatch.setenv("UEFL_DATA", str(tmp_path / "data"))
    assert read_images("mnist").y.tolist() == [2] * 4
    assert read_images("mnist", str(tmp_path / "xdg" / "uefl" / "mnist")).y.tolist() == [1] * 4
