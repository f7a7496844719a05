"""Places of parameters in a module, where a pass puts its tensors and takes them back (`hold/sharded_model.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """One attribute of one module under which a parameter is found; a tied weight has several."""

    module: nn.Module
    attribute: str

    def get(self) -> Tensor | None:
        """Returns the parameter that the module has here."""
        return self.module._parameters[self.attribute]

    def put(self, tensor: Tensor | None) -> None:
        """Makes the module find `tensor` here: a plain tensor, a DTensor parameter, or None."""
        self.module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        names = vars(self.module).get("_flat_weights_names")  # recurrent layers keep a list of their own
        if names and self.attribute in names:
            self.module._flat_weights[names.index(self.attribute)] = tensor  # type: ignore[index,union-attr]


def find_sites(module: nn.Module) -> dict[str, tuple[Site, ...]]:
    """Returns the sites of every parameter, keyed by its first name."""
    names: dict[int, str] = {}
    sites: dict[str, tuple[Site, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        holder, _, attribute = name.rpartition(".")
        sites[first] = (*sites.get(first, ()), Site(module.get_submodule(holder), attribute))
    return sites


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that the module itself would save, by name."""
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if saved.get(name) is buffer}
