"""cookbook/multi_lora_resume.py resumes each adapter exactly, and its demo would notice a lie."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from megaresume.store.steplog import read_steps
from tests.adapters.tenants import Crash, adapter_root, assert_same_checkpoint
from tests.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY / "cookbook"))  # its scripts import each other by their bare names
STEPS = {"asyncio": 3, "email": 2, "unittest": 2}


def train(root: Path, data: Path, crash_after: int | None) -> None:
    """The script on this rank of the pool, with fewer steps; it dies after so many in all."""
    from dataclasses import replace

    import multi_lora_resume
    import torch

    from megaresume import AdapterManager

    done = []

    def end_step(manager: AdapterManager, name: str, **values: object) -> None:
        original(manager, name, **values)
        done.append(name)
        if len(done) == crash_after:
            raise Crash

    original = AdapterManager.end_step
    adapters = {
        name: replace(adapter, train_iters=STEPS[name], global_batch_size=4, lr_warmup_iters=1)
        for name, adapter in multi_lora_resume.ADAPTERS.items()
    }
    arguments = f"""--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --seq-length 16
        --hidden-size 32 --num-layers 2 --micro-batch-size 1
        --save-interval 1 --data-path {data} --save {root}"""
    with (
        mock.patch.object(torch.distributed, "init_process_group"),  # the pool's groups are there already
        mock.patch.object(torch.distributed, "destroy_process_group"),
        mock.patch.object(AdapterManager, "end_step", end_step),
        mock.patch.object(multi_lora_resume, "ADAPTERS", adapters),
        mock.patch.object(sys, "argv", ["multi_lora_resume.py", *arguments.split()]),
    ):
        multi_lora_resume.main()


def test_multi_lora_resume_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    import demo
    from prepare_data import write_indexed_dataset

    data = tmp_path / "data"
    for number, name in enumerate(STEPS):
        files = sorted(REPOSITORY.glob("megaresume/store/*.py"))[number::3]
        write_indexed_dataset(files, data / name)
    ranks.run(train, tmp_path / "whole", data, None, world_size=8)
    with pytest.raises(Crash):
        ranks.run(train, tmp_path / "cut", data, 4, world_size=8)
    ranks.run(train, tmp_path / "cut", data, None, world_size=8)
    for name, steps in STEPS.items():
        whole, cut = (read_steps(adapter_root(tmp_path / run, name) / "steps.jsonl") for run in ("whole", "cut"))
        assert demo.differing_steps(whole, cut, steps) == [], name
        assert max(line.attempt for line in cut) == 2
        last = f"step-{steps:08d}"
        assert_same_checkpoint(
            adapter_root(tmp_path / "cut", name) / last, adapter_root(tmp_path / "whole", name) / last
        )


def test_the_demo_kills_where_every_adapter_has_something_to_lose_and_to_keep() -> None:
    import demo_adapters

    steps = dict.fromkeys(demo_adapters.STEPS, 0)
    for _ in range(demo_adapters.KILL_AT):
        name = min((n for n in steps if steps[n] < demo_adapters.STEPS[n]), key=lambda n: steps[n])
        steps[name] += 1
    assert all(demo_adapters.SAVE_INTERVAL < done < demo_adapters.STEPS[name] for name, done in steps.items())


def test_the_demo_notices_one_differing_step(capsys: pytest.CaptureFixture[str]) -> None:
    import demo

    assert demo.conclude(36, ["email: step 3: ..."], []) == 1
    assert capsys.readouterr().out.endswith("not exact: 35 of 36 steps match bit for bit\n")
    assert demo.conclude(36, [], ["email: tp00-pp00-dp00.safetensors differs"]) == 1
    assert demo.conclude(36, [], []) == 0
    assert capsys.readouterr().out.endswith("\nexact: 36 of 36 steps match bit for bit\n")
