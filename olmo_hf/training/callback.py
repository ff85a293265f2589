"""The base of our callbacks: Hugging Face's `TrainerCallback` and the hooks it lacks."""

from typing import Any

from transformers import TrainerCallback, TrainerState

from olmo_hf.data.order import DataPosition


class OlmoCallback(TrainerCallback):
    """Identical to `TrainerCallback` except for the hooks below, which `OlmoTrainer` calls.

    `state.global_step` counts optimizer steps and `state.num_input_tokens_seen` all tokens of all ranks, both over
    the whole run, restarts included.
    """

    max_rollbacks: int = 0
    """How often in a run it makes the run go back, at most."""

    def on_instances(self, state: TrainerState, instance_ids: list[int]) -> None:
        """Called before every optimizer step with the ids of the instances this rank is about to read."""

    def collect_metrics(self, state: TrainerState) -> dict[str, float]:
        """Called when a step is logged; what is returned is logged with it."""
        return {}

    def on_failure(self, state: TrainerState) -> None:
        """Called where training ends in an error, on every rank that has one; must not raise, nor wait for others."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that must survive a restart; written with every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def wants_to_go_back(self) -> bool:
        """Asked after a step was logged, if `max_rollbacks` is not 0: whether the run must not go on from here."""
        return False

    def on_gone_back(self, state: TrainerState, from_step: int, position: DataPosition | None) -> None:
        """Called when the run stands where a checkpoint before `from_step` stands, and `load_state_dict` was called.

        `position` says where the data go on: after the last batch that was read. None: there was no checkpoint to go
        back to, so the run goes on.
        """

    def wants_to_stop(self, state: TrainerState) -> bool:
        """Asked now and then during an evaluation, on all ranks: whether this one has a reason to cut it short."""
        return False

    def on_long_work(self, state: TrainerState, what: str) -> None:
        """Called before something that takes longer than a step, and as it gets on: `evaluation`, `checkpoint`."""
