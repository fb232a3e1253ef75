"""Several hosts on one machine: network namespaces with a link of a given rate between them.

    with emulated_network(bits_per_second=1e9) as hosts:
        ...                      # each rank process calls hosts.enter(host) before anything else

Ranks of one host communicate within their namespace, at the speed of memory. Each host has a link
to a switch: a veth whose two ends are shaped by `tc tbf`. Needs root and iproute2. A guard process
(this file as a program) removes the namespaces at the end of the `with` block, or when this process
is killed.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from emulation import EmulationUnavailable, guard

BURST_BYTES = 256 * 1024
"""Bytes that may be sent at once. Must exceed the segments that the kernel sends as a whole (64
KiB), or the rate is not reached; little compared to the bytes of a second.
"""
QUEUE_SECONDS = 0.05
"""Seconds that bytes may queue before they are dropped."""
CONGESTION_CONTROL = "cubic"
"""Linux's default, whatever this machine uses. With `bbr`, each connection that sends after 10 s
has at most 4 packets in flight for 0.2 s, to measure the round trip. The receiver delays their
acknowledgement by 0.04 s, so steps stall for 0.2 s and more where engines take turns.
"""
INTERFACE = "poplar0"
"""The interface of each host, in its namespace."""
BRIDGE = "switch0"
"""The bridge that joins the links, in a namespace of its own."""
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Hosts:
    """The namespaces of an open network, for the rank processes. A small picklable value."""

    names: tuple[str, ...]

    def enter(self, host: int) -> None:
        """Move the calling thread, and all threads and processes that it starts later, to a host.

        Call it before creating any socket: existing sockets stay in their namespace. Also sets
        gloo's interface.
        """
        namespace = os.open(f"/var/run/netns/{self.names[host]}", os.O_RDONLY)
        failed = ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET)
        number = ctypes.get_errno()
        os.close(namespace)
        if failed:
            raise EmulationUnavailable(f"host {host} can't be entered: {os.strerror(number)}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    @staticmethod
    def address(host: int) -> str:
        """The address of the host's interface."""
        return f"10.77.0.{host + 1}"


@contextmanager
def emulated_network(*, hosts: int = 2, bits_per_second: float) -> Iterator[Hosts]:
    """Hosts and their links to a switch, for the duration of the `with` block.

    Processes that are still in the namespaces afterwards lose the network.

    Raises:
        EmulationUnavailable: this machine does not allow it; the message says why.
    """
    prefix = f"poplar-{secrets.token_hex(4)}"
    opened = Hosts(tuple(f"{prefix}-host{host}" for host in range(hosts)))
    switch = f"{prefix}-switch"
    with guard(__file__, (*opened.names, switch)):
        _make(opened, switch, bits_per_second)
        yield opened


def _make(hosts: Hosts, switch: str, bits_per_second: float) -> None:
    for name in (*hosts.names, switch):
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
    run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
    run("ip", "-n", switch, "link", "set", BRIDGE, "up")
    for host, name in enumerate(hosts.names):
        port = f"port{host}"
        run(
            *("ip", "-n", name, "link", "add", INTERFACE, "type", "veth"),
            *("peer", "name", port, "netns", switch),
        )
        run("ip", "-n", switch, "link", "set", port, "master", BRIDGE)
        run("ip", "-n", name, "address", "add", f"{hosts.address(host)}/24", "dev", INTERFACE)
        for namespace, interface in ((name, INTERFACE), (switch, port)):
            run("ip", "-n", namespace, "link", "set", interface, "up")
            run(  # limits the rate at which this interface sends
                *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"),
                *("rate", f"{bits_per_second:.0f}bit", "burst", str(BURST_BYTES)),
                *("latency", f"{QUEUE_SECONDS * 1000:.0f}ms"),
            )
        route = ("10.77.0.0/24", "dev", INTERFACE, "congctl", CONGESTION_CONTROL)
        run("ip", "-n", name, "route", "replace", *route)


def run(*command: str) -> None:
    """Run a command.

    Raises:
        EmulationUnavailable: there is no such program, or it failed; includes its error message.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise EmulationUnavailable(f"{error}; on Debian: apt install iproute2") from None
    if done.returncode:
        raise EmulationUnavailable(
            f"network namespaces need root (or CAP_NET_ADMIN and CAP_SYS_ADMIN); "
            f"{' '.join(command)}: {done.stderr.strip()}"
        )


if __name__ == "__main__":  # the guard
    sys.stdin.buffer.read()  # ends when the parent process closes its end or exits
    for name in sys.argv[1:]:
        with suppress(EmulationUnavailable):  # it was not made
            run("ip", "netns", "delete", name)
