"""Muon for matrices and AdamW for the rest, as one optimizer."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices, AdamW for the rest.

    Both are torch's. Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one
    learning rate serves both.

    Args:
        params: groups; those with `use_muon` must hold matrices only.
        lr: learning rate.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled, of both.
    """

    def __init__(
        self, params: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "use_muon": False})
        of_muon = [group for group in self.param_groups if group["use_muon"]]
        of_adamw = [group for group in self.param_groups if not group["use_muon"]]
        self._parts: list[tuple[bool, torch.optim.Optimizer]] = []
        if of_muon:
            self._parts.append(
                (True, torch.optim.Muon(of_muon, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
            )
        if of_adamw:
            self._parts.append(
                (False, torch.optim.AdamW(of_adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for uses_muon, part in self._parts:
            # Loading a state replaces these objects, so the parts are given them anew.
            part.param_groups = [group for group in self.param_groups if group["use_muon"] is uses_muon]
            part.state = self.state
            part.step()
        return loss


def hidden_matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """What Muon is for: weights of linear layers, not the head's and not what is tied to an embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head and id(module.weight) not in embeddings:
            yield cast(nn.Parameter, module.weight)


def split_for_muon(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group split into its hidden matrices (`use_muon`) and the rest."""
    matrices = {id(parameter) for parameter in hidden_matrices(model)}
    split = []
    for group in groups:
        for use_muon in (True, False):
            chosen = [i for i, p in enumerate(group["params"]) if (id(p) in matrices) is use_muon]
            if chosen:
                parts = {key: [group[key][i] for i in chosen] for key in ("params", "param_names")}
                split.append({**group, **parts, "use_muon": use_muon})
    return split
