"""Who a tenant is, what is written of it, and which of them a name means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.nouns import SHARED, Tenant
from diskprefix.tenant_ids import matches

KEY, SALT = "sk-0123456789abcdef", "user-1"
_NAMES = st.text(st.characters(codec=None), min_size=1, max_size=20)


def test_ids_stay_what_they_are() -> None:
    """They are part of the roots: another id would lose what is stored."""
    assert str(SHARED.with_salt(SALT)) == "f3c2009eb87c5ee855766934969045ad"
    assert str(Tenant.of_key(KEY)) == "b644dd215dc06ecbcbd44d346405d0e1"


def test_the_shared_tenant_has_no_text() -> None:
    assert str(SHARED) == ""
    assert Tenant.parse("") == SHARED
    assert SHARED.with_salt(SALT) == SHARED.with_salt(SALT)


def test_neither_key_nor_salt_can_be_read_from_a_tenant() -> None:
    tenant = Tenant.of_key(KEY).with_salt(SALT)
    assert KEY not in f"{tenant!r}{tenant}"
    assert SALT not in f"{tenant!r}{tenant}"


@given(_NAMES, _NAMES)
def test_different_salts_and_keys_are_different_tenants(one: str, other: str) -> None:
    by_one = {SHARED.with_salt(one), Tenant.of_key(one), Tenant.of_key(one).with_salt(one), SHARED}
    by_other = {SHARED.with_salt(other), Tenant.of_key(other), Tenant.of_key(one).with_salt(other), SHARED}
    assert len(by_one) == 4
    assert len(by_one | by_other) == (4 if one == other else 7)


@given(_NAMES)
def test_no_salt_names_the_tenant_of_a_key(salt: str) -> None:
    key = Tenant.of_key(KEY)
    for chosen in (salt, KEY, str(key), f"diskprefix api key\0{KEY}", f"\0{KEY}"):
        assert SHARED.with_salt(chosen) != key
        assert key.with_salt(chosen).ids[0] == key.ids[0]


@given(st.lists(_NAMES, max_size=3))
def test_a_tenant_is_read_back_from_its_text(salts: list[str]) -> None:
    tenant = Tenant.of_key(KEY)
    for salt in salts:
        tenant = tenant.with_salt(salt)
    assert Tenant.parse(str(tenant)) == tenant


@pytest.mark.parametrize("text", ["/", "abc", "g" * 32, "A" * 32, "a" * 33, f"{'a' * 32}/", f"{'a' * 32}//{'b' * 32}"])
def test_other_texts_are_no_tenants(text: str) -> None:
    with pytest.raises(ValueError, match="not a tenant"):
        Tenant.parse(text)


def test_a_key_means_its_tenant_and_all_its_users() -> None:
    key = Tenant.of_key(KEY)
    for wanted in (KEY, str(key), str(key)[:8], str(key).upper()):
        assert matches(str(key), wanted)
        assert matches(str(key.with_salt(SALT)), wanted)
        assert not matches(str(Tenant.of_key(KEY + "x").with_salt(SALT)), wanted)
        assert not matches(str(SHARED), wanted)


def test_a_salt_means_the_users_with_it_and_nobody_else() -> None:
    key, salted = Tenant.of_key(KEY), SHARED.with_salt(SALT)
    for wanted in (SALT, str(salted), str(salted)[:12]):
        assert matches(str(salted), wanted)
        assert matches(str(key.with_salt(SALT)), wanted)
        assert not matches(str(key), wanted)
        assert not matches(str(key.with_salt("user-2")), wanted)


def test_the_user_of_one_key_is_named_by_both_ids() -> None:
    one, other = (Tenant.of_key(key).with_salt(SALT) for key in (KEY, KEY + "x"))
    for wanted in (str(one), "/".join(part[:8] for part in one.ids)):
        assert matches(str(one), wanted)
        assert not matches(str(other), wanted)
        assert not matches(str(Tenant.of_key(KEY)), wanted)


@pytest.mark.parametrize("tenant", [SHARED, SHARED.with_salt(SALT), Tenant.of_key(KEY).with_salt(SALT)])
@pytest.mark.parametrize(
    "shorten", [lambda text: text[:7], lambda text: text[1:], lambda text: text + "/", lambda _: ""]
)
def test_less_than_eight_digits_other_parts_and_nothing_mean_nobody(tenant: Tenant, shorten: object) -> None:
    assert callable(shorten)
    assert not matches(str(tenant), shorten(str(tenant)))
