"""An optimizer of another library, which knows nothing of ranks: it scales each gradient by its norm."""

import torch


class Scaled(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    sums = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                    sums.add_(parameter.grad)
                    parameter.sub_(sums / (parameter.grad.norm() + 1.0), alpha=group["lr"])
