"""megamoe: an expert-parallel MoE layer as one persistent kernel per rank.

Importing this package imports nothing else: neither torch nor the compiled module. The public
names below are loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamoe.errors import MegaMoeError
    from megamoe.spec import EpConfig, MoESpec

__all__ = ["EpConfig", "MegaMoeError", "MoESpec", "__version__"]

__version__ = "0.1.0"

_HOME = {
    "EpConfig": "megamoe.spec",
    "MegaMoeError": "megamoe.errors",
    "MoESpec": "megamoe.spec",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from its module (PEP 562)."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted(__all__)
