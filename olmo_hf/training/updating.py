"""The part of the trainer that updates: gradients judged, measured and clipped, the optimizer, and what they tell."""

import math
from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer
from transformers.training_args import OptimizerNames

from olmo_hf.distributed import all_agree, gather_objects
from olmo_hf.errors import ConfigError, TrainingError
from olmo_hf.training import schedule_free
from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.clipping import AdaptiveClipper, GradientNorms, clip_by_global_norm, gradient_norms
from olmo_hf.training.nan_policy import (
    RankReport,
    SkippedSteps,
    Verdict,
    is_finite,
    judge_step,
    not_a_number_message,
)
from olmo_hf.training.optimizers import DEFAULT_OPTIM, UpdateRecorder, build_optimizer
from olmo_hf.training.parameter_groups import (
    name_parameters,
    parameter_groups,
    parameter_name,
    split_by_learning_rate,
)
from olmo_hf.training.schedulers import clip_factor_for_update
from olmo_hf.training.tensor_statistics import detailed_metrics
from olmo_hf.training.tensors import Table
from olmo_hf.training.token_clock import TokenClockLR


class UpdatingTrainer(Trainer):
    """Identical to `Trainer` except for which gradients become updates, how they are limited, and the optimizer."""

    args: OlmoTrainingArguments
    lr_scheduler: Any
    step_ids: list[int]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._step_tokens = 0
        self._step_ce = self._step_z = torch.zeros((), device=self.args.device)
        self._step_masks = torch.zeros(2)  # instances that have a mask, and those of them that are masked
        self._skipped = SkippedSteps()
        self._details: dict[str, float] = {}
        self._clipping_rate = torch.zeros(())
        self._clipper: AdaptiveClipper | None = None
        self._restored_norms: Table = {}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Identical to `Trainer` except for which parameters decay; `optimizer` rules unless `optim` is set."""
        model = cast(nn.Module, self.model if model is None else model)
        if self.optimizer is None and self.args.optim == DEFAULT_OPTIM:
            self.optimizer = build_optimizer(model, self.args)
        elif self.optimizer is None:
            self._create_named_optimizer(model)
        return cast(torch.optim.Optimizer, self.optimizer)

    def _create_named_optimizer(self, model: nn.Module) -> None:
        """The optimizer of Hugging Face's that `optim` names, with our groups."""
        name = OptimizerNames(self.args.optim).value
        try:
            optimizer = super().create_optimizer(cast(Any, model))
        except (ImportError, ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"training.optim: found {name!r}, which cannot be had here: {error}; install what it asks for, or "
                "leave `optim` out for `training.optimizer`"
            ) from error
        name_parameters(optimizer, model)
        if self.args.learning_rate_factors:
            if not all("param_names" in group for group in optimizer.param_groups):
                raise ConfigError(
                    f"training.learning_rate_factors: given together with `training.optim: {name}`, whose groups do "
                    "not hold the model's own parameters; remove one of the two"
                )
            optimizer.param_groups[:] = split_by_learning_rate(
                optimizer.param_groups, self.args.learning_rate_factors, learning_rate=self.args.learning_rate
            )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Identical to `Trainer` except for the rule: see `parameter_groups`."""
        groups = parameter_groups(
            model,
            weight_decay=1.0,
            decay_norm_and_bias=self.args.decay_norm_and_bias,
            decay_embeddings=self.args.decay_embeddings,
            rule=self.args.weight_decay_rule,
        )
        decaying = {id(parameter) for group in groups if group["weight_decay"] == 1.0 for parameter in group["params"]}
        return [name for name, parameter in model.named_parameters() if id(parameter) in decaying]

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate's wrapper."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Identical to `Trainer` except for adaptive clipping, and for no update that is not a number.

        Returns:
            The norm of all gradients before clipping; the same on every rank.
        """
        self._set_clock()
        self.accelerator.unscale_gradients(self.optimizer)
        names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
        norms = gradient_norms(parameters)
        if not self._may_update(norms):
            for parameter in parameters:
                parameter.grad = None  # every optimizer passes over what has no gradient: no decay, no momentum
            return norms.total
        self._collect_details()
        factor = self._clip_factor()
        if self.args.max_grad_norm_ratio > 0:
            ratio = self.args.max_grad_norm_ratio * factor
            step = self.state.global_step + 1
            self._clipping_rate = self._adaptive_clipper(names).clip(parameters, norms, ratio=ratio, step=step)
        else:
            self._clipping_rate = clip_by_global_norm(parameters, norms, max_norm=self.args.max_grad_norm * factor)
        return norms.total

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        """Identical to `Trainer` except that adaptive clipping also works with `max_grad_norm` off."""
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _may_update(self, norms: GradientNorms) -> bool:
        """Judges the step's gradient and loss, the same way on every rank."""
        finite = is_finite(norms, self._step_ce + self._step_z)
        verdict: Verdict
        if not finite and self._is_overflow():
            self._skipped.total += 1
            verdict = "update"  # the scaler leaves it out
        else:
            verdict = judge_step(
                finite,
                policy=self.args.nan_policy,
                skipped=self._skipped,
                max_skipped_in_a_row=self.args.max_skipped_steps,
            )
        if verdict == "stop":
            report = RankReport(self.args.process_index, float(self._step_ce + self._step_z), self.step_ids)
            raise TrainingError(
                not_a_number_message(
                    step=self.state.global_step + 1,
                    reports=gather_objects(report),
                    skipped=self._skipped,
                    grad_norm=float(norms.total),
                )
            )
        self._settle_step(finite=finite)
        return verdict == "update"

    def _is_overflow(self) -> bool:
        """In float16: whether a gradient too large for it is all that is wrong, which a smaller scale mends.

        A loss is not scaled before it is measured; and a scale that has come down below 1 was not the reason.
        """
        scaler = self.accelerator.scaler
        if scaler is None:
            return False
        return all_agree(bool((self._step_ce + self._step_z).isfinite()) and scaler.get_scale() >= 1.0)

    def _settle_step(self, *, finite: bool) -> None:
        """The loss of a step is judged with its gradient; the next step starts from nothing."""
        self._step_ce, self._step_z = torch.zeros_like(self._step_ce), torch.zeros_like(self._step_z)

    def _set_clock(self) -> None:
        """Brings the schedule to where the run stands, and to the tokens that were really read for this update.

        An overflow in float16 reads a batch without stepping the schedule; a data set without an order of its own may
        have batches of any length.
        """
        clock = self.lr_scheduler
        if not isinstance(clock, TokenClockLR):
            return
        now = (self.state.global_step, self._tokens_before_step(), self._step_tokens)
        if (clock.completed_steps, clock.tokens_seen, clock.tokens_per_step) != now:
            clock.set_clock(step=now[0], tokens_seen=now[1], tokens_per_step=now[2])

    def _collect_details(self) -> None:
        """On the steps that ask for it: what every tensor looks like, and a note to the optimizer to tell more."""
        every = self.args.optimizer_metrics_steps
        due = every is not None and (self.state.global_step + 1) % every == 0
        if due:
            self._details = detailed_metrics(self.inner_optimizer)
        if isinstance(self.inner_optimizer, UpdateRecorder):
            self.inner_optimizer.record_next = due and self.args.record_update_metrics

    def _clip_factor(self) -> float:
        if self.args.scheduler is None:
            return 1.0
        in_steps = self.args.scheduler.units == "steps"
        completed = self.state.global_step if in_steps else self._tokens_before_step()
        after = completed + (1 if in_steps else self._step_tokens)
        return clip_factor_for_update(self.args.scheduler, completed=completed, after=after)

    def _tokens_before_step(self) -> int:
        return self.state.num_input_tokens_seen - self._step_tokens

    def _adaptive_clipper(self, names: Any) -> AdaptiveClipper:
        if self._clipper is None:
            self._clipper = AdaptiveClipper(
                [parameter_name(name) for name in names],
                clip_groups=self.args.clip_groups,
                beta=max(self.args.adam_beta1, self.args.adam_beta2),
                device=self.args.device,
            )
            if self._restored_norms:
                self._clipper.load_state_dict(
                    {
                        "group_names": list(self._restored_norms),
                        "running_norms": torch.stack(list(self._restored_norms.values())),
                    }
                )
        return self._clipper

    def _extra_tensors(self) -> Table:
        """Tensors kept beside the optimizer in a checkpoint: memory of adaptive clipping, counters of its groups."""
        counters = schedule_free.counters(self.inner_optimizer)
        if self._clipper is None:
            return {**self._restored_norms, **counters}
        return {name: norm.detach().cpu() for name, norm in self._clipper.running_norms.items()} | counters

    def _load_extra_tensors(self, table: Table) -> None:
        self._restored_norms, self._clipper = schedule_free.without_counters(table), None
        if not self.args.reset_optimizer:
            schedule_free.load_counters(self.inner_optimizer, table)

    def _update_metrics(self) -> dict[str, float]:
        """What the last update tells, by the original's names; the details only if this step asked for them."""
        metrics = {"optim/clipping_rate": float(self._clipping_rate)}
        if self.args.nan_policy == "skip" or self.accelerator.scaler is not None:
            metrics["train/skipped_steps"] = self._skipped.total
        if self._details and self._clipper is not None:
            norms = self._clipper.running_norms
            values = torch.stack(list(norms.values())).tolist()
            known = {name: value for name, value in zip(norms, values, strict=True) if not math.isnan(value)}
            metrics.update({f"optim/grad_norm_exp_avg/{name}": value for name, value in known.items()})
        metrics.update(self._details)
        self._details = {}
        if isinstance(self.inner_optimizer, UpdateRecorder):
            updates = self.inner_optimizer.pop_update_metrics()
            if updates:
                values = torch.stack(list(updates.values())).tolist()
                metrics.update({f"optim/{name}": v for name, v in zip(updates, values, strict=True)})
        return metrics
