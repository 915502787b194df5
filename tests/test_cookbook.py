"""The cookbook: its training script resumes exactly, its data are megatron's, its demo would notice a lie."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest

from cookbook import demo
from megaresume.store.shard import Entry, ShardIdentity, write_shard
from megaresume.store.steplog import StepLine, read_steps
from tests.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent
TEXT_FILES = sorted(REPOSITORY.glob("megaresume/store/*.py"))


class Crash(Exception):
    pass


def train(root: Path, data: Path, crash_after: int | None) -> None:
    """cookbook/tp_resume.py on this rank of the pool; it raises in the middle of the step after `crash_after`."""
    import torch

    from cookbook import tp_resume
    from megaresume import ResumeManager

    def end_step(manager: ResumeManager, **values: object) -> None:
        if manager.step == crash_after:
            raise Crash
        original(manager, **values)  # type: ignore[arg-type]

    original = ResumeManager.end_step
    arguments = f"""--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --seq-length 16
        --hidden-size 32 --num-layers 2 --micro-batch-size 1 --global-batch-size 4 --lr-warmup-iters 2
        --train-iters 5 --save-interval 2 --data-path {data} --save {root}"""
    with (
        mock.patch.object(torch.distributed, "init_process_group"),  # the pool's groups are there already
        mock.patch.object(torch.distributed, "destroy_process_group"),
        mock.patch.object(ResumeManager, "end_step", end_step),
        mock.patch.object(sys, "argv", ["tp_resume.py", *arguments.split()]),
    ):
        tp_resume.main()


def test_tp_resume_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    from cookbook.prepare_data import write_indexed_dataset

    data = tmp_path / "data" / "text"
    write_indexed_dataset(TEXT_FILES, data)
    ranks.run(train, tmp_path / "whole", data, None, world_size=8)
    with pytest.raises(Crash):
        ranks.run(train, tmp_path / "cut", data, 3, world_size=8)
    ranks.run(train, tmp_path / "cut", data, None, world_size=8)

    whole, cut = read_steps(tmp_path / "whole" / "steps.jsonl"), read_steps(tmp_path / "cut" / "steps.jsonl")
    assert [line.step for line in whole] == [1, 2, 3, 4, 5]
    assert [line.step for line in cut if line.attempt == 2] == [3, 4, 5]
    for step, line in demo.final_branch(whole).items():
        assert demo.bits(line) == demo.bits(demo.final_branch(cut)[step]) != ()
    last = "step-00000005"
    assert demo.differing_shards(tmp_path / "whole" / last, tmp_path / "cut" / last) == []


def test_tp_resume_is_short_enough_to_start_from() -> None:
    assert len((REPOSITORY / "cookbook" / "tp_resume.py").read_text("utf-8").splitlines()) <= 200


def test_prepare_data_writes_what_megatron_reads(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from cookbook import prepare_data

    contents = {"b.txt": "grüße\n".encode(), "a.md": b"", "c.py": b"x = 1\n"}
    for name, content in {**contents, "binary.txt": b"\x00\x01", "image.png": b"not a text suffix"}.items():
        (tmp_path / name).write_bytes(content)
    files = list(prepare_data.text_files([tmp_path]))
    assert prepare_data.write_indexed_dataset(files, tmp_path / "out" / "set") == (3, 9 + 1 + 7)
    dataset = IndexedDataset(str(tmp_path / "out" / "set"))
    documents = [np.asarray(dataset[i]).astype(np.uint8).tobytes() for i in range(len(dataset))]
    assert documents == [content + b"\x00" for _, content in sorted(contents.items())]
    assert len(dataset.document_indices) == 3 + 1


def test_prepare_data_says_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cookbook import prepare_data

    with pytest.raises(SystemExit, match="no such file or folder"):
        list(prepare_data.text_files([tmp_path / "missing"]))
    (tmp_path / "only.txt").write_bytes(b"\x00")
    with pytest.raises(SystemExit, match="no text found"):
        prepare_data.write_indexed_dataset([tmp_path / "only.txt"], tmp_path / "set")
    assert "only.txt" in capsys.readouterr().out
    assert not (tmp_path / "set.idx").exists()


def test_prepare_data_takes_the_standard_library_without_its_tests() -> None:
    from cookbook import prepare_data

    names = {path.name for path in prepare_data.standard_library()}
    assert {"argparse.py", "decoder.py"} <= names
    assert not any("site-packages" in path.parts for path in prepare_data.standard_library())


def lines(attempt: int, first: int, last: int) -> list[StepLine]:
    return [StepLine(attempt, step, 1 / step, 2 / step, 1e-3, 16 * step, "now") for step in range(first, last + 1)]


REFERENCE = lines(1, 1, demo.TRAIN_ITERS)
RESUMED = lines(1, 1, 26) + lines(2, 21, demo.TRAIN_ITERS)


def test_demo_calls_equal_runs_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.verdict(REFERENCE, RESUMED, []) == 0
    assert capsys.readouterr().out == "exact: 40 of 40 steps match bit for bit\n"


@pytest.mark.parametrize(
    "change",
    [
        {"loss": float(np.nextafter(1 / 30, 1))},
        {"grad_norm": float(np.nextafter(2 / 30, 1))},
        {"lr": float(np.nextafter(1e-3, 1))},
        {"consumed_train_samples": 16 * 30 + 1},
        {"loss": None},
    ],
)
def test_demo_notices_one_bit(change: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    changed = [replace(line, **change) if line.step == 30 else line for line in RESUMED]  # type: ignore[arg-type]
    assert demo.verdict(REFERENCE, changed, []) == 1
    assert capsys.readouterr().out.endswith("not exact: 39 of 40 steps match bit for bit\n")


def test_demo_notices_missing_steps_and_other_shards(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.verdict(REFERENCE, RESUMED[:-1], []) == 1
    assert demo.verdict([], [], []) == 1
    assert demo.verdict(REFERENCE, RESUMED, ["tp00-pp00-dp00.safetensors: differs"]) == 1
    assert "exact: 40" not in capsys.readouterr().out.replace("not exact", "")


def test_demo_takes_a_replayed_step_from_the_attempt_that_went_on() -> None:
    replayed = [replace(line, loss=9.0) if line.attempt == 1 and line.step > 20 else line for line in RESUMED]
    assert demo.verdict(REFERENCE, replayed, []) == 0
    table = demo.side_by_side(REFERENCE, replayed)
    assert "last in the log at SIGKILL" in table.splitlines()[-5]
    assert [row.split()[0] for row in table.splitlines() if "!" in row] == ["21", "22", "23", "24", "25", "26"]


def write_checkpoint(directory: Path, value: int, attempt: int) -> Path:
    directory.mkdir()
    entry = Entry("optim/a", "U8", (4,), memoryview(bytes([1, 2, 3, value])))
    identity = ShardIdentity("root", attempt, 40, "tp00-pp00-dp00")
    write_shard(directory / "tp00-pp00-dp00.safetensors", [entry], identity=identity, index={})
    return directory


def test_demo_compares_the_bytes_of_shards_and_not_whose_they_are(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", 4, attempt=1)
    assert demo.differing_shards(one, write_checkpoint(tmp_path / "two", 4, attempt=2)) == []
    assert len(demo.differing_shards(one, write_checkpoint(tmp_path / "three", 5, attempt=1))) == 1
    (tmp_path / "empty").mkdir()
    assert len(demo.differing_shards(one, tmp_path / "empty")) == 1


def test_demo_draws_both_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `demo`")
    demo.draw(REFERENCE, RESUMED, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_demo_kills_grandchildren_in_sessions_of_their_own() -> None:
    script = textwrap.dedent("""
        import signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print(child.pid, flush=True)
        child.wait()
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(json.loads(parent.stdout.readline()))
    assert demo.kill_with_descendants(parent) == 2
    assert parent.returncode == -9
    assert not child.is_running()
