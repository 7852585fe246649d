import random
import statistics
import time

import pytest

from pdserve.config.router import RouterConfig
from pdserve.errors import ConfigError, Unauthenticated
from router.auth import read_keyring
from router.tenants import (
    OPEN_TENANT,
    Keyring,
    narrow_salt,
    parse_api_key,
    parse_key_lines,
    tenant_salt,
)

KEYS = (("alice", "key-of-alice-0123456789"), ("bob", "key-of-bob-0123456789ab"))


def test_a_key_names_its_tenant() -> None:
    keyring = Keyring(KEYS, b"secret")
    for name, key in KEYS:
        for scheme in ("Bearer", "bearer", "BEARER"):
            tenant = keyring.authenticate(f"{scheme} {key}")
            assert (tenant.name, tenant.salt) == (name, tenant_salt(b"secret", name))


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer key-of-alice-012345678",
        "Bearer key-of-alice-01234567890",
        "Basic key-of-alice-0123456789",
        "key-of-alice-0123456789",
        "Bearer key-of-alice-0123456789 key-of-bob-0123456789ab",
        "Bearer \udcff",
    ],
)
def test_anything_else_is_refused_without_a_word_of_the_keys(authorization: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Keyring(KEYS, b"secret").authenticate(authorization)
    assert "alice" not in str(caught.value)


def test_without_keys_everybody_is_the_open_tenant() -> None:
    assert Keyring((), b"secret").authenticate(None) == OPEN_TENANT
    assert OPEN_TENANT.salt == b""


def test_salts_differ_by_tenant_and_by_secret() -> None:
    salts = {tenant_salt(secret, name) for secret in (b"", b"a", b"ab") for name in ("", "b", "bc")}
    assert len(salts) == 9


def test_E6_a_cache_salt_narrows_and_never_leaves_the_tenant() -> None:
    alice, bob = tenant_salt(b"s", "alice"), tenant_salt(b"s", "bob")
    assert narrow_salt(alice, "") == alice
    narrowed = {narrow_salt(salt, part) for salt in (alice, bob) for part in ("x", "y")}
    assert len(narrowed | {alice, bob}) == 6


def test_E5_time_does_not_tell_how_much_of_a_key_was_right() -> None:
    key = "k" * 64
    keyring = Keyring([("a", key), *((f"t{n}", f"other-key-{n}") for n in range(3))], b"s")
    guesses = {"none": "x" * 64, "half": "k" * 32 + "x" * 32, "all but one": "k" * 63 + "x"}
    order = [name for name in guesses for _ in range(4000)]
    random.Random(3).shuffle(order)
    times_ns: dict[str, list[int]] = {name: [] for name in guesses}
    for name in order:
        header = f"Bearer {guesses[name]}"
        start_ns = time.perf_counter_ns()
        try:
            keyring.authenticate(header)
        except Unauthenticated:
            times_ns[name].append(time.perf_counter_ns() - start_ns)
    medians = [statistics.median(found) for found in times_ns.values()]
    assert sum(len(found) for found in times_ns.values()) == len(order)
    # A comparison byte by byte in Python would differ by microseconds over 63 bytes.
    assert max(medians) - min(medians) < 0.15 * min(medians)


def test_E5_every_key_is_compared_also_after_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compare(first: bytes, second: bytes) -> bool:
        seen.append(second)
        return first == second

    keyring = Keyring(KEYS, b"s")
    monkeypatch.setattr("router.tenants.hmac.compare_digest", compare)
    keyring.authenticate(f"Bearer {KEYS[0][1]}")
    assert len(seen) == len(KEYS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("KEY", ("default", "KEY")),
        ("team=KEY", ("team", "KEY")),
        ("team=K=E=Y==", ("team", "K=E=Y==")),
        ("c2VjcmV0", ("default", "c2VjcmV0")),
        ("c2VjcmV=", ("default", "c2VjcmV=")),
        ("c2VjcmU==", ("default", "c2VjcmU==")),
        ("a/b=KEY", ("default", "a/b=KEY")),
    ],
)
def test_a_flag_is_a_key_or_a_tenant_and_a_key(text: str, expected: tuple[str, str]) -> None:
    assert parse_api_key(text) == expected


def test_a_file_holds_a_tenant_and_a_key_a_line(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nalice k1\nbob  k2\n")
    config = RouterConfig(
        model="m", redis_url="r", api_keys=("k0",), api_keys_file=str(path), cluster_secret="s"
    )
    keyring = read_keyring(config, b"drawn")
    names = [keyring.authenticate(f"Bearer k{number}").name for number in range(3)]
    assert names == ["default", "alice", "bob"]
    assert keyring.authenticate("Bearer k1").salt == tenant_salt(b"s", "alice")


def test_a_malformed_line_is_named_without_its_content() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_key_lines(["alice k1", "a topsecret word"], "keys")
    assert str(caught.value) == "keys line 2 must be TENANT KEY"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ([("a b", "k")], "tenant's name"),
        ([("a", "")], "API key of a"),
        ([("a", "k\x00")], "API key of a"),
        ([("a", "k" * 513)], "API key of a"),
        ([("a", "k"), ("b", "k")], "both a and b"),
    ],
)
def test_bad_keys_are_refused_at_start(keys: list[tuple[str, str]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Keyring(keys, b"")


def test_a_missing_or_empty_file_is_refused_at_start(tmp_path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for path, text in ((tmp_path / "none", "cannot read"), (empty, "holds no API key")):
        config = RouterConfig(model="m", redis_url="r", api_keys_file=str(path))
        with pytest.raises(ConfigError, match=text):
            read_keyring(config, b"")
