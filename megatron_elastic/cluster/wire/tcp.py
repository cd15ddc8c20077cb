"""TCP: what is set on every control connection."""

from __future__ import annotations

import socket


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
