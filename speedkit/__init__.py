"""speedkit: PyTorch training as fast as this machine allows, with proof."""

__version__ = "0.1.0"
