"""Official weights are fetched once, whole and genuine. The server is a local one: tests need no network."""

import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from uefl.errors import InputError
from uefl.models import official
from uefl.models.encoders import encoder
from uefl.models.official import official_weights, weights_folder
from uefl.models.weights import load_weights

BODY = bytes(range(256)) * 40
NAME = f"net-{sha256(BODY).hexdigest()[:8]}.pth"


class Server(ThreadingHTTPServer):
    """Serves one body, remembers which ranges were asked for, and breaks off after `limit` bytes."""

    body, limit, asked = BODY, None, []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        spoken = self.headers.get("Range", "")
        self.server.asked.append(spoken)
        start = int(spoken.removeprefix("bytes=").removesuffix("-")) if spoken else 0
        rest = self.server.body[start:]
        self.send_response(416 if start and not rest else 206 if spoken else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: self.server.limit])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        monkeypatch.setattr(official, "ADDRESS", f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        path = official_weights(NAME)
        assert path == tmp_path / "weights" / NAME
        assert path.read_bytes() == BODY
    assert server.asked == [""]
    assert [p.name for p in path.parent.iterdir()] == [NAME]


def test_a_broken_download_goes_on_where_it_stopped(server: Server) -> None:
    server.limit = 1000
    with pytest.raises(InputError, match="broke off after 1000 of 10240 bytes"):
        official_weights(NAME)
    server.limit = None
    assert official_weights(NAME).read_bytes() == BODY
    assert server.asked == ["", "bytes=1000-"]


def test_a_complete_part_is_only_checked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / f"{NAME}.part").write_bytes(BODY)
    assert official_weights(NAME).read_bytes() == BODY
    assert server.asked == []


def test_a_forgery_is_refused_and_not_kept(server: Server, tmp_path: Path) -> None:
    server.body = BODY[::-1]
    with pytest.raises(InputError, match="does not have the published checksum"):
        official_weights(NAME)
    assert list((tmp_path / "weights").iterdir()) == []
    (tmp_path / "weights" / NAME).write_bytes(BODY[:-1])
    with pytest.raises(InputError, match=f"{NAME}: damaged"):
        official_weights(NAME)


def test_without_network_one_line_says_which_file_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    address = "http://127.0.0.1:9/"  # nobody answers there
    monkeypatch.setattr(official, "ADDRESS", address)
    with pytest.raises(InputError) as error:
        load_weights(encoder("resnet18", 3), "imagenet")
    line = str(error.value)
    assert f"{address}resnet18-f37072fd.pth" in line
    assert line.endswith(f"put that file at {tmp_path / 'weights' / 'resnet18-f37072fd.pth'}")
    assert "\n" not in line


def test_imagenet_is_the_official_file_of_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    trained, net = encoder("vgg11", 3), encoder("vgg11", 3)
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    net.official = f"vgg11-{sha256((tmp_path / 'w.pth').read_bytes()).hexdigest()[:8]}.pth"
    (tmp_path / "weights").mkdir()
    (tmp_path / "w.pth").rename(tmp_path / "weights" / net.official)
    assert load_weights(net, "imagenet").file == tmp_path / "weights" / net.official
    assert torch.equal(net.features[0].weight, trained.features[0].weight)


def test_an_encoder_without_official_weights_says_so() -> None:
    for name in ("resnet18-cifar", "mlp"):
        with pytest.raises(InputError, match="no official weights"):
            load_weights(encoder(name, 3), "imagenet")


def test_the_folder_is_the_data_folder_or_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UEFL_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert weights_folder() == Path.home() / ".cache/uefl/weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert weights_folder() == Path("/cache/uefl/weights")
    monkeypatch.setenv("UEFL_DATA", "/data")
    assert weights_folder() == Path("/data/weights")
