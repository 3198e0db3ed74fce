"""Who may use the page: whoever knows its token, from this machine alone.

The token is the first part of every address, so a page of another site cannot guess one. A request
must also name this server as its host: a name of another site that resolves to this machine (DNS
rebinding) is refused. No answer lets other sites read it.
"""

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """The port of a server on the loopback address, and the token of this start of it."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def why_refused(self, path: str, host: str, origin: str | None) -> str:
        """Return why a request is refused, or an empty text if it is not."""
        hosts = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        if host not in hosts:
            return "this server answers requests to its own address alone"
        if origin is not None and origin not in {f"http://{each}" for each in hosts}:
            return "this server answers its own page alone"
        given = path.lstrip("/").partition("/")[0]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return "the address needs the token that `meshmend explore` printed"
        return ""
