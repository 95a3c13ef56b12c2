import contextlib
import socket
import threading
import time

import pytest

from core import rendezvous


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
    hosts = [Host(address, index, 3) for index in range(3)]
    assert finish(*hosts) == [None] * 3
    with socket.create_server(rendezvous.split(address)):
        zero, one, two = (host.roll for host in hosts)
        assert zero.addresses == two.addresses == ("127.0.0.1",) * 3
        assert rendezvous.send(two.connections[0], {"word": "ü"}, seconds=1)
        assert rendezvous.receive(zero.connections[2], seconds=1) == {"word": "ü"}
        assert rendezvous.send(zero.connections[1], {"another": [1]}, seconds=1)
        assert rendezvous.receive(one.connections[0], seconds=1) == {"another": [1]}
    for host in hosts:
        host.roll.close()


@pytest.mark.covers("R05")
def test_a_missing_coordinator_is_named_with_its_address(address):
    (error,) = finish(Host(address, 1, 2, seconds=0.4))
    assert isinstance(error, TimeoutError)
    assert f"missing: host 0 (the coordinator at {address}" in str(error)


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


def test_strangers_at_the_port_are_ignored(address):
    zero = Host(address, 0, 2, seconds=5)
    time.sleep(0.2)
    with socket.create_connection(rendezvous.split(address)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert finish(zero, Host(address, 1, 2)) == [None, None]


def test_a_port_in_use_is_reported(address):
    with socket.create_server(rendezvous.split(address)):
        (error,) = finish(Host(address, 0, 2, seconds=0.3))
    assert f"host 0 cannot listen at {address}" in str(error)
    assert "another run still active" in str(error)


@pytest.mark.parametrize("address", ["10.0.0.1", ":80", "host:0", "host:x", ""])
def test_addresses_have_a_host_and_a_port(address):
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        rendezvous.split(address)


def test_an_address_of_another_machine_means_all_interfaces():
    assert rendezvous.bindable("127.0.0.1") == "127.0.0.1"
    assert rendezvous.bindable("192.0.2.1") == ""  # Reserved for documentation: nobody's.
