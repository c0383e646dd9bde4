"""What TLS says when a client with a certificate is not let in: gRPC tells little of it."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

_PATIENCE = 2.0  # seconds
# What an HTTP/2 client begins with (RFC 9113): the preface and empty settings. A server that lets us in answers with settings of its own.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A client's PEM files, and the name the server's certificate must have ("": the host's). `theirs`: the server's, in words."""

    cert: str
    key: str
    ca: str
    server_name: str = ""
    theirs: str = "the authority that the server was started with"


def why_refused(address: str, files: TlsFiles) -> str:
    """Why a client gets no answer at a HOST:PORT, as a sentence with the remedy; "" if TLS is not why."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    name = files.server_name or host
    try:
        context = _context(files)
    except ssl.SSLError as error:
        return f"{files.cert}, {files.key} and {files.ca} can't be used: {_words(error)}; do certificate and key belong together?"
    try:
        with socket.create_connection((host, int(port)), _PATIENCE) as raw, context.wrap_socket(raw, server_hostname=name) as secured:
            secured.sendall(_GREETING)
            answer = secured.recv(1)
    except ssl.SSLCertVerificationError as error:
        remedy = f"is it for the host {name}, and signed by the authority in {files.ca}?"
        return f"the server's certificate is not to be trusted: {error.verify_message}; {remedy}"
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return "it does not speak TLS: start it with a certificate too, or have neither side use one"
        return f"the TLS handshake failed: {_words(error)}; {_accepted(files)}"
    except ConnectionResetError:
        answer = b""
    except (OSError, ValueError):  # not reached: gRPC says so itself
        return ""
    return "" if answer else f"the server ended the connection when it had seen the certificate; {_accepted(files)}"


def speaks_tls(address: str) -> bool:
    """Whether it does at a HOST:PORT, whomever it would let in."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PATIENCE) as raw, context.wrap_socket(raw):
            return True
    except (OSError, ValueError):
        return False


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    context.load_cert_chain(Path(files.cert), Path(files.key))
    context.set_alpn_protocols(["h2"])
    return context


def _accepted(files: TlsFiles) -> str:
    return f"is {files.cert} signed by {files.theirs}, and valid today?"


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
