"""What Slurm says, asked by its own commands: this step's place, a job's state, a node's address. Decides nothing."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaresume.errors import ConfigurationError

logger = logging.getLogger("megaresume.launch.slurm")

_TIMEOUT_S = 60.0
_PAIR = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z:/]*)=(\S*)")


@dataclass(frozen=True)
class Step:
    """This process among the nodes of a Slurm step; 1 node and rank 0 outside one."""

    nnodes: int = 1
    node_rank: int = 0
    in_slurm: bool = False


def read_step(environment: Mapping[str, str]) -> Step:
    """From what `srun` sets. A batch script without `srun` means its own node alone, however many the job has."""
    nodes, rank = environment.get("SLURM_STEP_NUM_NODES", ""), environment.get("SLURM_NODEID", "")
    if not (nodes.isascii() and nodes.isdigit() and rank.isascii() and rank.isdigit()):
        return Step()
    return Step(int(nodes), int(rank), in_slurm=True)


@dataclass(frozen=True)
class JobState:
    """Slurm's view of a job: "RUNNING", ... and how often it was restarted."""

    state: str
    restarts: int


class SlurmError(Exception):
    """A command of Slurm's that failed or is not there; the message is for people."""


def job_state(job: str) -> JobState:
    """What `scontrol show job` says. Raises SlurmError."""
    facts = dict(_PAIR.findall(_run(["scontrol", "-o", "show", "job", job])))
    try:
        return JobState(facts["JobState"], int(facts["Restarts"]))
    except (KeyError, ValueError) as error:
        raise SlurmError(f"scontrol show job {job} says nothing of JobState and Restarts: {error!r}") from error


def requeue_job(job: str) -> None:
    """Put the job back in the queue; this very job is killed milliseconds later. Raises SlurmError."""
    _run(["scontrol", "requeue", job])


def own_address(environment: Mapping[str, str]) -> str:
    """How other nodes reach this one: its NodeAddr, for node names need not resolve; else, aloud, its host name."""
    node = environment.get("SLURMD_NODENAME")
    if node:
        try:
            address = dict(_PAIR.findall(_run(["scontrol", "-o", "show", "node", node]))).get("NodeAddr")
            if address:
                return str(address)
        except SlurmError as error:
            logger.info("the address of node %s is unknown (%s); using the host's name", node, error)
    return socket.gethostname()


def submit(script: str) -> str:
    """Give a job script to sbatch; returns what it says. Raises ConfigurationError with its words where it refuses."""
    try:
        return _run(["sbatch"], text=script).strip()
    except SlurmError as error:
        raise ConfigurationError(str(error)) from error


def _run(command: Sequence[str], *, text: str | None = None) -> str:
    name = " ".join(command)
    try:
        done = subprocess.run(list(command), input=text, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise SlurmError(f"{name}: {error}") from error
    if done.returncode != 0:
        raise SlurmError(f"{name}: exit code {done.returncode}: {done.stderr.strip()[:500]}")
    return done.stdout
