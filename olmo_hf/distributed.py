"""Thin words over Accelerate's process state, and the one place that lets FSDP run on a CPU machine."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from olmo_hf.errors import ConfigError

Value = TypeVar("Value")

NOT_SUPPORTED = {
    "tp": "Accelerate 1.15 asks transformers for `ReplicateParallel` there, which transformers 5.23 no longer has, so "
    "that FSDP2 with tensor parallel ends in an ImportError; and a model that nobody has split before is not split at "
    "all, but trained in copies. Use fsdp2.yaml or hsdp.yaml",
    "cp": "torch 2.13 deals out a sequence in pieces that are no longer in order, knows no attention within documents "
    "then, and on CPUs no attention at all; token losses here pair each position with the next one of the same rank. "
    "Use fsdp2.yaml, with model.activation_checkpointing for long sequences",
    "sp": "Accelerate 1.15 has it through DeepSpeed only. Use fsdp2.yaml",
}
"""Sizes of `parallelism_config` that are refused, and why."""


def start_processes(timeout_seconds: float | None = None) -> None:
    """Join the process group that the launcher prepared; with a single process there is nothing to join.

    Args:
        timeout_seconds: how long ranks wait for one another in a collective. None: what the backend thinks right.

    Raises:
        ConfigError: what the launcher asks for is not supported, or it started another number of processes than it
            announced.
    """
    check_launch(os.environ)
    enable_fsdp_on_cpu()
    from accelerate import PartialState

    if not torch.accelerator.is_available():
        # The launcher passes `use_cpu` on with some distributed types only; without it transformers and Accelerate
        # take every process for the only one. Where there is no accelerator there is nothing to decide.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    patience = {} if timeout_seconds is None else {"timeout": timedelta(seconds=timeout_seconds)}
    state = PartialState(cpu=cpu, **patience)
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != announced:
        raise ConfigError(
            f"WORLD_SIZE is {announced} but {state.num_processes} processes take part; start through "
            "`accelerate launch --config_file accelerate_configs/...yaml`"
        )


def check_launch(environment: Mapping[str, str]) -> None:
    """Compares what the accelerate config asks for with what the tested versions can do.

    Args:
        environment: as `accelerate launch` has set it.

    Raises:
        ConfigError: all problems at once.
    """
    problems = [*_process_problems(environment)]
    if not problems:  # the others reckon with these
        problems = [*_fsdp_problems(environment), *_parallelism_problems(environment)]
    if problems:
        raise ConfigError(problems)


def _process_problems(environment: Mapping[str, str]) -> Iterator[str]:
    remedy = "start through `accelerate launch` or `torchrun`, which set it, or remove it from the environment"
    numbers = {name: environment.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    wrong = {name: value for name, value in numbers.items() if not value.isdecimal()}
    for name, value in wrong.items():
        yield f"{name}: found {value!r}, expected a whole number; {remedy}"
    if wrong:
        return
    own, size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if own >= max(size, 1):
        yield f"RANK: found {own} with WORLD_SIZE {size}, expected less; {remedy}"
    if size > 1 and not environment.get("MASTER_ADDR"):
        yield f"MASTER_ADDR: not set, though WORLD_SIZE is {size}; {remedy}"


def _fsdp_problems(environment: Mapping[str, str]) -> Iterator[str]:
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    if (version := environment.get("FSDP_VERSION", "1")) != "2":
        yield f"fsdp_config.fsdp_version: found {version}, expected 2; version 1 is not supported"
    if environment.get("FSDP_AUTO_WRAP_POLICY") == "SIZE_BASED_WRAP":
        yield (
            "fsdp_config.fsdp_auto_wrap_policy: found SIZE_BASED_WRAP, expected TRANSFORMER_BASED_WRAP or NO_WRAP; "
            "Accelerate 1.15 would make the list of layers a unit, which torch refuses; for units of several layers "
            "set training.fsdp_layers_per_unit"
        )
    if environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true":
        yield (
            "fsdp_config.fsdp_cpu_ram_efficient_loading: found true, expected false; every rank draws or reads its "
            "own part of the weights, so that no rank ever holds all of them and there is nothing to hand out"
        )


def _parallelism_problems(environment: Mapping[str, str]) -> Iterator[str]:
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {name: int(environment.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in names}
    for name, reason in NOT_SUPPORTED.items():
        if sizes[name] > 1:
            yield f"parallelism_config.parallelism_config_{name}_size: found {sizes[name]}, expected 1; {reason}"
    total, announced = math.prod(sizes.values()), int(environment.get("WORLD_SIZE", "1"))
    if total != announced:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"
        yield (
            f"parallelism_config: {product} = {total}, but {announced} processes take part; change the sizes in the "
            "accelerate config, or --num_processes"
        )
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        yield (
            "parallelism_config.parallelism_config_dp_shard_size: found 1; with replicas only there is nothing to "
            "shard, use accelerate_configs/ddp.yaml"
        )


def is_distributed() -> bool:
    """Whether more than one process takes part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Global rank of this process; 0 when alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 when alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_process() -> bool:
    """Whether this process is global rank 0."""
    return rank() == 0


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all processes are here."""
    if is_distributed():
        dist.barrier(group)


def new_cpu_group() -> dist.ProcessGroup | None:
    """A second group of all processes that talks over the CPU; None when alone.

    A background thread must not use the default group: its messages would be taken for those of training.
    """
    return dist.new_group(backend="gloo") if is_distributed() else None


@contextmanager
def patient_group(needed: bool) -> Iterator[dist.ProcessGroup | None]:
    """A group in which ranks may wait for one another for days, while one of them copies or reads terabytes.

    Args:
        needed: False gives None, the default group, whose patience is some minutes. Alike on all ranks.
    """
    if not needed or not is_distributed():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(days=14))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _collective_device() -> torch.device:
    """Where tensors must live for the default process group."""
    if is_distributed() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of tensors of one shape over all processes, in place where the device allows it; returns the sum."""
    if not is_distributed():
        return tensor
    home = tensor.device
    reduced = tensor if home.type == _collective_device().type else tensor.to(_collective_device())
    dist.all_reduce(reduced)
    return reduced.to(home)


def all_agree(ok: bool) -> bool:
    """True when `ok` holds on every process; the same answer everywhere."""
    if not is_distributed():
        return ok
    failures = torch.tensor([0.0 if ok else 1.0], device=_collective_device())
    dist.all_reduce(failures)
    return bool(failures.item() == 0.0)


def broadcast_object(value: Value, group: dist.ProcessGroup | None = None) -> Value:
    """Rank 0's value, on every process. Only for small plain objects of our own."""
    if not is_distributed():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=None if group is not None else _collective_device())
    return box[0]


def gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Every rank's value in rank order, on every process. Only for small plain objects of our own."""
    if not is_distributed():
        return [value]
    box: list[Any] = [None] * world_size()
    dist.all_gather_object(box, value, group)
    return box


def agreement_among(ranks: list[int]) -> Callable[[bool], bool] | None:
    """A function by which some processes learn, in a thread of their own, whether all of them say True.

    All processes call this; None when there is only one to agree.
    """
    if len(ranks) < 2:
        return None
    group = dist.new_group(ranks, backend="gloo")

    def agree(ok: bool) -> bool:
        answers: list[Any] = [None] * len(ranks)
        dist.all_gather_object(answers, ok, group)
        return all(answers)

    return agree


def run_on_all(
    action: Callable[[], Value],
    error: Callable[[list[str]], Exception],
    group: dist.ProcessGroup | None = None,
) -> Value:
    """Run `action` on every process; when it fails anywhere, all processes raise together.

    Without this a rank that fails alone leaves the others waiting in their next collective.

    Args:
        action: what every process does.
        error: makes the exception from the messages of the ranks that failed.
        group: over which they agree; None: the default one.
    """
    message, result = "", None
    try:
        result = action()
    except Exception as exception:
        message = f"{type(exception).__name__}: {exception}" if not str(exception) else str(exception)
        if not is_distributed():
            raise error([message]) from exception
    messages = gather_objects(message, group)
    if any(messages):
        raise error([f"rank {i}: {m}" for i, m in enumerate(messages) if m])
    return cast(Value, result)


def fsdp_requested() -> bool:
    """Whether the launcher asked for FSDP (`distributed_type: FSDP` in the accelerate config)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def launched_sharding(environment: Mapping[str, str]) -> tuple[Literal["full", "grad", "none"], int]:
    """What the launcher asked to spread over devices, and the number of replicas of a sharded model.

    Args:
        environment: as `accelerate launch` has set it.

    Returns:
        `full` (FSDP), `grad` (gathered weights stay until the backward pass) or `none`; replicas, 1 without HSDP.
    """
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return "none", 1
    replicas = 1
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        replicas = int(environment.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
    reshards = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    return "full" if reshards else "grad", replicas


def enable_fsdp_on_cpu() -> None:
    """Make Accelerate keep FSDP on a machine without accelerators.

    Accelerate 1.15 replaces FSDP by plain DDP on CPU without a word. Sharding over gloo works and is how the
    sharded path is tested on a laptop, so the replaced distributed type is put back. Does nothing unless the
    launcher asked for FSDP.
    """
    if not fsdp_requested():
        return
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    original = AcceleratorState.__init__
    if getattr(original, "keeps_fsdp_on_cpu", False):
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        original(self, *args, **kwargs)
        if self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin if plugin is not None else FullyShardedDataParallelPlugin()
        if self._mixed_precision != "no":
            self.fsdp_plugin.set_mixed_precision(self._mixed_precision)
        PartialState._shared_state["distributed_type"] = self.distributed_type

    init.keeps_fsdp_on_cpu = True  # type: ignore[attr-defined]
    AcceleratorState.__init__ = init
