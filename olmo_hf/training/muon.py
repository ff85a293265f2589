"""Muon for matrices and AdamW for the rest, as one optimizer, on sharded parameters too (torch's own Muon is not)."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal matrix closest to this one, by five Newton-Schulz iterations in bfloat16.

    Its singular values come to lie around 1, between 0.5 and 1.5 or so, which learns as well as exactly 1 (Jordan et
    al. 2024, https://kellerjordan.github.io/posts/muon).

    Args:
        matrix: (rows, columns).

    Returns:
        The same shape, bfloat16.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups with `use_muon`, torch's AdamW for the others.

    Identical to `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` except that a sharded gradient is gathered for the
    orthogonalization, and each rank keeps its part of the result. The updates have the size of AdamW's (Liu et al.
    2025, arXiv:2502.16982), so that one learning rate and one weight decay serve both.

    Args:
        params: groups; those with `use_muon` must hold matrices only.
        lr: learning rate.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled, of both.
        momentum: of Muon (Nesterov's).
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        momentum: float = 0.95,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "use_muon": False})
        rest = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay) if rest else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["use_muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        if self._adamw is not None:
            # Loading a state replaces these objects, so AdamW is given them anew.
            self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], cast(torch.Tensor, parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(momentum, group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = group["lr"] * 0.2 * max(parameter.shape) ** 0.5
        if isinstance(ahead, DTensor):
            update = orthogonalized(ahead.full_tensor())
            # Every rank has computed the whole, so each takes its part without a word to the others.
            update = distribute_tensor(update, ahead.device_mesh, ahead.placements, src_data_rank=None)
        else:
            update = orthogonalized(ahead)
        parameter.add_(update, alpha=-scale)


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
