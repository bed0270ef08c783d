"""What can be wrong with a request."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served: what was given, what is allowed, what to do. Nothing was changed by it.

    `param` names the field at fault, where it is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
