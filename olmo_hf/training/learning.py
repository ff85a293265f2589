"""The part of the trainer that learns: loss, learning rate, and what is logged of them."""

import inspect
import math
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from olmo_hf.data.mixing import MixedDataset
from olmo_hf.data.order import OrderedDataset
from olmo_hf.distributed import all_reduce_sum
from olmo_hf.errors import ConfigError
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.training.loss import LossTerms
from olmo_hf.training.loss_in_model import LossSettings, loss_settings, model_loss_sums
from olmo_hf.training.metrics import MetricSums, SourceSums, batch_counts, perplexity
from olmo_hf.training.schedulers import learning_rate_curve
from olmo_hf.training.token_clock import TokenClockLR
from olmo_hf.training.updating import UpdatingTrainer

KEPT_LOGS = 1000
"""Log entries held in memory and in checkpoints; `metrics.jsonl` has them all."""


class LearningTrainer(UpdatingTrainer):
    """Identical to `UpdatingTrainer` except for how loss and learning rate are worked out and what is logged."""

    loss_is_scaled_for_ga = True  # compute_loss divides by the tokens of the whole global batch
    bolt_on_start: dict[str, int] | None = None
    """Steps and tokens at which a second warm-up began (`bolt_on_warmup`); None: there was none."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        forward = inspect.signature(self.accelerator.unwrap_model(self.model).forward)
        self._forward_names = set(forward.parameters)
        self._sums = MetricSums()
        data = self.train_dataset.dataset if isinstance(self.train_dataset, OrderedDataset) else None
        self._sources = SourceSums(data.source_names if isinstance(data, MixedDataset) else [])

    @property
    def olmo_callbacks(self) -> list[OlmoCallback]:
        """Our own callbacks, in the order they are called."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, OlmoCallback)]

    def create_accelerator_and_postprocess(self) -> None:
        """Identical to `Trainer` except that FSDP2 in half precision keeps gradients and outputs in float32.

        Accelerate's default adds gradients up in bfloat16 and rounds the loss and the rotary tables to it.
        """
        super().create_accelerator_and_postprocess()
        if self.accelerator.ddp_handler is not None:
            # Gradients lie in the buckets they are exchanged in: no copies, and 4 bytes less per parameter.
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        if self.accelerator.mixed_precision == "fp16" and self.accelerator.scaler is None:
            raise ConfigError(
                f"training.fp16: found true on the device `{self.accelerator.device.type}`, where float16 is not "
                "trained in; use training.bf16, or neither"
            )
        if self.is_fsdp_enabled and not self.args.defer_gradient_reduction:
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        if self.is_fsdp_enabled and half is not None:
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=half,
                reduce_dtype=half if self.args.fsdp_reduce_in_half else torch.float32,
                cast_forward_inputs=False,
            )

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Identical to `Trainer` except for what ranks exchange between the micro-batches of a step.

        The replicas of HSDP exchange gradients after the last one only; what waits is the part of this rank. Weights
        that stay gathered until the backward pass stay until the last one.
        """
        if isinstance(model, FSDPModule):
            is_last = self.accelerator.sync_gradients
            model.set_requires_all_reduce(is_last)
            if not self.accelerator.state.fsdp_plugin.reshard_after_forward:
                model.set_reshard_after_backward(is_last)
        return super().training_step(model, *args, **kwargs)

    # ---- loss ----

    def _set_signature_columns_if_needed(self) -> None:
        """Identical to `Trainer` except that labels are kept for a model that does not take them: the loss is here."""
        super()._set_signature_columns_if_needed()
        columns = cast(list[str], self._signature_columns)
        if "labels" not in columns:
            columns.append("labels")

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> torch.Tensor | None:
        """Identical to `Trainer` except that it counts whatever the class is called, and all tokens when asked.

        Returns:
            Labelled targets, or tokens, of the global batch: all micro-batches of all ranks.
        """
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        counts = all_reduce_sum(batch_counts(batch_samples, device))
        labels, tokens, maskable, masked = counts.unbind()
        shared = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()  # ranks that read the same batch
        if isinstance(self.train_dataset, OrderedDataset):
            self._step_tokens = self.train_dataset.global_batch_size * self.train_dataset.dataset.sequence_length
        else:
            self._step_tokens = int(tokens.item()) // shared
        self._step_masks = torch.stack([maskable, masked]) / shared
        chosen = labels if self.args.loss_denominator == "label_tokens" else tokens
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
        # Whoever asks for the outputs wants logits.
        settings = replace(self._loss, implementation="plain") if return_outputs else self._loss
        terms, outputs = model_loss_sums(model, passed, labels, settings)
        if num_items_in_batch is None:
            loss = terms.ce_sum / terms.num_labels.clamp(min=1)
        else:
            self._count(terms, num_items_in_batch)
            if terms.token_ce is not None and "source" in inputs and self._sources.sources:
                self._sources.add(terms.token_ce, labels, inputs["source"])
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
        self._step_ce = self._step_ce + terms.ce_sum / denominator
        self._step_z = self._step_z + terms.z_sum / denominator

    def _settle_step(self, *, finite: bool) -> None:
        """The step's loss goes into the next log line, or nowhere if it is no number."""
        if finite:
            self._sums.add(ce=self._step_ce, z=self._step_z, steps=1 / self.args.world_size)
            self._sums.add(maskable=self._step_masks[0], masked=self._step_masks[1])
        else:
            self._tr_loss.nan_to_num_(0.0, 0.0, 0.0)  # a sum of the Trainer's that would stay NaN for ever
        super()._settle_step(finite=finite)

    # ---- learning rate ----

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Identical to `Trainer` except that `scheduler`, where given, makes a curve on a clock in steps and tokens.

        The clock starts where the run stands; the curve is this launch's.
        """
        if self.args.scheduler is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            step, tokens = self.state.global_step, self.state.num_input_tokens_seen
            tokens_per_step = self._tokens_per_step()
            max_tokens, bolt_on = self.args.max_tokens, self.bolt_on_start
            curve = learning_rate_curve(
                self.args.scheduler,
                peak_lr=self.args.learning_rate,
                max_steps=num_training_steps,
                max_tokens=num_training_steps * tokens_per_step if max_tokens is None else max_tokens,
                bolt_on_start=bolt_on[self.args.scheduler.units] if bolt_on is not None else None,
                bolt_on_length=self.args.bolt_on_warmup,
            )
            self.lr_scheduler = TokenClockLR(
                self.inner_optimizer, curve, tokens_per_step=tokens_per_step, step=step, tokens_seen=tokens
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _tokens_per_step(self) -> int:
        """Tokens of a global batch, by the length of the first row; the clock is corrected before every update."""
        dataset: Any = self.train_dataset
        if isinstance(dataset, OrderedDataset):
            return dataset.global_batch_size * dataset.dataset.sequence_length
        args = self.args
        first = dataset[0] if hasattr(dataset, "__len__") and len(dataset) > 0 else {}
        if "input_ids" in first:
            return self.get_total_train_batch_size(args) * len(first["input_ids"])
        if args.scheduler is not None and args.scheduler.units == "tokens" and args.max_tokens is None:
            raise ConfigError(
                "scheduler.units: found 'tokens', but this data set does not tell the length of its rows; set "
                "max_tokens, the tokens of the whole run"
            )
        return 0

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
        # Steps whose update was left out are not in the mean; where there were no others it is NaN.
        sums = self._sums.take()
        steps = sums.get("steps", math.nan) * self.get_tp_size()
        ce, z = sums.get("ce", math.nan) / steps, sums.get("z", math.nan) / steps
        metrics = {"train/CrossEntropyLoss": ce, "train/Perplexity": perplexity(ce), "loss": ce + z}
        if self.args.z_loss_weight != 0.0:
            metrics["train/ZLoss"] = z
        if sums.get("maskable", 0.0) > 0:
            metrics["train/masked_instances"] = sums["masked"] / steps / self.args.world_size
        if "grad_norm" in logs:
            metrics["optim/total_grad_norm"] = logs["grad_norm"]
        for i, rate in enumerate(self._used_learning_rates(logs)):
            metrics[f"optim/learning_rate_group{i}"] = rate
        metrics.update(self._update_metrics())
        metrics.update(self._sources.take())
        metrics["throughput/total_tokens"] = self.state.num_input_tokens_seen
        for callback in self.olmo_callbacks:
            metrics.update(callback.collect_metrics(self.state))
        return metrics

    def _used_learning_rates(self, logs: dict[str, float]) -> list[float]:
        if isinstance(self.lr_scheduler, TokenClockLR):
            return self.lr_scheduler.last_used_lrs
        return [logs["learning_rate"]] if "learning_rate" in logs else []
