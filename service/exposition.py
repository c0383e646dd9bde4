"""The Prometheus page over HTTP, in the plain text format whatever a scraper accepts.

The library's OpenMetrics writer makes vllm:NAME to vllm_NAME in samples, and Prometheus prefers that format: dashboards would find nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from http.server import HTTPServer
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class _PageServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SixServer(_PageServer):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line."""


def serve_page(registry: CollectorRegistry, *, host: str, port: int) -> tuple[HTTPServer, Thread]:
    """Starts the server, in a daemon thread. Raises OSError if the address cannot be had."""
    page = make_wsgi_app(registry)

    def plain(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        answer: Iterable[bytes] = page(environ, start)
        return answer

    kind = _SixServer if ":" in host else _PageServer
    server = make_server(host.strip("[]"), port, plain, kind, handler_class=_Silent)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread
