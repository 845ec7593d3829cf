"""Stands in for srun: starts the tasks of a step on this machine with the variables that srun sets, and nothing else.

python fake_srun.py [--OPTION=VALUE …] COMMAND …    # SLURM_NTASKS tasks; signals are passed on, as srun does
"""

import os
import signal
import subprocess
import sys


def main() -> int:
    command = [word for place, word in enumerate(sys.argv[1:], 1) if not _is_option(place)]
    tasks = int(os.environ["SLURM_NTASKS"])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NODELIST": "node07",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.77",  # a login node, where no worker is
        "SLURM_NODEID": "0",
    }
    running: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda number, _: [process.send_signal(number) for process in running])
    for task in range(tasks):
        own = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
        running.append(subprocess.Popen(command, env=os.environ | step | own))
    return max(process.wait() for process in running)


def _is_option(place: int) -> bool:
    return all(word.startswith("--") for word in sys.argv[1 : place + 1])


sys.exit(main())
