"""Hugging Face Accelerate over parallel models.

model, optimizer, loader = rotorch.accelerate.prepare(accelerator, model, optimizer, loader, layout="rtp=8")
"""

from rotorch.core.errors import ConfigError

try:
    import accelerate as _  # noqa: F401
except ImportError:
    raise ConfigError(
        "rotorch.accelerate needs the package accelerate. Write pip install 'rotorch[accelerate]'"
    ) from None

from rotorch.accelerate.preparing import prepare

__all__ = ["prepare"]
