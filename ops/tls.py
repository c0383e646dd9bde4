"""What TLS says when operators of another machine are not let in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service import tls

if TYPE_CHECKING:
    from ops.operators import OperatorTarget


def why_refused(target: OperatorTarget) -> str:
    """Why an operator gets no answer at a HOST:PORT, as a sentence with the remedy; "" if TLS is not why."""
    theirs = "the authority that the server was started with (--operator-ca)"
    return tls.why_refused(target.address, tls.TlsFiles(target.cert, target.key, target.ca, theirs=theirs))
