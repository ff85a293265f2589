"""The part of the trainer that learns: loss, gradients, optimizer, learning rate, and what is logged of them."""

import inspect
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer
from transformers.training_args import OptimizerNames

from olmo_hf.data.order import OrderedDataset
from olmo_hf.distributed import all_reduce_sum
from olmo_hf.errors import TrainingError
from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.training.clipping import AdaptiveClipper, GradientNorms, clip_by_global_norm, gradient_norms
from olmo_hf.training.loss import LossTerms, count_labels
from olmo_hf.training.loss_in_model import LossSettings, loss_settings, model_loss_sums
from olmo_hf.training.metrics import perplexity
from olmo_hf.training.nan_policy import SkippedSteps, Verdict, is_finite, judge_step, not_a_number_message
from olmo_hf.training.optimizers import UpdateRecorder, build_optimizer
from olmo_hf.training.parameter_groups import parameter_groups
from olmo_hf.training.schedulers import TokenClockLR, clip_factor_for_update, learning_rate_curve
from olmo_hf.training.tensor_statistics import detailed_metrics
from olmo_hf.training.tensors import Table, plain_name

KEPT_LOGS = 1000
"""Log entries held in memory and in checkpoints; `metrics.jsonl` has them all."""


class LearningTrainer(Trainer):
    """Identical to `Trainer` except for how loss, gradient limits, optimizer and learning rate are worked out."""

    loss_is_scaled_for_ga = True  # compute_loss divides by the tokens of the whole global batch
    args: OlmoTrainingArguments
    lr_scheduler: Any
    step_ids: list[int]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        forward = inspect.signature(self.accelerator.unwrap_model(self.model).forward)
        self._forward_names = set(forward.parameters)
        self._step_tokens = 0
        self._ce = self._z = self._step_ce = self._step_z = torch.zeros((), dtype=torch.float64)
        self._skipped = SkippedSteps()
        self._details: dict[str, float] = {}
        self._logged_steps = 0
        self._clipping_rate = torch.zeros(())
        self._clipper: AdaptiveClipper | None = None
        self._restored_norms: Table = {}

    @property
    def olmo_callbacks(self) -> list[OlmoCallback]:
        """Our own callbacks, in the order they are called."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, OlmoCallback)]

    def create_accelerator_and_postprocess(self) -> None:
        """Identical to `Trainer` except that FSDP2 in half precision keeps gradients and outputs in float32.

        Accelerate's default adds gradients up in bfloat16 and rounds the loss and the rotary tables to it.
        """
        super().create_accelerator_and_postprocess()
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        if self.is_fsdp_enabled and half is not None:
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
            )

    # ---- loss ----

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> torch.Tensor | None:
        """Identical to `Trainer` except that it counts whatever the class is called, and all tokens when asked.

        Returns:
            Labelled targets, or tokens, of the global batch: all micro-batches of all ranks.
        """
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        labels = sum((count_labels(batch["labels"]) for batch in batch_samples), torch.zeros((), dtype=torch.int64))
        tokens = sum(batch["labels"].numel() for batch in batch_samples)
        counts = all_reduce_sum(torch.stack([labels.to(device), torch.tensor(tokens, device=device)]))
        shared = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()  # ranks that read the same batch
        if isinstance(self.train_dataset, OrderedDataset):
            self._step_tokens = self.train_dataset.global_batch_size * self.train_dataset.dataset.sequence_length
        else:
            self._step_tokens = int(counts[1].item()) // shared
        chosen = counts[0] if self.args.loss_denominator == "label_tokens" else counts[1]
        return (chosen / shared).clamp(min=1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Identical to `Trainer` except that token losses are summed and divided by the tokens of the global batch.

        Exact for any cut into micro-batches and ranks. In evaluation, where no count is given, it is the mean over
        this batch's labels. Cross-entropy and z-loss are kept apart for the log.
        """
        labels = inputs["labels"]
        passed = {name: value for name, value in inputs.items() if name in self._forward_names and name != "labels"}
        if "use_cache" in self._forward_names:
            passed["use_cache"] = False
        settings = (
            replace(self._loss, implementation="plain") if return_outputs else self._loss
        )  # someone wants logits
        terms, outputs = model_loss_sums(model, passed, labels, settings)
        if num_items_in_batch is None:
            loss = terms.ce_sum / terms.num_labels.clamp(min=1)
        else:
            self._count(terms, num_items_in_batch)
            # DDP and FSDP average gradients over ranks; the sum over ranks is wanted.
            ranks = self.accelerator.num_processes // self.get_tp_size()
            loss = terms.total / num_items_in_batch * ranks
        return (loss, outputs) if return_outputs else loss

    @cached_property
    def _loss(self) -> LossSettings:
        return loss_settings(
            cast(nn.Module, self.model),
            implementation=self.args.loss_implementation,
            z_loss_weight=self.args.z_loss_weight,
            chunk_tokens=self.args.loss_chunk_tokens,
            keep_head=self.args.torch_compile or self.get_tp_size() > 1,
        )

    def _count(self, terms: LossTerms, denominator: torch.Tensor | int) -> None:
        """Add a micro-batch to the loss of this step; nothing here waits for the device."""
        self._step_ce = self._step_ce.to(terms.ce_sum.device) + terms.ce_sum / denominator
        self._step_z = self._step_z.to(terms.z_sum.device) + terms.z_sum / denominator

    # ---- gradients ----

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
        """Judges the step's gradient and counts its loss; with float16 an overflow is the scaler's business."""
        finite = is_finite(norms, self._step_ce + self._step_z)
        if self.accelerator.scaler is not None:
            self._skipped.total += not finite
            verdict: Verdict = "update"
        else:
            verdict = judge_step(
                finite,
                policy=self.args.nan_policy,
                skipped=self._skipped,
                max_skipped_in_a_row=self.args.max_skipped_steps,
            )
        if verdict == "stop":
            raise TrainingError(
                not_a_number_message(
                    step=self.state.global_step + 1,
                    rank=self.args.process_index,
                    instance_ids=self.step_ids,
                    skipped=self._skipped,
                    grad_norm=float(norms.total),
                    loss=float(self._step_ce + self._step_z),
                )
            )
        if finite:
            self._ce, self._z = self._ce + self._step_ce, self._z + self._step_z
            self._logged_steps += 1
        else:
            self._tr_loss.nan_to_num_(0.0, 0.0, 0.0)  # a sum of the Trainer's that would stay NaN for ever
        self._step_ce, self._step_z = torch.zeros_like(self._step_ce), torch.zeros_like(self._step_z)
        return verdict == "update"

    def _set_clock(self) -> None:
        """Brings the schedule to where the run stands: an overflow in float16 reads a batch without stepping it."""
        clock = self.lr_scheduler
        if isinstance(clock, TokenClockLR) and clock.completed_steps != self.state.global_step:
            clock.set_clock(step=self.state.global_step, tokens_seen=self._tokens_before_step())

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
        return clip_factor_for_update(self.args.scheduler, completed=completed)

    def _tokens_before_step(self) -> int:
        return self.state.num_input_tokens_seen - self._step_tokens

    def _adaptive_clipper(self, names: Any) -> AdaptiveClipper:
        if self._clipper is None:
            self._clipper = AdaptiveClipper(
                [plain_name(name) for name in names],
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
        """Tensors kept beside the optimizer in a checkpoint: the memory of adaptive clipping."""
        if self._clipper is None:
            return dict(self._restored_norms)
        return {name: norm.detach().cpu() for name, norm in self._clipper.running_norms.items()}

    def _load_extra_tensors(self, table: Table) -> None:
        self._restored_norms, self._clipper = table, None

    # ---- optimizer and learning rate ----

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Identical to `Trainer` except for which parameters decay; `optimizer` rules unless `optim` is set."""
        model = cast(nn.Module, self.model if model is None else model)
        if self.optimizer is None and self.args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
            self.optimizer = build_optimizer(model, self.args)
        elif self.optimizer is None:
            groups = parameter_groups(
                model,
                weight_decay=self.args.weight_decay,
                decay_norm_and_bias=self.args.decay_norm_and_bias,
                decay_embeddings=self.args.decay_embeddings,
                rule=self.args.weight_decay_rule,
            )
            optimizer_class, settings = self.get_optimizer_cls_and_kwargs(self.args, cast(Any, model))
            self.optimizer = optimizer_class(groups, **settings)
        return cast(torch.optim.Optimizer, self.optimizer)

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate's wrapper."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Identical to `Trainer` except that `scheduler`, where given, makes a curve on a clock in steps and tokens.

        The clock starts where the run stands; the curve is this launch's.
        """
        if self.args.scheduler is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            step, tokens = self.state.global_step, self.state.num_input_tokens_seen
            tokens_per_step = self._tokens_per_step()
            in_steps = self.args.scheduler.units == "steps"
            max_tokens = self.args.max_tokens
            curve = learning_rate_curve(
                self.args.scheduler,
                peak_lr=self.args.learning_rate,
                max_steps=num_training_steps,
                max_tokens=num_training_steps * tokens_per_step if max_tokens is None else max_tokens,
                bolt_on_start=self._bolt_on_start(step if in_steps else tokens),
                bolt_on_length=self.args.bolt_on_warmup,
            )
            self.lr_scheduler = TokenClockLR(
                self.inner_optimizer, curve, tokens_per_step=tokens_per_step, step=step, tokens_seen=tokens
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _bolt_on_start(self, clock: float) -> float | None:
        return clock if self.args.bolt_on_warmup > 0 and self.args.reset_optimizer else None

    def _tokens_per_step(self) -> int:
        dataset = self.train_dataset
        return (
            dataset.global_batch_size * dataset.dataset.sequence_length if isinstance(dataset, OrderedDataset) else 0
        )

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Identical to `Trainer` except that tokens of all ranks are counted on the host, once per optimizer step."""
        if self.accelerator.sync_gradients:
            self.state.num_input_tokens_seen += self._step_tokens

    # ---- metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Identical to `Trainer` except that a training step also logs the names of the original trainer."""
        if "loss" in logs:
            logs = {**logs, **self._training_metrics(logs)}
        super().log(logs, start_time)
        del self.state.log_history[:-KEPT_LOGS]

    def _training_metrics(self, logs: dict[str, float]) -> dict[str, float]:
        # One collective for both; every rank gets the same numbers.
        sums = all_reduce_sum(torch.stack([self._ce, self._z])) / self.get_tp_size()
        # Steps whose update was left out are not in the mean; where there were no others it is NaN (0 / 0).
        ce, z = (sums / self._logged_steps).tolist()
        self._ce, self._z, self._logged_steps = torch.zeros_like(self._ce), torch.zeros_like(self._z), 0
        metrics = {
            "train/CrossEntropyLoss": ce,
            "train/Perplexity": perplexity(ce),
            "loss": ce + z,
        }
        if self.args.z_loss_weight != 0.0:
            metrics["train/ZLoss"] = z
        if "grad_norm" in logs:
            metrics["optim/total_grad_norm"] = logs["grad_norm"]
        for i, rate in enumerate(self._used_learning_rates(logs)):
            metrics[f"optim/learning_rate_group{i}"] = rate
        metrics["optim/clipping_rate"] = float(self._clipping_rate)
        if self.args.nan_policy == "skip" or self.accelerator.scaler is not None:
            metrics["train/skipped_steps"] = self._skipped.total
        if self._details and self._clipper is not None:
            norms = self._clipper.running_norms
            values = torch.stack(list(norms.values())).tolist()
            metrics.update({f"optim/grad_norm_exp_avg/{name}": v for name, v in zip(norms, values, strict=True)})
        metrics.update(self._details)
        self._details = {}
        if isinstance(self.inner_optimizer, UpdateRecorder):
            updates = self.inner_optimizer.pop_update_metrics()
            metrics.update({f"optim/{name}": float(value) for name, value in updates.items()})
        metrics["throughput/total_tokens"] = self.state.num_input_tokens_seen
        for callback in self.olmo_callbacks:
            metrics.update(callback.collect_metrics(self.state))
        return metrics

    def _used_learning_rates(self, logs: dict[str, float]) -> list[float]:
        if isinstance(self.lr_scheduler, TokenClockLR):
            return self.lr_scheduler.last_used_lrs
        return [logs["learning_rate"]] if "learning_rate" in logs else []
