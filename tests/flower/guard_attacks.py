"""Requests of an attacker, sent from another machine: `python guard_attacks.py ATTACKS.json` prints their results.

Every attack is {"host", "port", "path", ...}; the result is "status: header of the guard: text", or the error's name.
"""

import json
import socket
import ssl
import sys
from pathlib import Path


def make_context(attack):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if "ca" in attack:
        context.load_verify_locations(attack["ca"])
    else:  # a caller that skips the verification of the certificate
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if "certificate" in attack:
        context.load_cert_chain(attack["certificate"], attack["key"])
    return context


def run_attack(attack):
    try:
        with socket.create_connection((attack["host"], attack["port"]), timeout=10) as plain:
            if attack.get("plain_text"):
                return exchange(plain, attack)
            with make_context(attack).wrap_socket(plain, server_hostname=attack["host"]) as encrypted:
                return exchange(encrypted, attack)
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
        return "no answer"
    except OSError as e:
        return type(e).__name__


def exchange(connection, attack):
    headers = {"host": "x", "content-length": "0", "connection": "close", **attack.get("headers", {})}
    lines = [f"{attack.get('method', 'POST')} {attack['path']} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
    connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
    answer = b""
    while part := connection.recv(4096):
        answer += part
    if not answer:
        return "no answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    guard = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"x-uefl-guard")]
    return f"{head.split()[1].decode()} {b''.join(guard).decode()} {body.decode(errors='replace').strip()}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps([run_attack(attack) for attack in json.loads(Path(sys.argv[1]).read_text())]))
