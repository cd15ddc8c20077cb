"""TCP: how control connections are listened for, and what is set on every one."""

from __future__ import annotations

import socket


def listen(interface: str, port: int, backlog: int) -> socket.socket:
    """Listen, without blocking; port 0 takes a free one. ``::`` is all interfaces, of IPv4, too. Raises OSError."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listener = socket.create_server((interface, port), family=family, backlog=backlog, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener


def tune(sock: socket.socket, silence: float) -> None:
    """Send small messages at once, and let the connection break after ``silence`` seconds without its other machine.

    A machine that vanished, or was cut off, closes nothing. If something is on its way to it, TCP_USER_TIMEOUT bounds
    how long it may stay unacknowledged; if nothing is, the keepalive probes are what stays unacknowledged, under the
    same bound (they go out every quarter of it, in whole seconds as the kernel has it). Both are answered by the other
    machine's kernel: a process that is merely stopped does not break its connections.
    """
    probe = max(1, int(silence / 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1e3))
