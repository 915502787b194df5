"""A throw-away Slurm cluster on this host: slurmctld, one slurmd per node, munge. Writes only below one directory.

Debian's packages are enough (slurmctld, slurmd, slurm-client, munge): several of its slurmd run on one host. No
systemd, nothing in /etc or /var. `stop` ends every process that belongs to the cluster, jobs' processes too. Knows no
megaresume.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "scontrol", "sbatch", "srun", "munged")
GRACE_S = 15  # of a preempted job
KILL_WAIT_S = 10
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CGROUP = Path("/sys/fs/cgroup")


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class Cluster:
    """A running cluster. `environment` is what its commands, and jobs, need."""

    def __init__(self, directory: Path, *, nodes: int, cpus: int = 2) -> None:
        self.directory = directory
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(directory / "slurm.conf")}
        self.proctrack = ""
        self._cpus = cpus
        self._port = _free_ports(nodes + 1)

    # --- starting and stopping ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all; under proctrack/cgroup where this machine gives it, as production clusters do, else linuxproc."""
        self._start_munge()
        for proctrack in ("cgroup", "linuxproc") if _cgroup_is_ours() else ("linuxproc",):
            self.proctrack = proctrack
            self._write_configuration()
            self._start_daemon("slurmctld", "-c", "-f", self.environment["SLURM_CONF"])
            for node in self.nodes:
                self.start_node(node)
            if self._wait_for_nodes(20.0):
                return
            self._kill_all(spare_munge=True)
        raise RuntimeError(f"the nodes never came up:\n{self.logs()}")

    def stop(self) -> list[int]:
        """End everything; returns the ids of processes that could not be ended (none, ever)."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "-u", getpass.getuser())
        left = self._kill_all(spare_munge=False)
        for controller in _CGROUP.glob("*/slurm_*"):
            for path in sorted(controller.rglob("*"), reverse=True):
                if path.is_dir():
                    with contextlib.suppress(OSError):
                        path.rmdir()
            with contextlib.suppress(OSError):
                controller.rmdir()
        return left

    def start_node(self, node: str) -> None:
        (self.directory / "spool" / node).mkdir(parents=True, exist_ok=True)
        self._start_daemon("slurmd", "-N", node, "-f", self.environment["SLURM_CONF"])

    def kill_daemon(self, node: str) -> None:
        """SIGKILL one node's slurmd; its tasks live on as orphans."""
        os.kill(int((self.directory / "spool" / f"{node}.pid").read_text()), signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """SIGKILL all of a node at once: slurmd, and every step and task on it."""
        self.kill_daemon(node)
        for process in self.steps_of(node):
            with contextlib.suppress(psutil.Error):
                for child in [*process.children(recursive=True), process]:
                    child.kill()

    def steps_of(self, node: str) -> list[psutil.Process]:
        """The slurmstepd processes of a node: those that have its log open."""
        log = str(self.directory / "log" / f"{node}.log")
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                name = process.info["name"] or ""
                if name.startswith("slurmstepd") and any(file.path == log for file in process.open_files()):
                    found.append(process)
        return found

    # --- jobs --------------------------------------------------------------------------------------------------------

    def run(self, *command: str, text: str | None = None, **environment: str) -> str:
        """Run one of Slurm's commands; returns what it prints."""
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env={**self.environment, **environment}, timeout=60
        )
        if done.returncode != 0:
            raise subprocess.SubprocessError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, script: str, *options: str, **environment: str) -> str:
        """The id of the job that sbatch made of `script`."""
        return self.run("sbatch", "--parsable", *options, text=script, **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of it, by name."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "-o", "show", "job", job)))

    def logs(self) -> str:
        texts = [path.read_text("utf-8", "replace")[-1500:] for path in sorted((self.directory / "log").glob("*.log"))]
        return "\n".join(texts)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _start_munge(self) -> None:
        place = self.directory / "munge"
        for name in ("munge", "state", "log", "spool"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        key = place / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        place.chmod(0o711)
        files = {"key-file": "munge.key", "socket": "s", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start_daemon("munged", "--force", *(f"--{name}={place / file}" for name, file in files.items()))

    def _start_daemon(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=30)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}\n{self.logs()}")

    def _wait_for_nodes(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.SubprocessError):
                idle = self.run("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N").split()
                if sorted(idle) == self.nodes:
                    return True
            time.sleep(0.2)
        return False

    def _kill_all(self, *, spare_munge: bool) -> list[int]:
        """Each process with our SLURM_CONF in its environment, save this one and its parents: daemons, steps, jobs."""
        spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        munge_pid = self.directory / "munge" / "pid"
        if spare_munge and munge_pid.exists():
            spared.add(int(munge_pid.read_text()))
        for _ in range(20):
            ours = [pid for pid in self._processes() if pid not in spared]
            for pid in ours:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not ours:
                return []
            time.sleep(0.2)
        return ours

    def _processes(self) -> Iterator[int]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # slurmstepd writes its title over its environment, but works in our directory.
                ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if ours or Path(process.cwd()).is_relative_to(self.directory):
                    yield process.pid

    def _write_configuration(self) -> None:
        here, user, host = self.directory, getpass.getuser(), socket.gethostname().split(".")[0]
        lines = [
            "ClusterName=throwaway",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={self._port[0]}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            # By default a requeued job waits until its credential has expired, two minutes.
            f"AuthInfo=socket={here}/munge/s,cred_expire=5",
            f"StateSaveLocation={here}/state",
            f"SlurmctldPidFile={here}/slurmctld.pid",
            f"SlurmctldLogFile={here}/log/slurmctld.log",
            f"SlurmdSpoolDir={here}/spool/%n",
            f"SlurmdPidFile={here}/spool/%n.pid",
            f"SlurmdLogFile={here}/log/%n.log",
            f"ProctrackType=proctrack/{self.proctrack}",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "SlurmctldTimeout=10",
            "InactiveLimit=0",
            "MinJobAge=3600",
            f"KillWait={KILL_WAIT_S}",
            "JobRequeue=1",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "PropagateResourceLimits=NONE",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} RealMemory=1000"
                for node, port in zip(self.nodes, self._port[1:], strict=True)
            ),
            "PartitionName=low Nodes=ALL Default=YES DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE "
            f"GraceTime={GRACE_S} State=UP",
            "PartitionName=high Nodes=ALL DefaultTime=10 PriorityTier=10 PreemptMode=OFF State=UP",
        ]
        (here / "slurm.conf").write_text("\n".join(lines) + "\n")
        (here / "cgroup.conf").write_text(
            "CgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\nCgroupPlugin=cgroup/v1\n"
            "ConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n"
        )


def _cgroup_is_ours() -> bool:
    probe = _CGROUP / "freezer" / f"megaresume-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
