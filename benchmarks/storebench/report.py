"""From measured rounds to a table, a picture and a verdict per target. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, OURS_SYNC = "megaresume", "megaresume, waited for"
TIMED = ("blocking", "durable", "load warm", "load cold", "first save")
STEPS = ("step", "lost to a save")
UNITS = {"memory of a save": 1e6, "memory of a load": 1e6, "bytes written": 1e6}


@dataclass(frozen=True)
class Target:
    """One line of the verdict."""

    mode: str
    what: str
    value: float
    bound: float
    met: bool
    note: str = ""


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def limits_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that the machine itself needs, by row. Blocking: one copy into memory that was idle since the last round,
    as buffers are; loading: one copy of all that a rank has, right after it. Reading cold: the better of one and two
    threads."""
    found = {name: median(values) for name, values in result["rows"]["limits"].items()}
    return {
        "blocking": found["copy"],
        "durable": found["write"],
        "load warm": found["copy of all"],
        "load cold": min(found["read cold, 1 threads"], found["read cold, 2 threads"]),
    }


def targets_of(mode: str, result: Mapping[str, Any]) -> list[Target]:
    rows, limits = result["rows"], limits_of(result)
    targets = []

    def at_most(what: str, value: float, bound: float) -> None:
        targets.append(Target(mode, what, value, bound, value <= bound))

    def at_least(what: str, value: float, bound: float) -> None:
        targets.append(Target(mode, what, value, bound, value >= bound))

    at_most("blocking / one copy", median(rows["blocking"][OURS]) / limits["blocking"], 1.3)
    at_least("raw durable write / durable save", limits["durable"] / median(rows["durable"][OURS_SYNC]), 0.9)
    at_least("copy / warm load, no digests", limits["load warm"] / median(rows["load warm"][OURS_SYNC]), 0.8)
    at_least("copy / warm load, digests", limits["load warm"] / median(rows["load warm"][OURS]), 0.65)
    at_least("raw cold read / cold load", limits["load cold"] / median(rows["load cold"][OURS]), 0.9)
    behind = {name for name in rows["blocking"] if "async" in name}
    waited = rows["blocking"].keys() - behind - {OURS, OURS_SYNC}
    targets.append(_ahead(mode, "blocking", rows, OURS, behind | waited))
    for row in ("durable", "first save", "memory of a save", "bytes written"):
        # Like with like: who blocks for all of a save needs no second copy of the state, and writes from the live one.
        targets.append(_ahead(mode, row, rows, OURS, behind))
        targets.append(_ahead(mode, row, rows, OURS_SYNC, waited))
    for row in ("load warm", "load cold", "memory of a load"):
        targets.append(_ahead(mode, row, rows, OURS, waited))
    steps = {name: median(values) for name, values in rows["step"].items()}
    peers = [value for name, value in steps.items() if name not in (OURS, "no save")]
    if OURS in steps and peers:
        at_most("step during a save / best peer's", steps[OURS] / min(peers), 1.05)
    return targets


def _ahead(mode: str, row: str, rows: Mapping[str, Any], ours: str, peers: Collection[str]) -> Target:
    """Ahead of the best peer by the median, or within the spread: the quartiles overlap."""
    values = rows[row]
    own, others = values[ours], {name: values[name] for name in peers if name in values}
    best = min(others, key=lambda name: median(others[name]))
    # A few megabytes of resident memory come and go by themselves.
    slack = 8e6 if row.startswith("memory") else 0.0
    ratio = (median(own) + 1e-9) / (median(others[best]) + slack + 1e-9)
    within = ratio > 1 and _spread(own)[0] <= _spread(others[best])[1]
    return Target(
        mode, f"{row}: {ours} / {best}", ratio, 1.0, ratio <= 1 or within, "within the spread" if within else ""
    )


def table(mode: str, result: Mapping[str, Any]) -> str:
    rows, limits = result["rows"], limits_of(result)
    gigabytes = result["state_bytes"] / 1e9
    lines = [
        f"{mode}: {gigabytes:.3f} GB of state; ms (GB/s of state; quartiles); limits are of the same run",
        "limits: "
        + ", ".join(
            f"{what} {limits[row] * 1e3:.0f} ms"
            for what, row in (
                ("one copy into idle memory", "blocking"),
                ("one copy of all that ranks hold", "load warm"),
                (f"durable write of {result['file_bytes'] / 1e9:.3f} GB", "durable"),
                ("cold read of the same", "load cold"),
            )
        ),
    ]
    for row in (*TIMED, *STEPS, *UNITS):
        lines.append(f"  {row}" + (" [MB]" if row in UNITS else ""))
        values = sorted(rows.get(row, {}).items(), key=lambda item: median(item[1]))
        for name, each in values:
            middle, (low, high) = median(each), _spread(each)
            if row in UNITS:
                text = f"{middle / UNITS[row]:9.0f}"
            elif row in STEPS:
                text = f"{middle * 1e3:9.0f} ({low * 1e3:.0f} to {high * 1e3:.0f})"
            else:
                ratio = f", {middle / limits[row]:.2f} x the limit" if row in limits else ""
                own = rows[row].get(OURS)
                ours = "" if own is None or name == OURS else f", {middle / median(own):.2f} x megaresume"
                text = (
                    f"{middle * 1e3:9.0f} ({gigabytes / middle:.2f}; {low * 1e3:.0f} to {high * 1e3:.0f}){ratio}{ours}"
                )
            lines.append(f"    {name:32s}{text}")
    lines += [f"  failed: {name}: {reason}" for name, reason in result["failures"].items()]
    return "\n".join(lines)


def verdict(targets: Sequence[Target]) -> str:
    lines = [
        f"  {'met   ' if each.met else 'MISSED'} {each.mode}: {each.what} = {each.value:.2f} (target {each.bound:g})"
        + (f", {each.note}" if each.note else "")
        for each in targets
    ]
    met = sum(each.met for each in targets)
    return "\n".join(["targets", *lines, f"bench: {met} of {len(targets)} targets met"])


def picture(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One panel per mode and row: time by contender, the limit as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(results), len(TIMED), figsize=(4 * len(TIMED), 3.2 * len(results)), squeeze=False)
    for line, (mode, result) in zip(axes, results.items(), strict=True):
        limits = limits_of(result)
        for axis, row in zip(line, TIMED, strict=True):
            values = sorted(result["rows"].get(row, {}).items(), key=lambda item: -median(item[1]))
            names, times = [name for name, _ in values], [median(each) * 1e3 for _, each in values]
            colours = ["tab:blue" if name.startswith(OURS) else "lightgrey" for name in names]
            axis.barh(names, times, color=colours)
            if row in limits:
                axis.axvline(limits[row] * 1e3, color="tab:red", linewidth=1)
            axis.set_title(f"{mode}: {row} [ms]", fontsize=9)
            axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
