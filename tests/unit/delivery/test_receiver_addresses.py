"""Addresses that deliveries may connect to: public ones, whatever form a refused one takes."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tracelake.delivery import addresses as addresses_module
from tracelake.delivery.addresses import (
    Allowance,
    Blocked,
    ReceiverAddresses,
    SystemNames,
    judge,
    read_url,
)
from tracelake.delivery.connect import NotSent
from tracelake.delivery.http_post import HttpPoster
from tracelake.domain.errors import Invalid

NONE = Allowance()


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_are_accepted(address: str) -> None:
    judge(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
        *("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "224.0.0.1", "239.1.2.3"),
        *("240.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "203.0.113.9"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
        *(
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
        ),
        *("64:ff9b:1::1", "2002:7f00:1::1", "2001:0:4136:e378::1", "2001:db8::1", "100::1"),
    ],
)
def test_no_form_of_an_inner_address_is_accepted(address: str) -> None:
    with pytest.raises(Blocked, match="TRACELAKE_DELIVERY_ALLOW"):
        judge(address)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://example.org/",
            "ftp://example.org/",
            "file:///etc/passwd",
            "//example.org/",
            "example.org",
            "",
        ),
        *("https://", "https:///path", "https://user:pw@example.org/", "https://user@example.org/"),
        *(
            "https://2130706433/",
            "https://0x7f000001/",
            "https://0177.0.0.1/",
            "https://127.1/",
            "https://1.2.3/",
        ),
        *("https://0x7f.0.0.1/", "https://example.0x1/", "https://[::1%25eth0]/", "https://[nonsense]/"),
        *(
            "https://exa mple.org/",
            "https://example.org\\@evil.org/",
            "https://exämple.org/",
            "https://a..b/",
        ),
        *("https://example.org:99999/", "https://example.org:x/", "https://example.org/\r\nHost: inner"),
        *(
            "https://example.org:0/",
            "https://example.org:-1/",
            "https://@example.org/",
            "https://:@example.org/",
        ),
        *("https://0x7f.1/", "https://017700000001/", "https://127.0.0.1./", "https://127.0.0.0x1/"),
        # Full stops and digits that IDNA maps to ASCII, as they are and as percent signs.
        *(
            "https://127。0。0。1/",
            "https://localhost。/",
            "https://①②⑦.0.0.1/",
            "https://127%E3%80%820.0.1/",
            "https://%6c%6fcalhost/",
        ),
        *("https://[fe80::1%25lo]/", "https://[fe80::1%lo]/", "https://[::1]x/", "https://::1/"),
        "https://inner;@example.org/",
        "https://example.org/" + "a" * 3000,
    ],
)
def test_addresses_in_odd_spellings_are_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(Blocked) as refused:
        read_url(url, ("https", "http"), NONE)
    assert len(url) < 9 or url not in str(refused.value)


def test_an_address_is_read_to_its_server_and_path() -> None:
    endpoint, path = read_url("https://Hooks.Example.org.:8443/a/b?c=d#e", ("https",), NONE)
    assert (endpoint.host, endpoint.port, path) == ("hooks.example.org", 8443, "/a/b?c=d")
    endpoint, path = read_url("https://[2606:4700::1]", ("https",), NONE)
    assert (endpoint.authority, endpoint.port, path) == ("[2606:4700::1]", 443, "/")


def test_what_follows_the_server_is_never_read_as_one() -> None:
    for url in ("https://example.org#@inner/", "https://example.org?@inner:1/", "https://example.org/@inner"):
        endpoint, _ = read_url(url, ("https",), NONE)
        assert (endpoint.host, endpoint.port) == ("example.org", 443)


@pytest.mark.parametrize("user", ["user:pw@", "user@", "@", ":@"])
def test_a_user_in_an_address_is_refused_also_where_plain_text_is_allowed(user: str) -> None:
    with pytest.raises(Blocked, match="a user or a password"):
        read_url(f"http://{user}example.org/", ("https", "http"), Allowance.parse("example.org"))


async def test_every_address_of_a_name_is_judged_at_each_connection() -> None:
    answers = [["1.1.1.1"], ["127.0.0.1"], ["1.1.1.1", "10.0.0.1"]]

    async def resolve(_host: str, _port: int) -> list[str]:
        return answers.pop(0)

    endpoint, _ = read_url("https://rebinding.example/", ("https",), NONE)
    addresses = ReceiverAddresses(NONE, resolve)
    assert await addresses.of(endpoint) == ["1.1.1.1"]
    for _ in range(2):
        with pytest.raises(Blocked):
            await addresses.of(endpoint)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "[::ffff:127.0.0.1]",
            "[::FFFF:7F00:1]",
            "[64:ff9b::7f00:1]",
            "[fd00::1]",
            "[::]",
            "[2002:7f00:1::]",
        ),
        *("169.254.169.254", "100.64.0.1", "0.0.0.0", "127.0.0.1", "localhost", "localhost.", "LOCALHOST"),
    ],
)
async def test_a_url_that_is_well_formed_and_leads_inside_is_refused_by_its_addresses(host: str) -> None:
    """With the system's resolver, which needs no network for these."""
    endpoint, _ = read_url(f"https://{host}/", ("https",), NONE)
    with pytest.raises(Blocked):
        await ReceiverAddresses(NONE).of(endpoint)


async def test_a_name_that_resolves_to_loopback_at_the_second_look_is_never_connected_to() -> None:
    """The poster looks once for each connection, and connects to what was judged, never to the name."""
    arrived: list[object] = []
    server = await asyncio.start_server(lambda reader, writer: arrived.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    looks: list[str] = []

    async def rebind(host: str, _port: int) -> list[str]:
        looks.append(host)
        # A public address that nothing answers at once would cost a test time: the first look finds nothing.
        return [] if len(looks) == 1 else ["127.0.0.1"]

    poster = HttpPoster(ReceiverAddresses(NONE, rebind))
    endpoint, path = read_url(f"https://rebinding.example:{port}/", ("https",), NONE)
    async with server:
        with pytest.raises(NotSent):
            await poster.post(endpoint, path, {}, b"{}", 5)
        with pytest.raises(Blocked):
            await poster.post(endpoint, path, {}, b"{}", 5)
    assert (looks, arrived) == (["rebinding.example"] * 2, [])


async def test_a_name_whose_server_hangs_takes_one_thread_and_no_other_name_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    released = threading.Event()

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if host.startswith("hangs"):
            released.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(0, 0, 0, "", ("1.1.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    names = SystemNames()
    waiting = [asyncio.create_task(names("hangs.example", 443)) for _ in range(64)]
    await asyncio.sleep(0)
    # One that is given up doesn't end the question of the others.
    waiting[0].cancel()
    assert await asyncio.wait_for(names("other.example", 443), 30) == ["1.1.1.1"]
    assert asked.count("hangs.example") == 1
    released.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(each) for each in found[1:]} == {OSError}
    # Not asked again at once.
    with pytest.raises(OSError, match="can't be resolved"):
        await names("hangs.example", 443)
    assert asked.count("hangs.example") == 1
    monkeypatch.setattr(addresses_module, "UNKNOWN_SECONDS", -1.0)
    for _ in range(2):
        with pytest.raises(OSError, match="can't be resolved"):
            await names("hangs2.example", 443)
    assert asked.count("hangs2.example") == 2
    names.close()


async def test_only_allowed_hosts_may_be_inner_ones_and_plain() -> None:
    allowance = Allowance.parse("127.0.0.1:9000, hooks.inner ,[::1]:80")
    addresses = ReceiverAddresses(allowance)
    endpoint, _ = read_url("http://127.0.0.1:9000/", ("http",), allowance)
    assert await addresses.of(endpoint) == ["127.0.0.1"]
    assert allowance.covers("hooks.inner", 1234)
    for url in ("http://127.0.0.1:9001/", "http://127.0.0.2:9000/", "http://xhooks.inner/"):
        with pytest.raises(Blocked, match="TRACELAKE_DELIVERY_ALLOW"):
            read_url(url, ("http",), allowance)
    endpoint, _ = read_url("https://127.0.0.1:9001/", ("https",), allowance)
    with pytest.raises(Blocked):
        await addresses.of(endpoint)


@pytest.mark.parametrize("text", ["http://a", "a/b", "a@b", "a:99999", "127.1", ":80"])
def test_an_allowance_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="TRACELAKE_DELIVERY_ALLOW"):
        Allowance.parse(text)
