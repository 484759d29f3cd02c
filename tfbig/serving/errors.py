"""Errors as the OpenAI API gives them."""

from typing import Any


class RequestError(Exception):
    """A request that gets an error for an answer.

    Args:
      message: what is wrong and what to do.
      status: of HTTP.
      kind: `type` of the error object.
      parameter: field of the body that is wrong.
      code: a word that programs can look at.
      headers: further ones of the answer.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.parameter, self.code, self.headers = parameter, code, headers or {}

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the answer."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.parameter,
            "code": self.code,
        }
        return {"error": error}
