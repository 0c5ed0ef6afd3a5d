"""What may stand where an address is expected, and what it means."""

from __future__ import annotations

import os
import socket

import grpc.aio
import pytest

from tierd.addresses import MAX_SOCKET_PATH, Address, parse_address, parse_target
from tierd.errors import DaemonUnavailable, UsageError
from tierd.listening import Listener


@pytest.mark.parametrize(
    ("text", "target", "local"),
    [
        ("ipv4:127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", "ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("ipv6:[::1]:7", "ipv6:[::1]:7", True),
        ("dns:///stores.example:9470", "dns:///stores.example:9470", False),
        ("dns:///localhost:9470", "dns:///localhost:9470", True),
        ("stores.example:9470", "stores.example:9470", False),
    ],
)
def test_several_daemons_are_named_as_grpc_names_them(text, target, local):
    address = parse_target(text, option="STORE")
    assert (address.target, address.local, str(address), address.now()) == (target, local, text, address)


@pytest.mark.parametrize(
    "text",
    [
        "ipv4:", "ipv4:localhost:1", "ipv4:127.0.0.1", "ipv4:127.0.0.1:0", "ipv4:[::1]:1", "ipv6:127.0.0.1:1",
        "ipv4:127.0.0.1:1,", "ipv4:" + ",".join(["127.0.0.1:1"] * 65), "dns:///", "dns:///name", "dns:name:1",
        "dns:///unix:/a", "dns:///a:1,b:2", "@", "nothing",
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_right_is_refused_by_its_option(text):
    with pytest.raises(UsageError, match="--worker"):
        parse_target(text, option="--worker")


@pytest.mark.parametrize("text", ["ipv4:127.0.0.1:1,127.0.0.1:2", "dns:///localhost:1", "@file"])
def test_nobody_listens_on_several(text):
    with pytest.raises(UsageError):
        parse_address(text, option="--listen")


@pytest.mark.parametrize("text", ["unix:", "unix:~no-such-user-here/socket"])
def test_a_socket_needs_a_path_that_can_be(text):
    with pytest.raises(UsageError, match="--listen"):
        parse_address(text, option="--listen")


async def test_what_is_no_socket_is_left_alone(tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("kept")
    with pytest.raises(UsageError, match="notes is there already, and no socket"):
        Listener.bind(grpc.aio.server(), Address(path=notes))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert notes.read_text() == "kept"


def test_a_socket_path_is_as_long_as_the_kernel_takes_and_no_longer(folder):
    path = folder / ("x" * (MAX_SOCKET_PATH - len(os.fsencode(folder)) - 1))
    address = parse_address(f"unix:{path}", option="--listen")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address.path))
    with pytest.raises(UsageError, match=r"--listen.*longer than the 107 bytes"):
        parse_address(f"unix:{path}y", option="--listen")


def test_an_address_may_stand_in_a_file_and_change(tmp_path):
    file = tmp_path / "worker-a"
    address = parse_target(f"@{file}", option="--worker")
    assert (address.name, address.local) == ("@worker-a", False)
    for wrong in (None, "", "nowhere", "\xff"):
        if wrong is not None:
            file.write_text(wrong, encoding="latin-1")
        with pytest.raises(DaemonUnavailable, match="worker-a tells no address"):
            address.now()
    for text in ("127.0.0.1:1", "ipv4:10.0.0.1:1,10.0.0.2:1"):
        file.write_text(f"{text}\n")
        assert str(address.now()) == text
