"""A small data-parallel training script, to be started by torchrun under the supervisor: torch alone, to start fast.

What it is told by the environment: TRAINEE_ROOT, TRAINEE_STEPS, TRAINEE_STEP_S (seconds a step takes at least),
TRAINEE_WORKERS (of the data loader), TRAINEE_FROM (a checkpoint to begin with), TRAINEE_DIE (after which step rank 1 is
killed, once). Writes its ranks' process ids to TRAINEE_ROOT/pids-<rank>.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megaresume import DataParallelBatchSampler, ResumableDataLoader, ResumeManager

FEATURES = 8


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        # Drawn from the global stream: what the loader seeds for each sample has to be right for this to be exact.
        return torch.full((FEATURES,), float(index)) + torch.rand(FEATURES)


def main() -> None:
    root, steps = Path(os.environ["TRAINEE_ROOT"]), int(os.environ["TRAINEE_STEPS"])
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    torch.manual_seed(7)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler = DataParallelBatchSampler(64, micro_batch_size=2, global_batch_size=2 * dist.get_world_size(), seed=3)
    with ResumeManager(
        root,
        model=model,
        optimizer=optimizer,
        data={"train": sampler},
        save_every=10,
        keep_last=2,
        resume_from=os.environ.get("TRAINEE_FROM"),
    ) as manager:
        manager.resume()
        (root / f"pids-{dist.get_rank()}").write_text(str(os.getpid()))
        workers = int(os.environ.get("TRAINEE_WORKERS", "0"))
        batches = iter(ResumableDataLoader(Samples(), batch_sampler=sampler, num_workers=workers))
        while manager.step < steps and not manager.should_stop:
            time.sleep(float(os.environ.get("TRAINEE_STEP_S", "0")))
            manager.end_step(loss=train_step(model, optimizer, next(batches)))
            first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if (os.environ.get("TRAINEE_DIE"), dist.get_rank(), first_life) == (str(manager.step), 1, True):
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(batch) + torch.rand(()) - batch.mean()).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main()
