"""Train a GPT with tensor, pipeline and data parallelism on megatron-core, and resume it exactly. Start from this file.

    python cookbook/prepare_data.py --output-prefix data/stdlib
    torchrun --nproc-per-node 8 cookbook/tp_resume.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
        --data-path data/stdlib --save checkpoints --train-iters 200 --save-interval 50 --bf16

Stop it in whatever way you like and give the same torchrun line again. Model, optimizer, schedule, data set and
pipeline are megatron-core's own, under Megatron's argument names; all that megaresume adds stands in `main`. Without a
CUDA device the same script runs on the CPU.
"""

import argparse
import dataclasses
import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megaresume import DataParallelBatchSampler, ResumableDataLoader, ResumeManager
from megaresume.megatron.cpu import use_cpu

BYTES = SimpleNamespace(vocab_size=256, eod=0, unique_identifiers={})  # the "tokenizer" of prepare_data.py


NUMBERS = (  # the arguments that are numbers, and their defaults
    {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1},
    {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 64},
    {"hidden-dropout": 0.1, "attention-dropout": 0.1},
    {"micro-batch-size": 2, "global-batch-size": 16, "train-iters": 200, "save-interval": 50, "seed": 1234},
    {"lr": 3e-3, "min-lr": 3e-4, "lr-warmup-iters": 10, "weight-decay": 0.1, "clip-grad": 1.0},
)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, required=True, help="data set made by prepare_data.py, without .bin")
    parser.add_argument("--save", required=True, help="root of the checkpoints; resumed from if it holds one")
    parser.add_argument("--bf16", action="store_true", help="bf16 weights; masters, moments and gradients stay fp32")
    for name, default in [number for line in NUMBERS for number in line.items()]:
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    args.params_dtype = args.pipeline_dtype = torch.bfloat16 if args.bf16 else torch.float32
    return args


def config_from_arguments(config_class, args, **fixed):
    """A megatron config whose fields are the arguments of the same names, and `fixed`."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in vars(args).items() if name in names}, **fixed)


def start_distributed(args):
    """Join the process group, form megatron's groups, seed every random stream."""
    if use_cpu():
        torch.distributed.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()  # as Megatron does
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    if torch.distributed.get_rank() == 0:
        logging.getLogger("megaresume").setLevel(logging.INFO)


def build_model(args):
    """This rank's stage of the GPT, wrapped for data parallelism: a list of one chunk."""
    # Fused kernels come with Transformer Engine or Apex, which this script does without.
    fusions = ("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion")
    on_cpu = not torch.cuda.is_available()
    config = config_from_arguments(
        TransformerConfig, args, use_cpu_initialization=on_cpu, **dict.fromkeys(fusions, False)
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        BYTES.vocab_size,
        args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    model = Float16Module(config, model.cuda()) if args.bf16 else model.cuda()
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(config, ddp_config, model)]


def build_optimizer(args, chunks):
    """The distributed optimizer and the schedule of its learning rate, which counts samples, as Megatron's does."""
    config = config_from_arguments(OptimizerConfig, args, optimizer="adam", use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler


def build_dataset(args):
    """One epoch of the data. The order within epochs, and so the position, is the sampler's alone."""
    masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([str(args.data_path)], None),
        split="1",
        path_to_cache=str(args.data_path.parent / "cache"),
        tokenizer=BYTES,
        **dict.fromkeys(masks, False),
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()[0]


def forward_step(batches, model):
    """One micro-batch through this rank's stage: the first one needs the tokens, the last one the labels."""
    batch = {} if batches is None else {name: tensor.cuda() for name, tensor in next(batches).items()}

    def mean_loss(token_losses):
        loss = (token_losses.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return loss, loss.detach().clone()  # cloned, since the schedule scales the loss in place

    return model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels")), mean_loss


def main():
    args = parse_arguments()
    start_distributed(args)
    chunks = build_model(args)
    optimizer, scheduler = build_optimizer(args, chunks)
    dataset = build_dataset(args)
    sampler = DataParallelBatchSampler(
        len(dataset), micro_batch_size=args.micro_batch_size, global_batch_size=args.global_batch_size, seed=args.seed
    )
    with ResumeManager(
        args.save,
        model=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        data={"train": sampler},
        save_every=args.save_interval,
        keep_last=3,
    ) as manager:
        manager.resume()
        reads_data = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
        batches = iter(ResumableDataLoader(dataset, batch_sampler=sampler)) if reads_data else None
        while manager.step < args.train_iters and not manager.should_stop:
            chunks[0].zero_grad_buffer()
            optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=chunks,
                num_microbatches=manager.num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=False,
            )
            updated, grad_norm, _ = optimizer.step()
            if updated:
                scheduler.step(increment=args.global_batch_size)
            loss = torch.stack(losses).mean() if losses else None  # only the last stage has it
            manager.end_step(loss=loss, grad_norm=grad_norm, skipped=not updated)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
