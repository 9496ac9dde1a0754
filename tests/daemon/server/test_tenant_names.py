"""What the tenants of requests are called, for a daemon without API keys and for one with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.daemon.server.keys import ApiKeys, OwnerToken
from diskprefix.tenant_ids import short_tenant
from diskprefix.values import SHARED, Tenant
from tests.daemon.server.test_auth import ADMIN, ALICE, write_keys


@pytest.mark.usefixtures("own_places")
def test_without_keys_own_placeholder_and_missing_keys_have_names() -> None:
    token = OwnerToken.drawn()
    name, other = token.tenant_names.name, Tenant.of_key("somebody's secret")
    assert name(str(token.tenant)) == "your programs"
    assert name(str(SHARED)) == "no key"
    assert name(str(Tenant.of_key("unused"))) == "key unused"
    assert name(str(other)) == f"another client ({short_tenant(str(other))})"
    [salt] = SHARED.with_salt("s").ids
    assert name(str(token.tenant.with_salt("s"))) == f"your programs, salt {short_tenant(salt)}"
    assert name(str(SHARED.with_salt("s"))) == f"another client ({short_tenant(salt)})"


def test_with_keys_each_has_its_own_name(tmp_path: Path) -> None:
    nameless = "0123456789abcdef0123456789abcdef"
    keys = ApiKeys(write_keys(tmp_path / "keys", f"admin {ADMIN}", f"alice {ALICE}", nameless))
    name = keys.tenant_names.name
    assert [name(str(Tenant.of_key(key))) for key in (ADMIN, ALICE)] == ["key admin", "key alice"]
    assert name(str(Tenant.of_key(nameless))) == f"key {short_tenant(str(Tenant.of_key(nameless)))}"
    write_keys(tmp_path / "keys", f"admin {ADMIN}")
    keys.read_again()
    assert keys.tenant_names.name(str(Tenant.of_key(ALICE))).startswith("another client ("), "it was taken away"
