"""Names of tenants for people, in place of their ids."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from diskprefix.tenant_ids import id_of, short_tenant
from diskprefix.values import Tenant

PLACEHOLDERS = ("unused", "none", "EMPTY", "dummy", "ollama", "lm-studio", "sk-1234", "no-key", "not-needed", "x")
"""The keys that people enter where a client requires one."""
_OF_PLACEHOLDERS = {id_of("api key", word): f"key {word}" for word in PLACEHOLDERS}


class TenantNames(Struct, frozen=True):
    """The names that a daemon can give. `own` is the tenant of its user's programs and pages, without API keys.
    `keys` has the names of API keys by their ids."""

    own: Tenant | None = None
    keys: Mapping[str, str] = field(default_factory=dict)

    def name(self, tenant: str) -> str:
        """Returns the name of the tenant with this text, for an unknown tenant the beginning of its id."""
        if not tenant:
            return "no key"
        user, *rest = tenant.split("/")
        if self.own is not None and user == str(self.own):
            name = "your programs"
        elif user in self.keys:
            name = f"key {self.keys[user]}"
        else:
            name = _OF_PLACEHOLDERS.get(user) or f"another client ({short_tenant(user)})"
        return ", ".join([name, *(f"salt {short_tenant(salt)}" for salt in rest)])
