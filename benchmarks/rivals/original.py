"""The original package's trainer (`ai2-olmo==0.6.0`) on the work; runs in an environment of its own, without ours.

How to make one is in `benchmarks/speed.py`. Its loop, loader, loss, clipping and optimizer are used as they are, under
DDP with one process: on a CPU it has nothing simpler. Of the weight of its z-loss only the default can be asked for,
so the loss function is given another one.
"""

import os
import sys
import time
import types
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.update(
    MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", FS_LOCAL_RANK="0"
)
wandb: Any = types.ModuleType("wandb")  # imported by the trainer, and not wanted here
wandb.run = None
sys.modules["wandb"] = wandb

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from olmo.config import (  # noqa: E402
    BlockType,
    DataConfig,
    DDPConfig,
    DDPGradSyncMode,
    DistributedStrategy,
    InitFnType,
    LayerNormType,
    ModelConfig,
    OptimizerConfig,
    OptimizerType,
    SchedulerConfig,
    TrainConfig,
)
from olmo.data import build_train_dataloader  # noqa: E402
from olmo.model import OLMo  # noqa: E402
from olmo.optim import build_optimizer, build_scheduler  # noqa: E402
from olmo.train import Trainer, cross_entropy_loss  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from workloads import (  # noqa: E402
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    WORKLOADS,
    Z_LOSS_WEIGHT,
    Workload,
    rival_options,
    tell,
)


class TimedTrainer(Trainer):
    """The end of every step is noted."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super().train_step(*args, **kwargs)
        marks.append(time.perf_counter())
        return metrics


marks: list[float] = []


def architecture(work: Workload) -> ModelConfig:
    """OLMo-2: norms after the branches and on queries and keys, no biases, the gate and the up projection in one."""
    return ModelConfig(
        d_model=work.hidden_size,
        n_heads=work.num_heads,
        n_layers=work.num_layers,
        mlp_hidden_size=2 * work.intermediate_size,
        vocab_size=work.vocab_size,
        embedding_size=work.vocab_size,
        max_sequence_length=work.sequence_length,
        block_type=BlockType.sequential,
        layer_norm_type=LayerNormType.rms,
        layer_norm_eps=1e-6,
        norm_after=True,
        attention_layer_norm=True,
        rope=True,
        rope_theta=500_000,
        include_bias=False,
        bias_for_layer_norm=False,
        weight_tying=False,
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        init_fn=InitFnType.normal,
        init_device="cpu",
        eos_token_id=0,
        pad_token_id=1,
    )


def settings(work: Workload, folder: Path, steps: int) -> TrainConfig:
    """The run in the original's words."""
    return TrainConfig(
        run_name="speed",
        model=architecture(work),
        optimizer=OptimizerConfig(
            name=OptimizerType.adamw,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            betas=BETAS,
            eps=EPSILON,
            decay_norm_and_bias=True,
        ),
        scheduler=SchedulerConfig(t_warmup=2),
        data=DataConfig(paths=[str(folder / "tokens.npy")], memmap_dtype="uint16", drop_last=True),
        save_folder=str(folder / "original"),
        save_overwrite=True,
        save_interval=None,
        save_num_checkpoints_to_keep=0,
        max_duration=steps,
        stop_at=steps,
        global_train_batch_size=work.global_batch,
        device_train_batch_size=work.global_batch,
        device_train_microbatch_size=work.micro_batch,
        max_grad_norm=MAX_GRAD_NORM,
        precision="fp32",
        softmax_auxiliary_loss=True,
        distributed_strategy=DistributedStrategy.ddp,
        fsdp=None,
        ddp=DDPConfig(grad_sync_mode=DDPGradSyncMode.batch, find_unused_params=False),
    )


def main() -> None:
    options = rival_options()
    work = WORKLOADS[options.workload]
    folder = options.folder.resolve()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    config = settings(work, folder, options.steps)
    model = OLMo(config.model)
    trainer = TimedTrainer(
        cfg=config,
        model=model,
        dist_model=DistributedDataParallel(model),
        optim=build_optimizer(config, model),
        scheduler=build_scheduler(config),
        train_loader=build_train_dataloader(config),
        device=torch.device("cpu"),
        evaluators=[],
        loss_fn=partial(cross_entropy_loss, z_loss_multiplier=Z_LOSS_WEIGHT),
    )
    with trainer:
        marks.append(time.perf_counter())
        trainer.fit()
    assert trainer.global_step == options.steps, (trainer.global_step, options.steps)
    sys.stderr.write(f"parameters {sum(p.numel() for p in model.parameters())}, loss {trainer.cur_train_loss:.4f}\n")
    tell([after - before for before, after in pairwise(marks)])


if __name__ == "__main__":
    main()
