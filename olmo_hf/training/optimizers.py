"""Update rules: AdamW (torch's, and one that can leave untouched elements alone), Lion, and who gets which.

All of them work on sharded parameters (`DTensor`): states are sharded like their parameters, and the arithmetic, being
elementwise, runs on the local parts.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.clipping import local_tensor, reduce_over_shards
from olmo_hf.training.muon import MuonWithAdamW, split_for_muon
from olmo_hf.training.parameter_groups import (
    WeightDecayRule,
    describe_groups,
    parameter_groups,
    split_by_learning_rate,
)

DEFAULT_OPTIM = TrainingArgs.optim
"""With this value of `optim`, `optimizer` decides."""


class OptimizerSettings(Protocol):
    """The fields of the `training` section that decide the update rule (`TrainingArgs` has them all)."""

    @property
    def optimizer(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def learning_rate_factors(self) -> dict[str, float]: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...
    @property
    def adam_epsilon(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def decay_norm_and_bias(self) -> bool: ...
    @property
    def decay_embeddings(self) -> bool: ...
    @property
    def weight_decay_rule(self) -> WeightDecayRule: ...
    @property
    def fused_adamw(self) -> bool: ...
    @property
    def selective_updates(self) -> bool: ...
    @property
    def record_update_metrics(self) -> bool: ...
    @property
    def optim(self) -> Any: ...


class UpdateRecorder:
    """What an optimizer tells of its last update, for the two optimizers below.

    `record_next` is set by whoever wants numbers of the next update; `pop_update_metrics` gives them.
    """

    record_next = False

    def pop_update_metrics(self) -> dict[str, torch.Tensor]:
        """Metrics of the last recorded update by the original's names, without `optim/`; empty if none was recorded.

        A collective on sharded parameters: call it on all ranks.
        """
        raise NotImplementedError


class AdamWithUpdates(torch.optim.AdamW, UpdateRecorder):
    """Identical to `torch.optim.AdamW` except that it can skip elements and report the size of its updates.

    With `selective_updates`, elements whose gradient is exactly 0 keep weight and moments (rows of rare tokens do not
    decay meanwhile); the step counter goes on (spec: trainer.md section 13). When neither that nor a record is asked
    for, a step is torch's own.

    Args:
        params: groups, each with `param_names`.
        selective_updates: leave elements with a gradient of exactly 0 alone.
        options: as for `torch.optim.AdamW`.
    """

    def __init__(self, params: Any, *, selective_updates: bool = False, **options: Any):
        super().__init__(params, **options)
        self.selective_updates = selective_updates
        self._squared_norms: list[torch.Tensor] = []
        self._maxima: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; see the class."""
        if not (self.selective_updates or self.record_next):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._squared_norms, self._maxima = [], []
        for group in self.param_groups:
            for parameter in group["params"]:
                update = self._update(parameter, group) if parameter.grad is not None else None
                if self.record_next:
                    self._record(update, local_tensor(parameter))
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Updates one parameter and returns what was added to it beside the decay (this rank's part)."""
        state = self.state[parameter]
        if len(state) == 0:
            # The layout of torch's own AdamW, so that the two share checkpoints.
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        weight, gradient = local_tensor(parameter), local_tensor(parameter.grad)  # type: ignore[arg-type]
        first, second = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        moving: float | torch.Tensor = 1.0 if not self.selective_updates else (gradient != 0).to(weight.dtype)
        weight.mul_(1 - moving * (group["lr"] * group["weight_decay"]))
        first.lerp_(gradient, moving * (1 - beta1)) if self.selective_updates else first.lerp_(gradient, 1 - beta1)
        second.mul_(1 - moving * (1 - beta2)).addcmul_(gradient, gradient, value=1 - beta2)
        step = state["step"].item() if state["step"].device.type == "cpu" else state["step"]
        denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        update = (first / denominator).mul_(-group["lr"] / (1 - beta1**step)).mul_(moving)
        weight.add_(update)
        return update

    def _record(self, update: torch.Tensor | None, like: torch.Tensor) -> None:
        nothing = update is None or update.numel() == 0
        zero = torch.zeros((), device=like.device)
        self._squared_norms.append(zero if nothing else update.square().sum())  # type: ignore[union-attr]
        self._maxima.append(zero if nothing else update.abs().max())  # type: ignore[union-attr]

    def pop_update_metrics(self) -> dict[str, torch.Tensor]:
        """`step/{parameter}.norm` and `.max` (largest absolute value) of what the update added."""
        if not self._squared_norms:
            return {}
        names = [name for group in self.param_groups for name in group["param_names"]]
        tensors = [parameter for group in self.param_groups for parameter in group["params"]]
        norms = reduce_over_shards(torch.stack(self._squared_norms).double(), tensors).sqrt()
        maxima = reduce_over_shards(torch.stack(self._maxima), tensors, torch.distributed.ReduceOp.MAX)
        self._squared_norms, self._maxima = [], []
        metrics = {}
        for name, norm, maximum in zip(names, norms.unbind(), maxima.unbind(), strict=True):
            metrics[f"step/{name}.norm"] = norm
            metrics[f"step/{name}.max"] = maximum
        return metrics


class Lion(torch.optim.Optimizer, UpdateRecorder):
    """Lion with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675; spec: trainer.md section 13).

    `p <- (1 - lr * wd) p;  u = beta1 * m + (1 - beta1) * g;  p <- p - lr * sign(u);  m <- beta2 * m + (1 - beta2) * g`

    Args:
        params: parameters or groups.
        lr: learning rate; about a tenth of AdamW's.
        betas: decay of the momentum inside the update, and of the momentum that is kept.
        weight_decay: decoupled; about ten times AdamW's.
        selective_updates: leave elements with a gradient of exactly 0 alone, momentum included.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        selective_updates: bool = False,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.selective_updates = selective_updates
        self._products: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; see the class."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._products = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if len(self.state[parameter]) == 0:
                    momentum = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    self.state[parameter]["exp_avg"] = momentum
            if parameters:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        weights = [local_tensor(parameter) for parameter in parameters]
        gradients = [local_tensor(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]
        momenta = [local_tensor(self.state[parameter]["exp_avg"]) for parameter in parameters]
        beta1, beta2 = group["betas"]
        updates = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(updates, gradients, alpha=1 - beta1)
        if self.record_next:
            self._record(parameters, updates)
        torch._foreach_sign_(updates)
        if not self.selective_updates:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_mul_(momenta, beta2)
            torch._foreach_add_(momenta, gradients, alpha=1 - beta2)
            return
        for weight, gradient, momentum, update in zip(weights, gradients, momenta, updates, strict=True):
            moving = (gradient != 0).to(weight.dtype)
            weight.mul_(1 - moving * (group["lr"] * group["weight_decay"]))
            weight.add_(update.mul_(moving), alpha=-group["lr"])
            momentum.mul_(1 - moving * (1 - beta2)).add_(gradient, alpha=1 - beta2)

    def _record(self, parameters: list[nn.Parameter], updates: Sequence[torch.Tensor]) -> None:
        sums = [torch.stack([u.abs().sum(), u.square().sum(), (u != 0).sum().to(u.dtype)]).double() for u in updates]
        self._products.append(reduce_over_shards(torch.stack(sums, dim=1), parameters).sum(dim=1))

    def pop_update_metrics(self) -> dict[str, torch.Tensor]:
        """`update_cos_sim`: cosine between the update before and after taking its sign, over all parameters."""
        if not self._products:
            return {}
        product, squared, signs = torch.stack(self._products).sum(dim=0).unbind()
        self._products = []
        return {"update_cos_sim": product / (squared * signs).sqrt().clamp(min=1e-8)}


def _groups(model: nn.Module, training: OptimizerSettings) -> list[dict[str, Any]]:
    groups = parameter_groups(
        model,
        weight_decay=training.weight_decay,
        decay_norm_and_bias=training.decay_norm_and_bias,
        decay_embeddings=training.decay_embeddings,
        rule=training.weight_decay_rule,
    )
    return split_by_learning_rate(groups, training.learning_rate_factors, learning_rate=training.learning_rate)


def describe_optimizer(model: nn.Module, training: OptimizerSettings) -> list[tuple[str, str]]:
    """Rows (label, value) of the table printed at the start: the update rule, and who decays.

    Args:
        model: may be on the meta device.
        training: the `training` section.
    """
    peak = f"peak learning rate {training.learning_rate:g}"
    if training.optim == DEFAULT_OPTIM:
        rule = f"{training.optimizer}, {peak}, betas ({training.adam_beta1:g}, {training.adam_beta2:g})"
    else:
        rule = f"{training.optim} (Hugging Face's), {peak}"
    groups = _groups(model, training)
    if training.optim == DEFAULT_OPTIM and training.optimizer == "muon":
        groups = split_for_muon(model, groups)
    return [("optimizer", rule), *describe_groups(groups)]


def build_optimizer(model: nn.Module, training: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer of a run.

    Args:
        model: its parameters may be sharded.
        training: the `training` section, or anything with its fields.
    """
    groups = _groups(model, training)
    betas = (training.adam_beta1, training.adam_beta2)
    if training.optimizer == "lion":
        return Lion(
            groups,
            lr=training.learning_rate,
            betas=betas,
            weight_decay=training.weight_decay,
            selective_updates=training.selective_updates,
        )
    adam: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": betas,
        "eps": training.adam_epsilon,
        "weight_decay": training.weight_decay,
    }
    if training.optimizer == "muon":
        return MuonWithAdamW(split_for_muon(model, groups), **adam)
    assert training.optimizer == "adamw", training.optimizer
    if training.selective_updates or training.record_update_metrics:
        return AdamWithUpdates(groups, selective_updates=training.selective_updates, **adam)
    can_fuse = all(parameter.device.type in ("cuda", "cpu") for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, fused=True if training.fused_adamw and can_fuse else None, **adam)
