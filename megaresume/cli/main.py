"""`megaresume run | status | slurm`: reads arguments, calls `launch`, and gives its answer as text and exit code.

Imports neither torch nor megatron-core, so that it starts in a blink on a login node.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaresume.errors import ConfigurationError, MegaresumeError
from megaresume.job import slurm_job
from megaresume.launch import requeue, sbatch, slurm
from megaresume.launch.guard import MAX_CRASHES, MAX_CRASHES_IN_ALL, Limits
from megaresume.launch.history import read_history, render
from megaresume.launch.records import open_launch
from megaresume.launch.supervisor import HANG_TIMEOUT_S, Plan, supervise
from megaresume.outcome import EXIT_CODES, outcome_of


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code. A refusal prints one sentence and no traceback."""
    options = _parse(sys.argv[1:] if arguments is None else list(arguments))
    logging.basicConfig(
        format="%(asctime)s megaresume: %(message)s", datefmt="%Y-%m-%d %H:%M:%S", level=logging.INFO, stream=sys.stderr
    )
    try:
        return int(options.act(options))
    except MegaresumeError as error:
        print(f"megaresume {options.name}: {error}", file=sys.stderr)
        return EXIT_CODES[outcome_of(error)]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megaresume", description="Training runs that stop anywhere and go on.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    status = commands.add_parser("status", help="what a run is doing, from its files alone")
    status.add_argument("root", type=Path, help="root of the checkpoints")
    status.set_defaults(act=_status, name="status")
    _add_slurm(commands)
    return parser.parse_args(arguments)


# --- run -------------------------------------------------------------------------------------------------------------


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="start torchrun, save and stop when signalled, start it again after a crash",
        usage="megaresume run --root ROOT [options] -- torchrun --nproc-per-node 8 train.py ...",
    )
    run.add_argument("--root", type=Path, required=True, help="root of the checkpoints, shared by all hosts")
    run.add_argument(
        "--run-id", help="names this launch on all its hosts; another one for each (default: made up, for one host)"
    )
    run.add_argument("--nnodes", type=_positive, help="hosts of this launch (default: those of the Slurm step, else 1)")
    run.add_argument("--node-rank", type=int, help="which of them this is, from 0 (default: Slurm's)")
    run.add_argument("--master-addr", help="where the hosts reach node rank 0 (default: its name, by Slurm if there)")
    run.add_argument(
        "--hang-timeout",
        type=float,
        default=HANG_TIMEOUT_S,
        help="seconds without a step, a save or a poll after which a try is killed",
    )
    run.add_argument(
        "--max-crashes",
        type=_positive,
        default=MAX_CRASHES,
        help="crashes in a row without a newer checkpoint that end the run",
    )
    run.add_argument(
        "--max-crashes-in-all",
        type=_positive,
        default=MAX_CRASHES_IN_ALL,
        help="crashes of one job that end it, progress or not",
    )
    run.add_argument("command", nargs=argparse.REMAINDER, help="-- and the training command")
    run.set_defaults(act=_run, name="run")


def _run(options: argparse.Namespace) -> int:
    return supervise(plan_from(options, os.environ))


def plan_from(options: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """The supervisor's plan: what the options say, and what Slurm's environment says where they don't."""
    step = slurm.read_step(environment)
    nnodes = options.nnodes or step.nnodes
    node_rank = step.node_rank if options.node_rank is None else options.node_rank
    if not 0 <= node_rank < nnodes:
        raise ConfigurationError(f"--node-rank must be from 0 to {nnodes - 1} for {nnodes} node(s), found {node_rank}")
    if nnodes > 1 and not options.run_id:
        raise ConfigurationError(f"{nnodes} nodes need the same --run-id, another one for each launch; none was given")
    if nnodes > 1 and node_rank == 0 and not options.master_addr and not step.in_slurm:
        raise ConfigurationError("--master-addr is needed: by which name or address do the other hosts reach this one?")
    run_id = options.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    master = options.master_addr or ("127.0.0.1" if nnodes == 1 else slurm.own_address(environment))
    return Plan(
        root=options.root.absolute(),
        run_id=run_id,
        job=slurm_job(environment) or run_id,
        command=options.command[1:] if options.command[:1] == ["--"] else options.command,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master,
        hang_timeout=options.hang_timeout,
        limits=Limits(options.max_crashes, options.max_crashes_in_all),
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return number


# --- status ----------------------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    if not options.root.is_dir():
        raise ConfigurationError(f"{options.root} is not a directory: expected the root of a run's checkpoints")
    print(render(read_history(options.root, now=time.time())))
    return 0


# --- slurm -----------------------------------------------------------------------------------------------------------


def _add_slurm(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("slurm", help="job scripts, and queueing again")
    slurm_commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, act, text in (
        ("render", _render, "print a job script"),
        ("submit", _submit, "print a job script and give it to sbatch"),
    ):
        one = slurm_commands.add_parser(
            name, help=text, usage=f"megaresume slurm {name} --root ROOT [options] -- torchrun ... train.py ..."
        )
        _add_job_options(one)
        one.set_defaults(act=act, name=f"slurm {name}")
    again = slurm_commands.add_parser(
        "requeue", help="called by the job script at its end: queue the job again, or say why not"
    )
    again.add_argument("--root", type=Path, required=True)
    again.add_argument("--run-id", required=True)
    again.add_argument("--limit", type=int, default=sbatch.REQUEUE_LIMIT, help="restarts of one job that are allowed")
    again.add_argument(
        "--by",
        choices=requeue.WAYS,
        default=requeue.WAYS[0],
        help="scontrol: ask for it; exit-code: leave it to a cluster that requeues jobs ending with 75 (RequeueExit)",
    )
    again.set_defaults(act=_requeue, name="slurm requeue")


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", required=True, help="root of the checkpoints, on a file system all nodes share")
    parser.add_argument("--job-name", default="megaresume")
    parser.add_argument("--nodes", type=_positive, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: none are asked for")
    parser.add_argument("--cpus-per-task", type=_positive)
    parser.add_argument("--time", default="24:00:00", help="as for sbatch")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--array", help="task numbers, as for sbatch; each task has a root of its own below --root")
    parser.add_argument("--venv", help="virtual environment to activate")
    parser.add_argument(
        "--container", help="command that runs another one in a container: 'apptainer exec --nv image.sif'"
    )
    parser.add_argument(
        "--signal-lead",
        type=_positive,
        default=sbatch.SIGNAL_LEAD_S,
        help="seconds before the end at which Slurm asks for a save",
    )
    parser.add_argument("--requeue-limit", type=int, default=sbatch.REQUEUE_LIMIT)
    parser.add_argument("--requeue-by", choices=requeue.WAYS, default=requeue.WAYS[0])
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="one more #SBATCH line, as '--qos=high'"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the torchrun command")


def _job_from(options: argparse.Namespace) -> sbatch.JobScript:
    fields = {name: value for name, value in vars(options).items() if name not in ("act", "name", "command", "sbatch")}
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return sbatch.JobScript(command=tuple(command), more=tuple(options.sbatch), **fields)


def _render(options: argparse.Namespace) -> int:
    print(sbatch.render(_job_from(options)), end="")
    return 0


def _submit(options: argparse.Namespace) -> int:
    script = sbatch.render(_job_from(options))
    print(script, end="")
    print(slurm.submit(script), file=sys.stderr)
    return 0


def _requeue(options: argparse.Namespace) -> int:
    launch = open_launch(options.root.absolute(), options.run_id)
    return requeue.requeue(launch, environment=os.environ, limit=options.limit, way=options.by)
