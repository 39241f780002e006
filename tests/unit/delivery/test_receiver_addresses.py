"""Addresses that deliveries may connect to: public ones, whatever form a refused one takes."""

from __future__ import annotations

import pytest

from tracelake.delivery.addresses import Allowance, Blocked, ReceiverAddresses, judge, read_url
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
    with pytest.raises(Blocked):
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


async def test_only_allowed_hosts_may_be_inner_ones_and_plain() -> None:
    allowance = Allowance.parse("127.0.0.1:9000, hooks.inner ,[::1]:80")
    addresses = ReceiverAddresses(allowance)
    endpoint, _ = read_url("http://127.0.0.1:9000/", ("http",), allowance)
    assert await addresses.of(endpoint) == ["127.0.0.1"]
    assert allowance.covers("hooks.inner", 1234)
    for url in ("http://127.0.0.1:9001/", "http://127.0.0.2:9000/", "http://xhooks.inner/"):
        with pytest.raises(Blocked):
            read_url(url, ("http",), allowance)
    endpoint, _ = read_url("https://127.0.0.1:9001/", ("https",), allowance)
    with pytest.raises(Blocked):
        await addresses.of(endpoint)


@pytest.mark.parametrize("text", ["http://a", "a/b", "a@b", "a:99999", "127.1", ":80"])
def test_an_allowance_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="TRACELAKE_DELIVERY_ALLOW"):
        Allowance.parse(text)
