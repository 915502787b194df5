"""The torchrun command of one try, and the environment it gets. Pure: starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaresume import supervised
from megaresume.errors import ConfigurationError
from megaresume.launch.records import Launch, Try

# Where a try's ranks meet is new for every try, and the same on all hosts: the supervisor's to say.
_OURS = ("--nnodes", "--node-rank", "--rdzv", "--master-addr", "--master-port", "--standalone")
_SHUTDOWN_S = "5"


def torchrun_position(command: Sequence[str]) -> int | None:
    """Where torchrun's options begin in `command` (behind a container's, perhaps); None: it is another program."""
    for position, word in enumerate(command):
        if os.path.basename(word) == "torchrun":
            return position + 1
        if word == "-m" and command[position + 1 : position + 2] == ["torch.distributed.run"]:
            return position + 2
    return None


def check_command(command: Sequence[str], nnodes: int) -> None:
    """Raise ConfigurationError for a command that cannot be started on these nodes."""
    position = torchrun_position(command)
    if not command or (position is None and nnodes > 1):
        raise ConfigurationError(
            f"expected a torchrun command after --, found {' '.join(command) or 'nothing'}; only torchrun "
            f"(or python -m torch.distributed.run) can be told how {nnodes} nodes meet"
        )
    for word in command[position or 0 :] if position is not None else ():
        if not word.startswith("-") and word.endswith(".py"):
            return
        name = word.split("=")[0].replace("_", "-")
        if name.startswith(_OURS):
            raise ConfigurationError(
                f"{word} after torchrun: leave it out, megaresume run gives every try a rendezvous of its own "
                "(nodes by --nnodes and --node-rank before the --)"
            )


def build_command(command: Sequence[str], record: Try, *, run_id: str, node_rank: int) -> list[str]:
    """`command` with the rendezvous of this try. Static: node ranks are Slurm's, so that ranks stay on their hosts."""
    position = torchrun_position(command)
    if position is None:
        return list(command)
    rendezvous = [
        f"--nnodes={record.nnodes}",
        f"--node-rank={node_rank}",
        f"--master-addr={record.master_addr}",
        f"--master-port={record.master_port}",
        f"--rdzv-id={run_id}.{record.number}",
    ]
    return [*command[:position], *rendezvous, *command[position:]]


def build_environment(
    environment: Mapping[str, str], launch: Launch, record: Try, *, stop_file: Path, heartbeat_file: Path
) -> dict[str, str]:
    """What the ranks of this try find in their environment."""
    return {
        **environment,
        supervised.STOP_FILE: str(stop_file),
        supervised.SHARED_STOP_FILE: str(launch.stop_file.absolute()),
        supervised.STATUS_FILE: str(launch.status_file(record.number).absolute()),
        supervised.HEARTBEAT_FILE: str(heartbeat_file),
        supervised.RUN_ID: launch.run_id,
        supervised.RESTARTS_IN_PLACE: str(record.number - 1),
        supervised.EARLIER_TRIES: str(record.earlier),
        # torchrun passes on what it handles, and kills the workers before they have saved: it is to know none but INT.
        "PET_SIGNALS_TO_HANDLE": "SIGINT",
        # It lends the ranks its own store; after a restart they would find in it the addresses of the ranks that died.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SHUTDOWN_S,
    }
