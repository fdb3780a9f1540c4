"""A model that exists, made reversible: `convert` for transformers' models and lists of residual layers."""

from . import recipes as recipes
from ._convert import Conversion as Conversion
from ._convert import convert as convert
from ._report import Report as Report
from ._switches import add_switches as add_switches
