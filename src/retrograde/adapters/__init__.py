"""Drop-ins."""

from ._install import Installation as Installation
from ._install import install as install
from ._install import uninstall as uninstall
