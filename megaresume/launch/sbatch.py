"""The job script for Slurm, from a few options. Pure. `launch/slurm/train.sbatch` is an example of what it gives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megaresume.errors import ConfigurationError
from megaresume.launch.command import check_command

SIGNAL_LEAD_S = 120
REQUEUE_LIMIT = 100
_TIME = re.compile(r"(\d+-)?\d{1,4}(:\d{2}){0,2}")


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """What a job script says; names and values are sbatch's own where it has them.

    root and venv are quoted, container is taken as it stands; `more` are further #SBATCH lines ("--qos=high").
    signal_lead: seconds before the end at which the batch shell gets USR1. With `array`, each task
    has `root/task-N`, and a word of the command that is the root becomes that.
    """

    root: str
    command: Sequence[str]
    job_name: str = "megaresume"
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    array: str | None = None
    venv: str | None = None
    container: str | None = None
    signal_lead: int = SIGNAL_LEAD_S
    requeue_limit: int = REQUEUE_LIMIT
    requeue_by: str = "scontrol"
    more: Sequence[str] = ()


def render(job: JobScript) -> str:
    """The script. Raises ConfigurationError for what would make another script than meant, such as a line break."""
    check_command(job.command, max(job.nodes, 2))
    if not _TIME.fullmatch(job.time):
        raise ConfigurationError(
            f"--time {job.time!r}: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    lines = [f"#SBATCH {option}" for option in _options(job)]
    for line in lines:
        if "\n" in line or "\r" in line:
            raise ConfigurationError(f"an option for sbatch holds a line break: {line!r}")
    training = " \\\n        ".join(_lines_of(job.command, job.root))
    return _TEMPLATE.format(
        options="\n".join(lines),
        root=shlex.quote(job.root) + ("/task-$SLURM_ARRAY_TASK_ID" if job.array else ""),
        activate=f"source {shlex.quote(job.venv + '/bin/activate')}\n" if job.venv else "",
        container=f"{job.container} " if job.container else "",
        training=training,
        limit=job.requeue_limit,
        way=job.requeue_by,
        lead=job.signal_lead,
    )


def _options(job: JobScript) -> list[str]:
    given = {
        "job-name": job.job_name,
        "partition": job.partition,
        "account": job.account,
        "array": job.array,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_task,
        "time": job.time,
        "signal": f"B:USR1@{job.signal_lead}",
        "open-mode": "append",
        "output": "%x-%A_%a.log" if job.array else "%x-%j.log",
    }
    lines = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*lines, "--requeue", *job.more]


def _lines_of(command: Sequence[str], root: str) -> list[str]:
    """The command in lines: torchrun with its options, then the script, then each option with its values.

    A word that is the root follows the variable: each task of an array has a root of its own.
    """
    lines: list[str] = []
    for word in ('"$root"' if word == root else shlex.quote(word) for word in command):
        script = word.endswith(".py")
        in_script = any(line.split()[0].endswith(".py") for line in lines)
        if lines and not script and not (in_script and word.startswith("-")):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


_TEMPLATE = """\
#!/bin/bash
{options}

# One task per node runs `megaresume run`, which starts torchrun and is the only process that has to hear a signal.
# Slurm tells this script {lead} s before the end of its time (B:USR1); preemption tells the tasks alone. Either way the
# run saves and leaves, and the last line here queues the job again, if that is right, or says why not.

root={root}
{activate}
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
run_id=$job.${{SLURM_RESTART_COUNT:-0}}     # another one for every start of the job
launch=$root/launches/$run_id

ask_to_stop() {{
    mkdir -p "$launch"
    echo "the batch script got $1" > "$launch/stop"
}}
# Not CONT, which Slurm sends a millisecond before: with a trap for both, this shell can lose the one that matters.
trap 'ask_to_stop USR1' USR1
trap 'ask_to_stop TERM' TERM

echo "===== job $job, start ${{SLURM_RESTART_COUNT:-0}}, on $SLURM_JOB_NODELIST, $(date '+%F %T') ====="

# In the background, for bash runs a trap only between commands. Every node may end in its own time (kill-on-bad-exit).
srun --ntasks-per-node=1 --kill-on-bad-exit=0 {container}\\
    megaresume run --root "$root" --run-id "$run_id" -- \\
        {training} &
srun=$!
while kill -0 "$srun" 2>/dev/null; do
    wait "$srun"
done

# How it ended stands in $launch/end.json; srun's exit code does not say it.
megaresume slurm requeue --root "$root" --run-id "$run_id" --limit {limit} --by {way}
exit $?
"""
