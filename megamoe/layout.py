"""Regions of a symmetric window, as C++ lays them out, and tensor views of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megamoe import native

__all__ = ["Region", "WindowLayout", "window_layout"]


@dataclass(frozen=True)
class Region:
    """A region: ``count`` elements of ``stride`` bytes from byte ``offset`` on."""

    name: str
    offset: int
    count: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of the region, without alignment gaps."""
        return self.count * self.stride


@dataclass(frozen=True)
class WindowLayout:
    """Where the regions of a window are. The same on every rank."""

    regions: dict[str, Region]
    nbytes: int

    def view(self, window: Tensor, name: str) -> Tensor:
        """The bytes of a region as uint8 ``[count, stride]``; ``window`` is uint8 ``[nbytes]``."""
        region = self.regions[name]
        flat = window[region.offset : region.offset + region.nbytes]
        return flat.view(region.count, region.stride)


def window_layout(shape: native.MoEShape) -> WindowLayout:
    """The layout of every rank's window for this shape."""
    regions, nbytes = native.window_layout(shape)
    return WindowLayout({r[0]: Region(*r) for r in regions}, nbytes)
