"""The Prometheus page over HTTP, in the plain text format whatever a scraper accepts.

The library's OpenMetrics writer makes vllm:NAME to vllm_NAME in samples, and Prometheus prefers that format: dashboards would find nothing.
"""

from __future__ import annotations

import socket
from http.server import HTTPServer, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CollectorRegistry, MetricsHandler


class _PlainPage(MetricsHandler):
    def do_GET(self) -> None:
        """Answers as if nothing but the plain format were known."""
        del self.headers["Accept"]
        super().do_GET()


def serve_page(registry: CollectorRegistry, *, host: str, port: int) -> tuple[HTTPServer, Thread]:
    """Starts the server, in a daemon thread. Raises OSError if the address cannot be had."""
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    kind = type("PageServer", (ThreadingHTTPServer,), {"address_family": family})
    server: HTTPServer = kind(address[:2], _PlainPage.factory(registry))
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread
