"""The base of our callbacks: Hugging Face's `TrainerCallback` and three hooks it lacks."""

from typing import Any

from transformers import TrainerCallback, TrainerState


class OlmoCallback(TrainerCallback):
    """Identical to `TrainerCallback` except for the hooks below, which `OlmoTrainer` calls.

    `state.global_step` counts optimizer steps and `state.num_input_tokens_seen` all tokens of all ranks, both over
    the whole run, restarts included.
    """

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
