"""Who may call, and whose cache it is: keys, administrators, and the salt that keeps tenants apart."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.requests import Request

from pagetable.serving.errors import ApiError
from pagetable.serving.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})  # for probes, which carry no key
SALT_HEADER = "x-cache-salt"  # a gateway sets it; it goes before the body's
MAX_SALT = 1024  # characters


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has sent a request. `key_id` is a digest of the key; None where no keys are asked for."""

    key_id: str | None
    is_admin: bool


class Access:
    """The keys of a server, as digests. Which of them a given one equals takes the same time for all."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = [_digest(key) for key in settings.load_api_keys()]
        self._admin_key = None if settings.admin_api_key is None else _digest(settings.admin_api_key)
        self._isolate = settings.isolate_keys

    @property
    def needs_key(self) -> bool:
        """Whether clients have to send a key."""
        return bool(self._keys)

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this `Authorization` header. ApiError 401 for nobody we know."""
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip()) if scheme.lower() == "bearer" else b""
        is_admin = self._admin_key is not None and hmac.compare_digest(digest, self._admin_key)
        known = [hmac.compare_digest(digest, key) for key in self._keys]  # all of them, whichever it is
        if self._keys and not any(known) and not is_admin:
            missing = "an API key is needed" if authorization is None else "the API key is not right"
            raise ApiError(401, f"{missing}: send 'Authorization: Bearer KEY'", code="invalid_api_key")
        # Without any key, whoever reaches the server is its operator.
        return Caller(digest.hex()[:32] if self._keys else None, is_admin or not (self._keys or self._admin_key))

    def check_admin(self, caller: Caller) -> None:
        """ApiError 403 for one who may not do what only an operator may."""
        if not caller.is_admin:
            how = "send the admin API key" if self._admin_key else "start the server with --admin-api-key"
            raise ApiError(403, f"only an administrator may do this: {how}", code="admin_only")

    def cache_salt(self, request: Request, asked: str | None) -> str | None:
        """The salt of a request: the header's before the body's, and within the key's own namespace if keys have one.

        ApiError 400 for a header that is no salt.
        """
        salts = request.headers.getlist(SALT_HEADER)
        if salts:
            given = salts[0]
            if len(salts) > 1 or not given.strip() or len(given) > MAX_SALT:
                raise ApiError(
                    400, f"the header X-Cache-Salt stands once and has 1 to {MAX_SALT} characters", param="cache_salt"
                )
            asked = given
        if not self._isolate:
            return asked
        # The digest has a fixed length, so no salt can imitate another key's.
        return f"key:{caller_of(request).key_id}:{asked or ''}"


def caller_of(request: Request) -> Caller:
    """Who has sent this request, as the gate found out."""
    caller = request.scope["caller"]
    assert isinstance(caller, Caller)
    return caller


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
