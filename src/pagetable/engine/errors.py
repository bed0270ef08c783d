"""What can be wrong with a request."""


class RequestError(ValueError):
    """A request that cannot be served: what was given, what is allowed, what to do. Nothing was changed by it."""
