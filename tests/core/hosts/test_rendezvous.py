import contextlib
import hashlib
import hmac
import re
import socket
import threading
import time

import pytest

from core.hosts import host_messages, rendezvous


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Host(threading.Thread):
    """One host's answer to the roll call, with how it ended."""

    def __init__(self, address, index, count, seconds=2.0, **more):
        super().__init__(daemon=True)
        self.call = {"index": index, "count": count, "timeout_seconds": seconds, **more}
        self.address, self.error, self.roll = address, None, None
        self.start()

    def run(self):
        try:
            self.roll = rendezvous.answer(self.address, **self.call)
        except (ValueError, TimeoutError) as error:
            self.error = error


def finish(*hosts):
    for host in hosts:
        host.join(timeout=10)
        assert not host.is_alive()
    return [host.error for host in hosts]


def test_all_come_in_any_order_and_the_port_is_free_again(address):
    late = [Host(address, index, 4) for index in (3, 1)]
    time.sleep(0.2)
    assert finish(*late, Host(address, 0, 4), Host(address, 2, 4)) == [None] * 4
    socket.create_server(rendezvous.split(address)).close()


@pytest.mark.covers("R05")
def test_everyone_hears_who_is_missing(address):
    errors = finish(*(Host(address, index, 5, seconds=0.6) for index in (0, 2, 4)))
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert f"at {address} for 5 hosts; missing: host 1, 3." in str(error)


@pytest.mark.covers("R05")
def test_a_host_that_came_late_hears_who_is_missing_and_waits_no_longer(address):
    first = Host(address, 0, 3, seconds=0.8)
    time.sleep(0.4)
    late = Host(address, 2, 3, seconds=5.0)
    start = time.monotonic()
    for error in finish(first, late):
        assert str(error).startswith(f"waited 0.8 s at {address} for 3 hosts; missing: host 1.")
    assert time.monotonic() - start < 3


@pytest.mark.covers("R05")
def test_missing_hosts_are_named_with_their_address_if_known(address):
    known = {"seconds": 0.6, "addresses": ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")}
    for error in finish(*(Host(address, index, 4, **known) for index in (0, 2))):
        assert "for 4 hosts; missing: host 1 (10.0.0.2), 3 (10.0.0.4). Read the end" in str(error)


@pytest.mark.covers("R05")
@pytest.mark.parametrize("odd", [0, 2])
def test_the_host_that_would_run_something_else_is_named_by_all(address, odd):
    filler = "\n".join(f"line {n}" for n in range(4000))  # tens of KB, as a configuration with what it includes
    texts = [f"{filler}\nBATCH_SIZE = {32 if index == odd else 16}\nSEED = 1" for index in range(4)]
    errors = finish(*(Host(address, index, 4, description=texts[index]) for index in range(4)))
    for error in errors:
        assert isinstance(error, ValueError)
        assert "the hosts have different configurations (- marks the other hosts' lines):" in str(error)
        assert f"\nhost {odd}: -BATCH_SIZE = 16 +BATCH_SIZE = 32\n" in str(error)
        assert "Start the same command" in str(error)


def test_connections_stay_open_when_another_process_uses_the_port(address):
    hosts = [Host(address, index, 3, secret="s") for index in range(3)]
    assert finish(*hosts) == [None] * 3
    with socket.create_server(rendezvous.split(address)):
        zero, one, two = (host.roll for host in hosts)
        assert zero.addresses == two.addresses == ("127.0.0.1",) * 3
        assert zero.key == one.key == two.key
        assert host_messages.send(two.connections[0], {"word": "ü"}, two.key, seconds=1)
        assert host_messages.receive(zero.connections[2], zero.key, seconds=1) == {"word": "ü"}
        assert host_messages.send(zero.connections[1], {"another": [1]}, zero.key, seconds=1)
        assert host_messages.receive(one.connections[0], one.key, seconds=1) == {"another": [1]}
    for host in hosts:
        host.roll.close()


@pytest.mark.covers("R05")
def test_a_missing_coordinator_is_named_with_its_address(address):
    (error,) = finish(Host(address, 1, 2, seconds=0.4))
    assert isinstance(error, TimeoutError)
    assert f"missing: host 0 (the coordinator at {address}: Connection refused)" in str(error)


def test_a_name_that_cannot_be_looked_up_is_reported_by_the_host_that_cannot(monkeypatch):
    def fails(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    (error,) = finish(Host("nobody.invalid:8476", 1, 2, seconds=0.4))
    assert isinstance(error, TimeoutError)
    assert "missing: host 0 (the coordinator at nobody.invalid:8476: this host cannot look up the name" in str(error)


def test_hosts_meet_over_ipv6():
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        address = f"[::1]:{probe.getsockname()[1]}"
    zero, one = Host(address, 0, 2), Host(address, 1, 2)
    assert finish(zero, one) == [None, None]
    assert one.roll.addresses == ("::1", "::1")


def test_another_count_is_refused_at_once(address):
    zero, wrong = Host(address, 0, 2, seconds=5), Host(address, 1, 4, seconds=5)
    (error,) = finish(wrong)
    assert "this is host 1 of 4, but host 0" in str(error)
    assert "a job of 2 hosts" in str(error)
    assert finish(zero, Host(address, 1, 2)) == [None, None]


def test_two_hosts_with_one_index_are_reported(address):
    zero, first = Host(address, 0, 3, seconds=5), Host(address, 1, 3, seconds=5)
    time.sleep(0.4)
    second = Host(address, 1, 3, seconds=5)
    (error,) = finish(first)
    assert "another process has already connected as host 1 of 3" in str(error)
    assert finish(zero, second, Host(address, 2, 3)) == [None] * 3


def authenticated(body, secret=""):
    """The bytes of a message whose content is any bytes."""
    key = hashlib.sha256(secret.encode()).digest()
    return b"renga" + len(body).to_bytes(4, "big") + hmac.digest(key, body, "sha256") + body


STRANGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a part of the header": b"reng",
    "too long": b"renga\xff\xff\xff\xff" + bytes(32),
    "wrong code": b"renga" + (2).to_bytes(4, "big") + bytes(32) + b"{}",
    "another secret": authenticated(b'{"host": 1, "of": 2, "description": ""}', "another start"),
    "nested": authenticated(b"[" * 200_000),
    "nested in an object": authenticated(b'{"host": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "no object": authenticated(b"[1]"),
    "no utf-8": authenticated(b"\xff\xfe\x00"),
    "true is no index": authenticated(b'{"host": true, "of": 2, "description": ""}'),
    "a float is no index": authenticated(b'{"host": 1.0, "of": 2, "description": ""}'),
    "infinite": authenticated(b'{"host": 1e999, "of": 2, "description": ""}'),
    "no description": authenticated(b'{"host": 1, "of": 2}'),
}


@pytest.mark.parametrize("what", STRANGE)
def test_strangers_at_the_port_are_ignored(address, what):
    zero = Host(address, 0, 2, seconds=20)
    with connected(address) as stranger:
        stranger.sendall(STRANGE[what])
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert finish(zero, Host(address, 1, 2)) == [None, None]


@contextlib.contextmanager
def connected(address):
    """A connection to host 0, which may not listen yet."""
    until = time.monotonic() + 10
    while True:
        try:
            with socket.create_connection(rendezvous.split(address)) as connection:
                yield connection
                return
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_silent_connections_do_not_delay_the_hosts(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_MOST_WAITING", 5)  # of 14: the oldest are closed
    zero = Host(address, 0, 3, seconds=20)
    with contextlib.ExitStack() as stack:
        for _ in range(14):
            stack.enter_context(connected(address))
        began = time.monotonic()
        assert finish(zero, Host(address, 2, 3), Host(address, 1, 3)) == [None] * 3
        assert time.monotonic() - began < rendezvous._HELLO_SECONDS / 2


def test_hosts_of_another_start_are_missing_and_counted(address):
    # Host 0 listens longer: a last attempt after it has left would end with "Connection refused".
    zero, other = Host(address, 0, 2, seconds=3, secret="a"), Host(address, 1, 2, seconds=1, secret="b")
    here, there = finish(zero, other)
    assert isinstance(here, TimeoutError)
    assert re.search(r"missing: host 1\. \d+ connections? of other programs, or of hosts of another start", str(here))
    assert isinstance(there, TimeoutError)
    assert "does not answer as a host of this start" in str(there)


def test_a_port_in_use_is_reported(address):
    with socket.create_server(rendezvous.split(address)):
        (error,) = finish(Host(address, 0, 2, seconds=0.3))
    assert f"host 0 cannot listen at {address}" in str(error)
    assert "another run still active" in str(error)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", ":80", "host:0", "host:x", "", "host:²", "host:99999999999", "::1:80", "[::1]", "[::1:80", "[]:80"],
)
def test_addresses_have_a_host_and_a_port(address):
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        rendezvous.split(address)


def test_an_address_of_another_machine_means_all_interfaces():
    assert rendezvous.bindable("127.0.0.1") == "127.0.0.1"
    assert rendezvous.bindable("192.0.2.1") == ""  # Reserved for documentation: nobody's.


def test_a_machine_s_own_name_that_means_loopback_is_all_interfaces(monkeypatch):
    """As Debian's installer writes it: `127.0.1.1 node001` in /etc/hosts."""
    bind = socket.socket.bind

    class Named(socket.socket):
        def bind(self, address):
            bind(self, ("127.0.1.1" if address[0] == "node001" else address[0], address[1]))

    monkeypatch.setattr(rendezvous.socket, "socket", Named)
    assert rendezvous.bindable("node001") == ""
    assert rendezvous.bindable("127.0.1.1") == "127.0.1.1"
    assert rendezvous.bindable("localhost") == "localhost"
