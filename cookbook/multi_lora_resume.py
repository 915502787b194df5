"""Train three LoRA adapters in turn on one frozen base, and resume each of them exactly. Builds on tp_resume.py.

    for part in asyncio email unittest; do
        python cookbook/prepare_data.py --input $(python -c "import $part; print($part.__path__[0])") \\
            --output-prefix data/$part
    done
    torchrun --nproc-per-node 8 cookbook/multi_lora_resume.py --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --data-path data --save checkpoints --save-interval 5 --bf16

The adapters have ranks, data sets and lengths of their own, one optimizer and one schedule each, and each is saved on
its own: stop this script in whatever way you like and give the same line again. Take an adapter out of ADAPTERS and its
checkpoints stay where they are; put a new one in and it starts from nothing while the others go on.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import tp_resume  # the script beside this one
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megaresume import AdapterManager, DataParallelBatchSampler, LoraConfig, ResumableDataLoader
from megaresume.adapters.naming import encode_name
from megaresume.megatron import lora


@dataclass(frozen=True)
class Adapter:
    lora: LoraConfig
    train_iters: int
    global_batch_size: int
    lr: float = 3e-3
    lr_warmup_iters: int = 2


EVERYWHERE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ADAPTERS = {  # named after their data sets
    "asyncio": Adapter(LoraConfig(rank=8, alpha=16, dropout=0.1), train_iters=16, global_batch_size=16),
    "email": Adapter(LoraConfig(rank=4, alpha=8, targets=EVERYWHERE), train_iters=12, global_batch_size=8),
    "unittest": Adapter(LoraConfig(rank=16, alpha=16, dropout=0.2), train_iters=8, global_batch_size=16, lr=1e-2),
}


def build_base(args):
    """This rank's stage of the frozen base. Load your own weights here; this one is drawn from the seed."""
    fusions = ("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion")
    on_cpu = not torch.cuda.is_available()
    config = tp_resume.config_from_arguments(
        TransformerConfig, args, use_cpu_initialization=on_cpu, **dict.fromkeys(fusions, False)
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        tp_resume.BYTES.vocab_size,
        args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    base = Float16Module(config, model.cuda()) if args.bf16 else model.cuda()
    base.requires_grad_(False)
    return [base]


def build_adapter(args, base, name):
    """Attach an adapter to the base; its layers, optimizer, schedule and data are its own."""
    adapter = ADAPTERS[name]
    own = SimpleNamespace(**{**vars(args), **vars(adapter), "data_path": args.data_path / name})
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    layers = [
        DistributedDataParallel(base[0].config, ddp_config, part)
        for part in lora.attach(base, encode_name(name), adapter.lora, seed=args.seed)
    ]
    optimizer, scheduler = tp_resume.build_optimizer(own, layers)
    dataset = tp_resume.build_dataset(own)
    sampler = DataParallelBatchSampler(
        len(dataset),
        micro_batch_size=args.micro_batch_size,
        global_batch_size=adapter.global_batch_size,
        seed=args.seed,
    )
    return SimpleNamespace(
        layers=layers, optimizer=optimizer, scheduler=scheduler, dataset=dataset, sampler=sampler, batches=None
    )


def train_step(args, base, own, manager):
    """One step of the adapter that is active: as in tp_resume.py, but gradients and optimizer are the adapter's."""
    config = base[0].config
    config.grad_scale_func = own.optimizer.scale_loss
    config.finalize_model_grads_func = partial(finalize_adapter_grads, own.layers)
    for part in own.layers:
        part.zero_grad_buffer()
    own.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=tp_resume.forward_step,
        data_iterator=own.batches,
        model=base,
        num_microbatches=manager.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    updated, grad_norm, _ = own.optimizer.step()
    if updated:
        own.scheduler.step(increment=own.sampler.global_batch_size)
    loss = torch.stack(losses).mean() if losses else None  # only the last stage has it
    return {"loss": loss, "grad_norm": grad_norm, "skipped": not updated}


def finalize_adapter_grads(layers, base, *args, **kwargs):
    """The schedule hands over the model it ran, which has no gradients: those of the adapter are to be reduced."""
    finalize_model_grads(layers, *args, **kwargs)


def main():
    args = tp_resume.parse_arguments()
    tp_resume.start_distributed(args)
    base = build_base(args)
    owns = {name: build_adapter(args, base, name) for name in ADAPTERS}
    reads_data = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    with AdapterManager(
        args.save, model=base, base=f"drawn from seed {args.seed}", save_every=args.save_interval, keep_last=2
    ) as adapters:
        for name, own in owns.items():
            adapters.add(
                name,
                ADAPTERS[name].lora,
                optimizer=own.optimizer,
                scheduler=own.scheduler,
                data={"train": own.sampler},
                seed=args.seed,
            )
        adapters.resume_all()
        for own in owns.values():
            own.batches = iter(ResumableDataLoader(own.dataset, batch_sampler=own.sampler)) if reads_data else None
        while not adapters.should_stop:
            unfinished = [name for name in adapters if adapters[name].step < ADAPTERS[name].train_iters]
            if not unfinished:
                break
            for name in unfinished:
                with adapters.active(name) as manager:
                    step = train_step(args, base, owns[name], manager)
                adapters.end_step(name, **step)
                if adapters.should_stop:
                    break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
