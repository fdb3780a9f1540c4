"""An optimiser that steps each parameter as soon as its gradient is complete."""

from .optimizer import FusedOptimizer as FusedOptimizer
