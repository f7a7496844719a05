"""Lightning over parallel models: `Strategy` for `Trainer`, `FabricStrategy` for `Fabric`.

trainer = lightning.Trainer(strategy=rotorch.lightning.Strategy("rtp=8"), devices=8)
fabric = lightning.Fabric(strategy=rotorch.lightning.FabricStrategy("rtp=8"), devices=8)
"""

from rotorch.core.errors import ConfigError

try:
    import lightning as _  # noqa: F401
except ImportError:
    raise ConfigError("rotorch.lightning needs the package lightning. Write pip install 'rotorch[lightning]'") from None

from rotorch.lightning.fabric import FabricStrategy
from rotorch.lightning.trainer import Strategy

__all__ = ["FabricStrategy", "Strategy"]
