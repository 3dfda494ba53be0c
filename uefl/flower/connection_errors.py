"""Explain a failed connection to the coordinator in one line: address, cause and remedy."""

from __future__ import annotations

import httpx

GUARD_HEADER = "x-uefl-guard"  # the guard marks its own answers with it

# Part of the error's text, cause, remedy. The first match counts.
CAUSES = (
    (
        "certificate has expired",
        "its certificate has expired",
        "its operator runs `uefl deploy renew`; check the clock of this machine too",
    ),
    ("not yet valid", "its certificate is not valid yet", "compare the clocks of both machines"),
    ("mismatch", "its certificate was issued for another name", "use the address given to `uefl deploy init`"),
    (
        "IP address mismatch",
        "its certificate was issued for another name",
        "use the address given to `uefl deploy init`",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate was not issued by the authority in ca.crt",
        "get ca.crt from the coordinator's operator over a trusted channel",
    ),
    (
        "ALERT_CERTIFICATE_EXPIRED",
        "it rejected this silo's certificate, which has expired",
        "the coordinator's operator runs `uefl deploy renew` and returns the new node.crt",
    ),
    (
        "ALERT_UNKNOWN_CA",
        "it rejected this silo's certificate, which another authority issued",
        "get node.crt and ca.crt from the coordinator's operator",
    ),
    ("CERTIFICATE_REQUIRED", "it requires a certificate of this silo", "put node.crt beside the key"),
    ("HTTP_REQUEST", "it does not use TLS", "check address and port"),
    ("WRONG_VERSION_NUMBER", "it does not use TLS", "check address and port"),
    ("[SSL", "the TLS handshake failed", "compare ca.crt, node.crt and key with those of the coordinator"),
    (
        "disconnected",
        "it closed the connection, as it does for a certificate that it does not accept",
        "run `uefl deploy doctor` here, and see the log of serve.sh there",
    ),
    ("Connection refused", "connection refused", "start serve.sh there, or check address, port and firewall"),
    ("Name or service not known", "the name cannot be resolved", "check the address or the name server"),
    ("name resolution", "the name cannot be resolved", "check the address or the name server"),
    ("No route to host", "no route to this host", "check address and network"),
    ("Network is unreachable", "the network is unreachable", "check the network of this machine"),
    ("timed out", "no answer in time", "check address, port and firewall"),
)


def explain_error(error: httpx.HTTPError, address: str) -> str:
    """Return one line with the address of the coordinator, the cause, and a remedy."""
    cause, remedy = _find_cause(error)
    return f"coordinator {address}: {cause}; {remedy}"


def _find_cause(error: httpx.HTTPError) -> tuple[str, str]:
    if isinstance(error, httpx.HTTPStatusError):
        return _explain_status(error.response)
    text = f"{error} {type(error).__name__}"
    if isinstance(error, httpx.TimeoutException):
        text = "timed out"
    for part, cause, remedy in CAUSES:
        if part in text:
            return cause, remedy
    return f"connection lost ({' '.join(text.split())[:200]})", "check serve.sh there, and the network"


def _explain_status(response: httpx.Response) -> tuple[str, str]:
    """Explain an answer that is an error, of the guard or of the SuperLink behind it."""
    text = " ".join(response.text[:300].split())
    if GUARD_HEADER in response.headers:
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return "its SuperLink does not run", "see the log of serve.sh there"
        remedy = "its operator adds this silo's key to keys/ and runs register.sh"
        return f"it rejected this silo: {text}", remedy
    if '"code":2004' in text.replace(" ", ""):
        return (
            "it does not admit this node",
            "its operator runs register.sh; after a crash a node is admitted again within one minute",
        )
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return (
            "it rejected the signature of this node",
            "compare the clocks of both machines; its operator runs register.sh",
        )
    return f"status {response.status_code}: {text}", "see the log of serve.sh there"
