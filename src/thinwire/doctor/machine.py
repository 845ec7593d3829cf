"""What one worker knows about its machine, its software and its settings, as plain values."""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from thinwire.comm.process_groups import built_in
from thinwire.comm.topology import backend, machine, place
from thinwire.doctor.interfaces import network
from thinwire.netbench.hosts import why_not

_SETTINGS = ("THINWIRE_", "GLOO_", "NCCL_", "TORCH_NCCL_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# What may differ from worker to worker by its meaning: interfaces have other names on other machines.
_OWN = {"THINWIRE_ERROR_DIR", "THINWIRE_GROUP", "THINWIRE_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


def facts() -> dict[str, Any]:
    """This worker's machine, versions and settings."""
    here = place()
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
        "settings": {name: os.environ[name] for name in sorted(os.environ) if _is_setting(name)},
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


def _is_setting(name: str) -> bool:
    return name.startswith(_SETTINGS) and name not in _OWN


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
