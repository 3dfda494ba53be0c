import hashlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from file_factories import make_idx_files

from uefl.core.errors import InputError
from uefl.core.fetch import RemoteFile, fetch_file
from uefl.data import SOURCES
from uefl.data.dataset_download import download_dataset
from uefl.data.sources import read_images

BODY = os.urandom(1 << 20)


class Server(ThreadingHTTPServer):
    """A local HTTP server that supports ranges unless disabled, and can close the connection early."""

    daemon_threads = True

    def __init__(self, files):
        self.files = files
        self.close_after = None  # bytes of a body
        self.supports_ranges = True
        self.requests = []  # (path, first byte)
        super().__init__(("127.0.0.1", 0), Handler)

    def make_remote_file(self, name, digest=None):
        body = self.files.get(name, b"")
        return RemoteFile(f"http://127.0.0.1:{self.server_port}/{name}", digest or hashlib.md5(body).hexdigest())


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        body = self.server.files.get(self.path[1:])
        if body is None:
            self.send_error(404)
            return
        requested = self.headers.get("Range") if self.server.supports_ranges else None
        first = int(requested.removeprefix("bytes=").rstrip("-")) if requested else 0
        self.server.requests.append((self.path[1:], first))
        if first >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if requested else 200)
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        limit = self.server.close_after
        self.wfile.write(body[first : None if limit is None else first + limit])

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


def replace_remote_files(monkeypatch, name, remote_files):
    monkeypatch.setitem(SOURCES._loaded, name, replace(SOURCES[name], remote_files=tuple(remote_files)))


def test_file_is_downloaded_and_checked_with_md5_or_sha256(server, tmp_path):
    fetch_file(server.make_remote_file("file.bin"), tmp_path / "md5")
    fetch_file(
        server.make_remote_file("file.bin", hashlib.sha256(BODY).hexdigest()), tmp_path / "sha", show_progress=True
    )
    assert (tmp_path / "md5").read_bytes() == (tmp_path / "sha").read_bytes() == BODY


def test_interrupted_download_is_resumed(server, tmp_path):
    server.close_after = 400_000
    for number in range(2):
        with pytest.raises(InputError, match="the connection was lost after"):
            download_dataset("dataset", [server.make_remote_file("file.bin")], tmp_path / "dataset")
        assert not (tmp_path / "dataset").exists()
        assert len(server.requests) == number + 1
    server.close_after = None
    folder = download_dataset("dataset", [server.make_remote_file("file.bin")], tmp_path / "dataset")
    assert (folder / "file.bin").read_bytes() == BODY
    assert [first for _, first in server.requests] == [0, 400_000, 800_000]


CLIENT = """
import sys
from pathlib import Path
from uefl.core.fetch import RemoteFile, fetch_file
fetch_file(RemoteFile(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))
"""


def test_download_of_a_killed_process_is_resumed(server, tmp_path):
    release = threading.Event()
    half = len(BODY) // 2

    class StallingHandler(Handler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY[:half])
            release.wait(300)

    server.RequestHandlerClass = StallingHandler
    remote_file, part = server.make_remote_file("file.bin"), tmp_path / "file.bin.part"
    client = subprocess.Popen([sys.executable, "-c", CLIENT, *remote_file, str(tmp_path / "file.bin")])
    while client.poll() is None and not (part.exists() and part.stat().st_size >= half // 2):
        release.wait(0.02)
    client.kill()
    client.wait()
    release.set()
    num_received = part.stat().st_size
    assert 0 < num_received <= half
    assert not (tmp_path / "file.bin").exists()
    server.RequestHandlerClass = Handler
    fetch_file(remote_file, tmp_path / "file.bin")
    assert server.requests == [("file.bin", num_received)]
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_server_without_ranges_sends_the_whole_file_again(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    server.supports_ranges = False
    fetch_file(server.make_remote_file("file.bin"), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_complete_part_file_is_used(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY)
    fetch_file(server.make_remote_file("file.bin"), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_wrong_checksum_is_rejected_and_the_next_attempt_starts_again(server, tmp_path):
    with pytest.raises(InputError, match=r"/file.bin: the downloaded file does not match the published checksum 0000"):
        download_dataset("dataset", [server.make_remote_file("file.bin", "0" * 32)], tmp_path / "dataset")
    assert not (tmp_path / "dataset").exists()
    assert not list(tmp_path.glob("*/*"))
    (tmp_path / ".dataset.download" / "file.bin.part").write_bytes(b"other bytes")
    with pytest.raises(InputError, match="checksum"):
        download_dataset("dataset", [server.make_remote_file("file.bin")], tmp_path / "dataset")
    download_dataset("dataset", [server.make_remote_file("file.bin")], tmp_path / "dataset")
    assert (tmp_path / "dataset" / "file.bin").read_bytes() == BODY


def test_dataset_folder_appears_only_when_complete(server, tmp_path):
    server.files |= {"a": b"1", "b": b"2"}
    missing = RemoteFile(server.make_remote_file("c").url, "0" * 32)
    with pytest.raises(InputError, match=r"dataset could not be downloaded \(Not Found\); put a, b, c from http"):
        download_dataset(
            "dataset", [server.make_remote_file("a"), server.make_remote_file("b"), missing], tmp_path / "dataset"
        )
    assert not (tmp_path / "dataset").exists()
    server.requests.clear()
    server.files["c"] = b"3"
    download_dataset("dataset", [server.make_remote_file(n) for n in "abc"], tmp_path / "dataset")
    assert [name for name, _ in server.requests] == ["c"], "complete files are not downloaded again"
    assert sorted(p.name for p in (tmp_path / "dataset").iterdir()) == ["a", "b", "c"]


def test_concurrent_runs_download_once(server, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(download_dataset, "dataset", [server.make_remote_file("file.bin")], tmp_path / "dataset")
            for _ in range(4)
        ]
        assert {job.result() for job in jobs} == {tmp_path / "dataset"}
    assert len(server.requests) == 1


def test_reading_a_dataset_downloads_it_once(server, tmp_path, monkeypatch):
    server.files |= make_idx_files()
    monkeypatch.setenv("UEFL_DATA", str(tmp_path / "data"))
    replace_remote_files(monkeypatch, "mnist", [server.make_remote_file(name) for name in make_idx_files()])
    assert len(read_images("mnist").y) == 8
    assert len(read_images("mnist").y) == 8
    assert len(server.requests) == 4
    assert (tmp_path / "data" / "mnist" / "train-images-idx3-ubyte.gz").exists()


def test_failed_download_names_the_files_and_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    unreachable = [RemoteFile(f"http://127.0.0.1:9/mnist/{name}", "0" * 32) for name in make_idx_files()]
    replace_remote_files(monkeypatch, "mnist", unreachable)
    with pytest.raises(InputError) as e:
        read_images("mnist")
    line = str(e.value)
    assert "\n" not in line
    assert "Connection refused" in line
    assert "put train-images-idx3-ubyte.gz, " in line
    assert line.endswith(f"from http://127.0.0.1:9/mnist into {tmp_path / 'mnist'}")


def test_dataset_without_url_names_the_file_and_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    with pytest.raises(InputError, match=f"put pacs.zip into {tmp_path}"):
        read_images("pacs")


def test_every_remote_file_has_a_checksum():
    remote_files = [file for source in SOURCES.values() for file in source.remote_files]
    assert len(remote_files) == 14
    for remote_file in remote_files:
        assert len(remote_file.digest) in (32, 64)
        assert int(remote_file.digest, 16) >= 0
