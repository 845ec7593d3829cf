"""What one worker knows about its machine, its network, its software and its settings, as plain values; and hints."""

import contextlib
import os
import platform
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from thinwire.comm.backends import INTERFACE, SOCKETS, take_interface
from thinwire.comm.process_groups import built_in
from thinwire.comm.topology import backend, machine, place
from thinwire.netbench.hosts import why_not

_SETTINGS = ("THINWIRE_", "GLOO_", "NCCL_", "TORCH_NCCL_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# What may differ from worker to worker by its meaning: interfaces have other names on other machines.
_OWN = {"THINWIRE_ERROR_DIR", "THINWIRE_GROUP", INTERFACE, *SOCKETS}
GLOO, NCCL = SOCKETS
_SIOCGIFFLAGS, _SIOCGIFADDR, _UP = 0x8913, 0x8915, 1
_INNER = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel")
"""Interfaces that other machines are not behind."""


def facts() -> dict[str, Any]:
    """This worker's machine, versions and settings."""
    here = place()
    take_interface()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    first = here is None or here.local_rank == 0
    return {
        "machine": machine(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
        "backends": built_in(),
        "bf16": _bf16(bool(gpus)),
        "network": network(),
        "netbench": why_not() if first else None,
        "versions": _versions(),
        "backend": backend(here) if here else ("nccl" if gpus else "gloo"),
        "settings": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SETTINGS) and name not in _OWN
        },
    }


def _versions() -> dict[str, str | None]:
    try:
        own = version("thinwire")
    except PackageNotFoundError:
        own = None
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and "nccl" in built_in() else None
    return {
        "thinwire": own,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def _bf16(on_gpu: bool) -> str:
    """Where bf16 is computed in hardware: "GPU", "CPU" or nowhere."""
    if on_gpu:
        return "GPU" if torch.cuda.is_bf16_supported(including_emulation=False) else ""
    try:
        return "CPU" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ""
    except (AttributeError, RuntimeError):  # built without oneDNN
        return ""


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Versions, backends and settings that are not the same on all ranks: each value with its ranks."""
    rows = [{**each["versions"], "backend": each["backend"], **each["settings"]} for each in everyone]
    found = []
    for what in dict.fromkeys(name for row in rows for name in row):
        by_value: dict[str | None, list[int]] = {}
        for rank, row in enumerate(rows):
            by_value.setdefault(row.get(what), []).append(rank)
        if len(by_value) > 1:
            values = [{"value": value, "ranks": ranks} for value, ranks in by_value.items()]
            found.append({"what": what, "values": values})
    return found


def nodes(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The machines of a job, each as its first worker describes it, with the ranks on it."""
    found: dict[str, dict[str, Any]] = {}
    for rank, each in enumerate(everyone):
        if each["machine"] not in found:
            shown = {name: value for name, value in each.items() if name not in ("machine", "settings")}
            found[each["machine"]] = {"node": len(found), "ranks": [], **shown}
        found[each["machine"]]["ranks"].append(rank)
    return list(found.values())


def network() -> dict[str, Any]:
    """This machine's interfaces with their addresses, what its name resolves to, and the settings."""
    try:
        resolved = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = None
    return {
        "interfaces": _addresses(),
        "hostname_address": resolved,
        "chosen": os.environ.get(GLOO),
        "chosen_for_nccl": os.environ.get(NCCL),
    }


def _addresses() -> dict[str, str]:
    """IPv4 addresses of interfaces that are up; empty where the system is not Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                (flags,) = struct.unpack("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request)[16:18])
                if flags & _UP:
                    found[name] = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
    return found


def outer(found: Mapping[str, Any]) -> list[str]:
    """Interfaces that may lead to other machines."""
    return [name for name in found["interfaces"] if not name.startswith(_INNER)]


def taken_by_gloo(found: Mapping[str, Any]) -> str | None:
    """The interface that gloo takes: the one in GLOO_SOCKET_IFNAME, else that of the hostname's address."""
    if found["chosen"]:
        return found["chosen"].split(",")[0]
    by_address = {address: name for name, address in found["interfaces"].items()}
    address = found["hostname_address"]
    return "lo" if address and address.startswith("127.") else by_address.get(address)


def blocked(nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether gloo would listen where other nodes cannot reach it, or nowhere; it would try for a minute or more."""
    return len(nodes) > 1 and any(_unreachable(node["network"]) for node in nodes)


def _unreachable(found: Mapping[str, Any]) -> bool:
    if not found["interfaces"]:  # nothing is known of them here
        return False
    if found["chosen"]:
        return not set(found["chosen"].split(",")) & set(found["interfaces"])
    return (found["hostname_address"] or "127.").startswith("127.")


def hints(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to set, in sentences; each once, with the nodes it is about. A node has `node`, `backend` and `network`."""
    said: dict[str, list[int]] = {}
    for node in nodes:
        about_nccl = _hints_for_nccl(node["network"]) if "nccl" in node["backend"] else []
        for hint in (*_hints(node["network"]), *about_nccl):
            said.setdefault(hint, []).append(node["node"])
    return [f"{_which(own, len(nodes))}{hint}" for hint, own in said.items()]


def _hints(found: Mapping[str, Any]) -> list[str]:
    chosen, ways = found["chosen"], outer(found)
    way = ways[0] if ways else "INTERFACE"
    example = f"export {INTERFACE}={way}"
    if chosen:
        missing = [name for name in chosen.split(",") if found["interfaces"] and name not in found["interfaces"]]
        there = ", ".join(found["interfaces"])
        return [f"{GLOO}={chosen}, and there is no such interface; choose from: {there}"] if missing else []
    if found["hostname_address"] is None:
        return [f"the hostname does not resolve, so gloo cannot tell others where it is: {example}"]
    if found["hostname_address"].startswith("127."):
        return [
            f"the hostname resolves to {found['hostname_address']}, which other nodes cannot reach: {example} "
            "before a job on several nodes"
        ]
    if len(ways) > 1:
        return [  # without addresses, so that it is the same on all nodes alike
            f"there are several interfaces ({', '.join(ways)}), and gloo takes "
            f"{taken_by_gloo(found) or 'that of the hostname'}: to choose another, export {INTERFACE}=NAME"
        ]
    return []


def _hints_for_nccl(found: Mapping[str, Any]) -> list[str]:
    """nccl does not read gloo's variable, and takes one of several interfaces by itself."""
    chosen, known, ways = found["chosen_for_nccl"], found["interfaces"], outer(found)
    if chosen and known and not chosen.startswith("^"):  # which lists those not to take
        beginnings = tuple(chosen.removeprefix("=").split(","))
        if not any(name.startswith(beginnings) for name in known):
            return [f"{NCCL}={chosen}, and there is no such interface; choose from: {', '.join(known)}"]
    if found["chosen"] and not chosen and len(ways) > 1:
        return [
            f"{GLOO}={found['chosen']} is for gloo only, and nccl takes one of {', '.join(ways)} by itself, perhaps a "
            f"public one: export {INTERFACE}={found['chosen']}"
        ]
    return []


def _which(nodes: Sequence[int], all_of: int) -> str:
    if len(nodes) == all_of:
        return "" if all_of == 1 else "on every node "
    return f"on node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))} "
