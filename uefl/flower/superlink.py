"""`python3 -m uefl.flower.superlink`: Flower's SuperLink, which also logs failed TLS handshakes.

A failed handshake ends before Flower receives the connection, and the event loop reports it in debug mode only. The
operator of the coordinator must see connection attempts with a wrong authority or without TLS.
"""

from __future__ import annotations

import ssl
from logging import WARNING

from flwr.supercore.logger import log
from flwr.superlink.cli.flower_superlink import flower_superlink


class LoggingSSLObject(ssl.SSLObject):
    """The TLS side of a connection, which logs a failed handshake."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # the handshake continues
            raise
        except ssl.SSLError as e:
            log(WARNING, "A connection was rejected, its TLS handshake failed: %s", e)
            raise


if __name__ == "__main__":
    ssl.SSLContext.sslobject_class = LoggingSSLObject
    flower_superlink()
