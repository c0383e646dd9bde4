"""What TLS says when operators of another machine are not let in: gRPC tells little of it."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ops.operators import OperatorTarget

_PATIENCE = 5.0  # seconds
# What an HTTP/2 client begins with (RFC 9113): the preface and empty settings. A server that lets us in answers with settings of its own.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def why_refused(target: OperatorTarget) -> str:
    """Why an operator gets no answer at a HOST:PORT, as a sentence with the remedy; "" if TLS is not why."""
    host, _, port = target.address.rpartition(":")
    host = host.strip("[]")
    try:
        context = _context(target)
    except ssl.SSLError as error:
        return f"{target.cert}, {target.key} and {target.ca} can't be used: {_words(error)}; do certificate and key belong together?"
    try:
        with socket.create_connection((host, int(port)), _PATIENCE) as raw, context.wrap_socket(raw, server_hostname=host) as secured:
            secured.sendall(_GREETING)
            answer = secured.recv(1)
    except ssl.SSLCertVerificationError as error:
        remedy = f"is it for the host {host}, and signed by the authority in {target.ca}?"
        return f"the server's certificate is not to be trusted: {error.verify_message}; {remedy}"
    except ssl.SSLError as error:
        return f"the TLS handshake failed: {_words(error)}; {_accepted(target)}"
    except ConnectionResetError:
        answer = b""
    except (OSError, ValueError):  # not reached: gRPC says so itself
        return ""
    return "" if answer else f"the server ended the connection when it had seen the certificate; {_accepted(target)}"


def _context(target: OperatorTarget) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(target.ca)
    context.load_cert_chain(Path(target.cert), Path(target.key))
    context.set_alpn_protocols(["h2"])
    return context


def _accepted(target: OperatorTarget) -> str:
    return f"is {target.cert} signed by the authority that the server was started with (--operator-ca), and valid today?"


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
