"""Make an existing model reversible: `convert`, for Hugging Face Transformers models and lists of residual layers."""

from . import recipes as recipes
from ._convert import Conversion as Conversion
from ._convert import convert as convert
from ._gradient_checkpointing import map_gradient_checkpointing as map_gradient_checkpointing
from ._report import Report as Report
