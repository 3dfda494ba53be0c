import hashlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from making import idx_files

from uefl.data import sources
from uefl.data.addresses import ADDRESSES
from uefl.data.download import fetch
from uefl.download import Address, fetch_file
from uefl.errors import InputError

BODY = os.urandom(1 << 20)


class Server(ThreadingHTTPServer):
    """A real server on this machine: it knows ranges, unless told not to, and may hang up in the middle."""

    daemon_threads = True

    def __init__(self, files):
        self.files = files
        self.hang_up_after = None  # bytes of a body
        self.ranges = True
        self.asked = []  # (path, first byte)
        super().__init__(("127.0.0.1", 0), Handler)

    def address(self, name, digest=None):
        body = self.files.get(name, b"")
        return Address(f"http://127.0.0.1:{self.server_port}/{name}", digest or hashlib.md5(body).hexdigest())


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        body = self.server.files.get(self.path[1:])
        if body is None:
            self.send_error(404)
            return
        wanted = self.headers.get("Range") if self.server.ranges else None
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        self.server.asked.append((self.path[1:], first))
        if first >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        cut = self.server.hang_up_after
        self.wfile.write(body[first : None if cut is None else first + cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server({"file.bin": BODY}) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_file_arrives_whole_under_either_checksum(server, tmp_path):
    fetch_file(server.address("file.bin"), tmp_path / "md5")
    fetch_file(server.address("file.bin", hashlib.sha256(BODY).hexdigest()), tmp_path / "sha", progress=True)
    assert (tmp_path / "md5").read_bytes() == (tmp_path / "sha").read_bytes() == BODY


def test_what_broke_off_goes_on_where_it_broke(server, tmp_path):
    server.hang_up_after = 400_000
    for number in range(2):
        with pytest.raises(InputError, match="the connection broke off after"):
            fetch("thing", [server.address("file.bin")], tmp_path / "thing")
        assert not (tmp_path / "thing").exists()
        assert len(server.asked) == number + 1
    server.hang_up_after = None
    folder = fetch("thing", [server.address("file.bin")], tmp_path / "thing")
    assert (folder / "file.bin").read_bytes() == BODY
    assert [first for _, first in server.asked] == [0, 400_000, 800_000]


CLIENT = """
import sys
from pathlib import Path
from uefl.download import Address, fetch_file
fetch_file(Address(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))
"""


def test_a_killed_client_goes_on_where_it_was_killed(server, tmp_path):
    release = threading.Event()
    half = len(BODY) // 2

    class Slow(Handler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY[:half])
            release.wait(20)

    server.RequestHandlerClass = Slow
    address, part = server.address("file.bin"), tmp_path / "file.bin.part"
    client = subprocess.Popen([sys.executable, "-c", CLIENT, *address, str(tmp_path / "file.bin")])
    for _ in range(1000):
        if part.exists() and part.stat().st_size >= half // 2:
            break
        release.wait(0.02)
    client.kill()
    client.wait()
    release.set()
    left = part.stat().st_size
    assert 0 < left <= half
    assert not (tmp_path / "file.bin").exists()
    server.RequestHandlerClass = Handler
    fetch_file(address, tmp_path / "file.bin")
    assert server.asked == [("file.bin", left)]
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    server.ranges = False
    fetch_file(server.address("file.bin"), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_a_part_that_is_already_whole_needs_no_luck(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY)
    fetch_file(server.address("file.bin"), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_a_wrong_checksum_is_refused_and_the_next_attempt_starts_afresh(server, tmp_path):
    with pytest.raises(InputError, match=r"/file.bin: the file does not have the published checksum 0000"):
        fetch("thing", [server.address("file.bin", "0" * 32)], tmp_path / "thing")
    assert not (tmp_path / "thing").exists()
    assert not list(tmp_path.glob("*/*"))
    (tmp_path / ".thing.download" / "file.bin.part").write_bytes(b"other bytes")
    with pytest.raises(InputError, match="checksum"):
        fetch("thing", [server.address("file.bin")], tmp_path / "thing")
    fetch("thing", [server.address("file.bin")], tmp_path / "thing")
    assert (tmp_path / "thing" / "file.bin").read_bytes() == BODY


def test_a_data_set_appears_only_when_it_is_whole(server, tmp_path):
    server.files |= {"a": b"1", "b": b"2"}
    missing = Address(server.address("c").url, "0" * 32)
    with pytest.raises(InputError, match=r"thing could not be downloaded \(Not Found\); put a, b, c from http"):
        fetch("thing", [server.address("a"), server.address("b"), missing], tmp_path / "thing")
    assert not (tmp_path / "thing").exists()
    server.asked.clear()
    server.files["c"] = b"3"
    fetch("thing", [server.address(n) for n in "abc"], tmp_path / "thing")
    assert [name for name, _ in server.asked] == ["c"], "what is there is not fetched again"
    assert sorted(p.name for p in (tmp_path / "thing").iterdir()) == ["a", "b", "c"]


def test_two_runs_that_start_together_fetch_once(server, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(fetch, "thing", [server.address("file.bin")], tmp_path / "thing") for _ in range(4)]
        assert {job.result() for job in jobs} == {tmp_path / "thing"}
    assert len(server.asked) == 1


def test_reading_a_name_downloads_it_into_the_cache_once(server, tmp_path, monkeypatch):
    server.files |= idx_files()
    monkeypatch.setenv("UEFL_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(ADDRESSES, "mnist", tuple(server.address(name) for name in idx_files()))
    assert len(sources.read("mnist").y) == 8
    assert len(sources.read("mnist").y) == 8
    assert len(server.asked) == 4
    assert (tmp_path / "data" / "mnist" / "train-images-idx3-ubyte.gz").exists()


def test_without_network_one_line_says_which_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    nobody = tuple(Address(f"http://127.0.0.1:9/mnist/{name}", "0" * 32) for name in idx_files())
    monkeypatch.setitem(ADDRESSES, "mnist", nobody)
    with pytest.raises(InputError) as e:
        sources.read("mnist")
    line = str(e.value)
    assert "\n" not in line
    assert "Connection refused" in line
    assert "put train-images-idx3-ubyte.gz, " in line
    assert line.endswith(f"from http://127.0.0.1:9/mnist into {tmp_path / 'mnist'}")


def test_what_has_no_public_address_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    with pytest.raises(InputError, match=f"put pacs.zip into {tmp_path}"):
        sources.read("pacs")


def test_every_address_has_a_checksum_and_a_source():
    assert set(ADDRESSES) <= set(sources.SOURCES)
    for address in (a for group in ADDRESSES.values() for a in group):
        assert len(address.digest) in (32, 64)
        assert int(address.digest, 16) >= 0
