"""Several hosts on one machine: network namespaces with a link of a given rate between them.

    with EmulatedNetwork(hosts=2, bits_per_second=1e9) as hosts:
        ...                      # each rank process calls hosts.enter(host) before anything else

Ranks of one host communicate within their namespace, at the speed of memory. Each host has a link
to a switch: a veth whose two ends are shaped by `tc tbf`. Needs root and iproute2. The namespaces
are removed at the end of the `with` block, or by a guard process if this process is killed: this
file as a program.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType

from emulation import EmulationUnavailable

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

_SERIAL = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """The namespaces of an open network, for the rank processes. A small picklable value."""

    names: tuple[str, ...]

    def enter(self, host: int) -> None:
        """Move the calling thread, and all threads and processes that it starts later, to a host.

        Call it before creating any socket: existing sockets stay in their namespace. Also sets
        gloo's interface.

        Raises:
            ValueError: no such host.
            EmulationUnavailable: the network was closed, or this process may not enter it.
        """
        if not 0 <= host < len(self.names):
            raise ValueError(f"host {host}: there are hosts 0 to {len(self.names) - 1}")
        try:
            namespace = os.open(f"/var/run/netns/{self.names[host]}", os.O_RDONLY)
        except OSError as error:
            raise EmulationUnavailable(
                f"host {host} does not exist ({error}); its EmulatedNetwork must still be open"
            ) from error
        library = ctypes.CDLL(None, use_errno=True)
        failed = library.setns(namespace, CLONE_NEWNET)
        number = ctypes.get_errno()
        os.close(namespace)
        if failed:
            raise EmulationUnavailable(f"host {host} can't be entered: {os.strerror(number)}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    @staticmethod
    def address(host: int) -> str:
        """The address of the host's interface."""
        return f"10.77.0.{host + 1}"


class EmulatedNetwork(AbstractContextManager[Hosts]):
    """Hosts and their links to a switch, for the duration of the `with` block."""

    def __init__(self, *, hosts: int = 2, bits_per_second: float) -> None:
        """Raises `ValueError` if there are fewer than 2 hosts or the rate is not positive."""
        if hosts < 2:
            raise ValueError(f"EmulatedNetwork joins at least 2 hosts, got hosts={hosts}")
        if not bits_per_second > 0:
            raise ValueError(f"bits_per_second must be above 0, got {bits_per_second}")
        self._rate = bits_per_second
        prefix = f"poplar-{os.getpid()}-{next(_SERIAL)}"
        self._hosts = Hosts(tuple(f"{prefix}-host{host}" for host in range(hosts)))
        self._switch = f"{prefix}-switch"
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise EmulationUnavailable(f"there is no {tool!r}; on Debian: apt install iproute2")
        self._guard = _start_guard(self._namespaces)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self._hosts

    @property
    def _namespaces(self) -> tuple[str, ...]:
        return (*self._hosts.names, self._switch)

    def _make(self) -> None:
        for name in self._namespaces:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self._switch, "link", "add", BRIDGE, "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", BRIDGE, "up")
        for host, name in enumerate(self._hosts.names):
            port = f"port{host}"
            run(
                *("ip", "-n", name, "link", "add", INTERFACE, "type", "veth"),
                *("peer", "name", port, "netns", self._switch),
            )
            run("ip", "-n", self._switch, "link", "set", port, "master", BRIDGE)
            address = f"{self._hosts.address(host)}/24"
            run("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
            for namespace, interface in ((name, INTERFACE), (self._switch, port)):
                run("ip", "-n", namespace, "link", "set", interface, "up")
                self._shape(namespace, interface)
            route = ("10.77.0.0/24", "dev", INTERFACE, "congctl", CONGESTION_CONTROL)
            run("ip", "-n", name, "route", "replace", *route)

    def _shape(self, namespace: str, interface: str) -> None:
        """Limit the rate at which this interface sends."""
        run(
            *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"),
            *("rate", f"{self._rate:.0f}bit", "burst", str(BURST_BYTES)),
            *("latency", f"{QUEUE_SECONDS * 1000:.0f}ms"),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces; processes that are still in them lose the network."""
        remove(self._namespaces)
        if self._guard is not None:
            self._guard.communicate()  # closes its input, so it ends
            self._guard = None


def remove(names: Sequence[str]) -> None:
    """Remove namespaces; those that no longer exist are ignored."""
    for name in names:
        with suppress(EmulationUnavailable):
            run("ip", "netns", "delete", name)


def run(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        EmulationUnavailable: the command failed; includes its error message.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationUnavailable(
            f"network namespaces need root (or CAP_NET_ADMIN and CAP_SYS_ADMIN); "
            f"{' '.join(command)}: {done.stderr.strip()}"
        )
    return done.stdout


def _start_guard(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that removes the namespaces when this process has ended."""
    return subprocess.Popen(
        [sys.executable, __file__, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C and a closed terminal do not end it
    )


if __name__ == "__main__":  # the guard
    sys.stdin.buffer.read()  # ends when the parent process closes its end or exits
    remove(sys.argv[1:])
