"""The clock that writes a schedule's learning rates into the optimizer, in steps and in tokens."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from olmo_hf.training.schedulers import LearningRateCurve


class TokenClockLR(LRScheduler):
    """A scheduler that counts steps and tokens itself and is right under Hugging Face's order of calls.

    Identical to `LRScheduler` except that its clock starts anywhere, counts tokens too, and runs one update ahead: the
    Trainer calls `optimizer.step()` and then `scheduler.step()`, so the rate that the k-th update uses is set when the
    scheduler is made (k = 1) or stepped for the (k-1)-th time. The curve always comes from the present configuration;
    only the clock is saved. Groups may carry `lr_scale` (default 1.0): their share of the curve.

    Args:
        optimizer: its groups' `lr` are overwritten at once.
        curve: from (steps, tokens), including the batch of the update, to the learning rate.
        tokens_per_step: tokens of one global batch of this launch.
        step: updates already done.
        tokens_seen: tokens already trained on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        curve: LearningRateCurve,
        *,
        tokens_per_step: int,
        step: int = 0,
        tokens_seen: int = 0,
    ):
        self.curve = curve
        self.tokens_per_step = tokens_per_step
        self.completed_steps = step
        self.tokens_seen = tokens_seen
        # Taken once: loading an optimizer's state later brings back the groups of the checkpoint.
        self._scales: list[float] = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self._used_lrs: list[float] = []
        super().__init__(optimizer)

    @property
    def last_used_lrs(self) -> list[float]:
        """Learning rate of each group in the update just done; empty before the first update of this launch."""
        return list(self._used_lrs)

    @property
    def next_lrs(self) -> list[float]:
        """Learning rate of each group in the update to come."""
        return self._scaled(self.completed_steps + 1, self.tokens_seen + self.tokens_per_step)

    def _scaled(self, step: int, tokens: int) -> list[float]:
        lr = self.curve(step, tokens)
        return [lr * scale for scale in self._scales]

    def get_lr(self) -> list[float | torch.Tensor]:
        """What `LRScheduler` writes into the groups."""
        return list(self.next_lrs)

    def step(self, epoch: int | None = None) -> None:
        """Counts the update just done and sets the rates of the next one."""
        if not self._is_initial:
            # What the groups held, not what the curve says: if something overwrote a rate, the log shows it.
            self._used_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.completed_steps += 1
            self.tokens_seen += self.tokens_per_step
        super().step()

    def set_clock(self, *, step: int, tokens_seen: int, tokens_per_step: int | None = None) -> None:
        """Puts the clock where the run stands and writes the next update's rates into the optimizer's groups.

        Needed after the optimizer's state was loaded (which brings back the rates of the checkpoint), where a batch
        was read without an update (an overflow in float16), and where batches differ in length.

        Args:
            step: updates already done.
            tokens_seen: tokens already trained on.
            tokens_per_step: tokens of the next global batch; None leaves it as it was.
        """
        self.completed_steps = step
        self.tokens_seen = tokens_seen
        if tokens_per_step is not None:
            self.tokens_per_step = tokens_per_step
        self._update_lr()

    def state_dict(self) -> dict[str, Any]:
        """The clock, as plain integers; nothing that the configuration decides."""
        return {"step": self.completed_steps, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the clock over; curve, batch size and scales stay those of this launch."""
        self.set_clock(step=state_dict["step"], tokens_seen=state_dict["tokens_seen"])
