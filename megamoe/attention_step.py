"""A call of the attention-pre layer: its arguments checked, and what follows from them.

Shapes: M token rows of all requests, B requests, H hidden. A page of the caches holds 64 keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from megamoe.attention_pre.tiling import Batch
from megamoe.errors import CapacityError, InputError
from megamoe.spec import INDEX_PAGE

__all__ = [
    "Step",
    "check_positions",
    "check_requests",
    "check_rows",
    "key_slots",
    "make_step",
]


@dataclass(frozen=True)
class Step:
    """A call's arguments, checked, with everything that follows from them.

    Attributes:
        batch: requests as the planner knows them.
        tensors: ``x``, ``residual``, ``positions``, ``latent_slots``, ``index_slots``,
            ``context_lens``, ``block_table`` by the graph's names.
    """

    batch: Batch
    tensors: Mapping[str, Tensor]


def check_requests(
    new_tokens: Sequence[int],
    context_lens: Sequence[int],
    block_table: Tensor,
    num_pages: int,
    max_positions: int,
) -> tuple[Batch, Tensor]:
    """The requests of a call as the planner knows them, and their page table on the CPU.

    Args:
        new_tokens: tokens of each request in the call.
        context_lens: keys of each request, the new ones included.
        block_table: int32 [B, pages], on any device.
        num_pages: pages of each cache.
        max_positions: rows of the rotation table.

    Raises:
        InputError: counts, a table or a page that do not fit.
        CapacityError: more keys than pages of the table, or than positions.
    """
    try:
        new, lengths = [index(n) for n in new_tokens], [index(n) for n in context_lens]
    except TypeError:
        raise InputError(
            f"new_tokens {new_tokens!r}, context_lens {context_lens!r}: must be whole numbers"
        ) from None
    if len(new) != len(lengths) or not new:
        raise InputError(
            f"{len(new)} new_tokens and {len(lengths)} context_lens: one of each per request"
        )
    for b, (count, length) in enumerate(zip(new, lengths, strict=True)):
        if not 1 <= count <= length:
            raise InputError(
                f"request {b} has {count} new tokens and {length} keys: "
                "need 1 <= new_tokens <= context_lens"
            )
        if length > max_positions:
            raise CapacityError(
                f"request {b} has {length} keys: the rotation table ends at {max_positions}"
            )
    table = block_table.cpu()
    pages = [-(-length // INDEX_PAGE) for length in lengths]
    if table.dim() != 2 or len(table) != len(new) or table.dtype != torch.int32:
        raise InputError(
            f"block_table is {table.dtype} {tuple(table.shape)}: must be int32 [{len(new)}, pages]"
        )
    if table.shape[1] < max(pages):
        raise CapacityError(
            f"block_table has {table.shape[1]} columns: the longest request has {max(pages)} "
            "pages of 64 keys"
        )
    for b, count in enumerate(pages):
        low, high = (int(v) for v in table[b, :count].aminmax())
        if low < 0 or high >= num_pages:
            raise InputError(
                f"block_table of request {b} holds page {low if low < 0 else high}: must be "
                f"in 0..{num_pages - 1}"
            )
    requests = tuple(zip(new, lengths, strict=True))
    return Batch(requests, max(Batch(requests).table_pages, table.shape[1])), table


def check_rows(name: str, t: Tensor, rows: int, hidden: int, backend: str) -> None:
    """Checks ``x`` or ``residual``.

    Raises:
        InputError: not BF16 [M, H] on the layer's kind of device.
    """
    if tuple(t.shape) != (rows, hidden) or t.dtype != torch.bfloat16:
        raise InputError(
            f"{name} is {t.dtype} {tuple(t.shape)}: must be bfloat16 {[rows, hidden]}, a row "
            "per new token"
        )
    if t.device.type != backend:
        raise InputError(f"{name} is on {t.device}: must be on {backend}")


def check_positions(positions: Tensor, rows: int, max_positions: int) -> None:
    """Checks rows of the rotation table that a caller chose.

    Raises:
        InputError: not int32 [M], or beyond the table.
    """
    if positions.dtype != torch.int32 or tuple(positions.shape) != (rows,):
        raise InputError(
            f"positions is {positions.dtype} {tuple(positions.shape)}: must be int32 [{rows}]"
        )
    low, high = (int(v) for v in positions.aminmax())
    if low < 0 or high >= max_positions:
        raise InputError(
            f"positions holds {low if low < 0 else high}: must be in 0..{max_positions - 1}"
        )


def key_slots(requests: Sequence[tuple[int, int]], table: Tensor) -> tuple[Tensor, Tensor]:
    """Where the keys of new tokens belong.

    Args:
        requests: (new tokens, keys) of each.
        table: int32 [B, pages], on the CPU.

    Returns:
        int64 [M] each: a token's place among the keys of its request, and its row of the caches.
    """
    places = [torch.arange(keys - new, keys) for new, keys in requests]
    slots = [
        table[b, p // INDEX_PAGE].long() * INDEX_PAGE + p % INDEX_PAGE for b, p in enumerate(places)
    ]
    return torch.cat(places), torch.cat(slots)


def make_step(
    batch: Batch, table: Tensor, x: Tensor, residual: Tensor, positions: Tensor | None
) -> Step:
    """Everything that the graph reads, on the device of ``x``; all arguments are checked.

    Args:
        batch: of ``check_requests``.
        table: of ``check_requests``.
        x: BF16 [M, H].
        residual: BF16 [M, H].
        positions: int32 [M], or None for a token's place among the keys of its request.

    Raises:
        InputError: the table gives two new tokens one place.
    """
    places, slots = key_slots(batch.requests, table)
    if len(set(slots.tolist())) < len(slots):
        raise InputError(
            "block_table gives two new tokens the same place in the caches: the page of a new "
            "token must be its request's own"
        )
    padded = torch.zeros(len(table), batch.table_pages, dtype=torch.int32)
    padded[:, : table.shape[1]] = table
    small = {
        "positions": places.int() if positions is None else positions,
        "latent_slots": slots,
        "index_slots": slots,
        "context_lens": torch.tensor([keys for _, keys in batch.requests], dtype=torch.int32),
        "block_table": padded,
    }
    on_device = {name: t.to(x.device) for name, t in small.items()}
    return Step(batch, {"x": x.contiguous(), "residual": residual.contiguous(), **on_device})
