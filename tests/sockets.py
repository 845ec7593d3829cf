"""What the kernel counts on this process's own sockets."""

import os
import socket
import struct
from pathlib import Path

import needs


def socket_bytes() -> int:
    """Bytes that the kernel sent over the TCP sockets of this process, without headers."""
    sent = 0
    for entry in Path("/proc/self/fd").iterdir():
        if not (entry.is_symlink() and os.readlink(entry).startswith("socket:")):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                whole, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent and tcpi_bytes_retrans
                sent += whole - again
    return sent


def sees_sockets() -> bool:
    """Whether the kernel counts them, as Linux does from 4.19."""
    with socket.socket() as own:
        return hasattr(socket, "TCP_INFO") and len(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)) >= 216


needs_counts = needs.part("counted sockets", None if sees_sockets() else "this kernel does not count what one sends")
