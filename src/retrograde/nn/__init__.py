"""Modules whose memory stays small in the length of a sequence."""

from ._tiled import Tiled as Tiled
