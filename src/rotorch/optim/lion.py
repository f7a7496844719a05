"""Lion (arXiv 2302.06675): the sign of an average of gradients; one moment, each element on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rotorch.core.errors import ConfigError
from rotorch.optim.members import closure_loss


class Lion(torch.optim.Optimizer):
    """Updates by `lr * sign(beta1 * m + (1 - beta1) * g)`, then `m = beta2 * m + (1 - beta2) * g`. Every rank alone.

    Where the true gradient is zero its rounding decides the sign, under any layout and on one process alike.

    Args:
        params: parameters, or groups.
        lr: learning rate; a third to a tenth of AdamW's.
        betas: of the update, and of the moment.
        weight_decay: decoupled; three to ten times AdamW's.

    Raises:
        ConfigError: a value that cannot be.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0.0 and weight_decay >= 0.0 and all(0.0 <= beta < 1.0 for beta in betas)):
            raise ConfigError(
                f"Lion: lr={lr!r}, weight_decay={weight_decay!r}, betas={betas!r}: write 0 or more, and betas below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update."""
        loss = closure_loss(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter.detach())
                moment = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(moment.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
                moment.lerp_(grad, 1 - beta2)
        return loss
