"""API keys and the tenants behind them.

A tenant's salt goes into block hashes, the router's prefix index and the digests of the hand-off,
so no tenant ever hits what another one has cached. It comes from the key alone, never from a body.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.errors import ConfigError, Unauthenticated

DEFAULT_TENANT = "default"
"""The tenant of keys that were given without a name."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """On whose behalf a call is made."""

    name: str
    salt: bytes


OPEN_TENANT = Tenant(name="", salt=b"")
"""Everybody, while no key is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    digest: bytes
    tenant: Tenant


class Keyring:
    """Finds the tenant of a key. Without any key everybody is welcome."""

    def __init__(self, keys: Sequence[tuple[str, str]], secret: bytes) -> None:
        """Takes (tenant, key) pairs, and what all routers of the cluster salt with.

        Raises:
            ConfigError: a name or key is malformed, or a key belongs to two tenants.
        """
        by_key: dict[str, str] = {}
        for tenant, key in keys:
            _check(tenant, key)
            if by_key.setdefault(key, tenant) != tenant:
                raise ConfigError(f"one API key is given to both {by_key[key]} and {tenant}")
        # Digests all have one length, so that a comparison tells nothing of a key's.
        self._entries = tuple(
            _Entry(digest=_digest(key), tenant=Tenant(name=name, salt=tenant_salt(secret, name)))
            for key, name in by_key.items()
        )

    @property
    def is_open(self) -> bool:
        """No key is set and none is asked for."""
        return not self._entries

    def authenticate(self, authorization: str | None) -> Tenant:
        """Finds who calls by the value of an Authorization header or metadata entry.

        Every key is compared, each in constant time, also after a hit.

        Raises:
            Unauthenticated: no bearer key, or an unknown one.
        """
        if self.is_open:
            return OPEN_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        shown = _digest(key.strip())
        found: Tenant | None = None
        for entry in self._entries:
            if hmac.compare_digest(shown, entry.digest):
                found = entry.tenant
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """Returns what a tenant's blocks are salted with; without the secret it cannot be guessed."""
    return hashlib.sha256(
        b"pdserve.tenant\x00" + len(secret).to_bytes(8, "little") + secret + tenant.encode()
    ).digest()


def narrow_salt(salt: bytes, cache_salt: str) -> bytes:
    """Returns the salt of one part of a tenant's cache, named by the client itself."""
    if not cache_salt:
        return salt
    return hashlib.sha256(
        b"pdserve.cache_salt\x00" + len(salt).to_bytes(8, "little") + salt + cache_salt.encode()
    ).digest()


def parse_api_key(text: str) -> tuple[str, str]:
    """Splits `TENANT=KEY`, or takes a bare key; the `=` that pads base64 is part of a key."""
    name, _, key = text.partition("=")
    if key.strip("=") and _NAME.fullmatch(name):
        return name, key
    return DEFAULT_TENANT, text


def parse_key_lines(lines: Iterable[str], source: str) -> list[tuple[str, str]]:
    """Reads lines of `TENANT KEY`; empty ones and comments (#) are skipped.

    Raises:
        ConfigError: a line has another shape; names the line, never its content.
    """
    keys = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{source} line {number} must be TENANT KEY")
        keys.append((words[0], words[1]))
    return keys


def _check(tenant: str, key: str) -> None:
    if not _NAME.fullmatch(tenant):
        raise ConfigError(f"a tenant's name must be 1 to 64 of [A-Za-z0-9._-], got {tenant[:64]!r}")
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"the API key of {tenant} must be 1 to 512 visible ASCII characters without spaces"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
