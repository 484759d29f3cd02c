"""Serves a run's report while it trains."""

import html
import http.server
import threading
import time
from collections.abc import Callable

from tfbig.errors import UserError

_ADDRESS = "127.0.0.1"  # whoever should see it from elsewhere tunnels to it


class ReportServer:
    """Answers every request with the newest page, made at most once in `seconds`.

    Args:
      make: returns the page.
      port: to listen on; 0 takes a free one.
      seconds: between two pages.

    Raises:
      UserError: the port is taken.
    """

    def __init__(self, make: Callable[[], str], port: int, seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._page, self._made = b"", float("-inf")
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = outer.page()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *arguments: object) -> None:
                """Says nothing of requests."""

        try:
            self._server = http.server.ThreadingHTTPServer((_ADDRESS, port), Handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on port {port}: {error.strerror}; take another --port."
            ) from error
        self.url = f"http://{_ADDRESS}:{self._server.server_address[1]}/"

    def page(self) -> bytes:
        """Returns the newest page; one that cannot be made leaves the last one."""
        with self._lock:
            if time.monotonic() - self._made >= self._seconds:
                try:
                    self._page = self._make().encode()
                except UserError as error:
                    # A run that has just begun has no records yet.
                    self._page = self._page or self._waiting(str(error))
                self._made = time.monotonic()
            return self._page

    def _waiting(self, why: str) -> bytes:
        """Returns a page that loads itself anew, as a run that has begun will have a report."""
        refresh = f'<meta http-equiv="refresh" content="{max(1, round(self._seconds))}">'
        text = html.escape(why)
        return f'<!DOCTYPE html><meta charset="utf-8">{refresh}<p>{text}</p>'.encode()

    def serve(self) -> None:
        """Serves until it is interrupted."""
        try:
            self._server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            self._server.server_close()

    def stop(self) -> None:
        """Ends `serve`, from another thread."""
        self._server.shutdown()
