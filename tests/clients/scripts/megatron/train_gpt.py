"""Train a tiny GPT with Megatron Core, as its ``examples/run_simple_mcore_train_loop.py`` does, in FP8.

Usage::

    torchrun --nproc-per-node 2 train_gpt.py --tp 2 --recipe delayed

Knows nothing of the debugger: it stands for a script of a Megatron user.
"""

import argparse
import os
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 128, 32, 2, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--recipe", default="delayed", choices=["delayed", "tensorwise", "blockwise", "mxfp8"])
    parser.add_argument("--fp8-param", action="store_true", help="weights are kept in FP8")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group(backend="nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
    )
    model_parallel_cuda_manual_seed(123)

    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
        sequence_parallel=options.tp > 1,
        num_moe_experts=4 if options.ep > 1 else None,
        moe_grouped_gemm=options.ep > 1,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        fp8="hybrid",
        fp8_recipe=options.recipe,
        fp8_param=options.fp8_param,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).cuda()
    model = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, fp8_param_gather=options.fp8_param
        ),
        module=Float16Module(config, model),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [model],
    )
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads

    model.train()
    for step in range(options.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        for loss in losses:
            print(f"step {step}: loss {loss['loss'].item()!r}", flush=True)
    torch.distributed.destroy_process_group()


def batches(step: int):
    """Random tokens, the same ones on all ranks that have to have the same."""
    generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    for _ in range(MICRO_BATCHES):
        yield torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)


def forward_step(data_iterator, model):
    tokens = next(data_iterator).cuda()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICRO_BATCH, -1)
    output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return output, partial(mean_loss)


def mean_loss(output):
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


if __name__ == "__main__":
    main()
