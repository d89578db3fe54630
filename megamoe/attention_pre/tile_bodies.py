"""Task bodies on the CPU: what an opcode does with its operands, tile by tile, in FP32.

The twin of ``csrc/attention_pre/ops``: sums run over the same parts in the same order, and every
load and store goes through a ``Task``, which notes it for the race check of ``interpret``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from megamoe.reference.attention_pre import (
    layer_norm,
    quantize,
    read_index,
    rms_norm,
    rotate,
    write_index,
    write_latent,
)
from megamoe.spec import GROUP, INDEX_DIM, INDEX_PAGE

__all__ = ["BODIES", "Body", "Span", "Task"]

Span = tuple[int, int]


class Task(Protocol):
    """One instruction as its body sees it."""

    @property
    def shape(self) -> Mapping[str, float]:
        """Constants of the specialisation, with ``n`` and ``k``."""

    def field(self, name: str) -> int:
        """A field of the record."""

    def flag(self, name: str) -> bool:
        """A flag of the record."""

    def tensor(self, role: str) -> Tensor:
        """The whole operand. Whoever touches its elements calls ``note``."""

    def note(self, role: str, box: tuple[Span, ...], *, writes: bool) -> None:
        """Records an access."""

    def load(self, role: str, *box: Span) -> Tensor:
        """A copy of a box of an operand."""

    def store(self, role: str, value: Tensor, *box: Span) -> None:
        """Writes a box of an operand, converting to its dtype."""


Body = tuple[Callable[[Task], None], Callable[[Task], None] | None]
"""What every task does, and what the last of a unit does after all have arrived."""


def _rows(t: Task) -> Span:
    return t.field("row"), t.field("row") + t.field("rows")


def _cols(t: Task) -> Span:
    return t.field("col"), t.field("col") + t.field("cols")


def _depth(t: Task) -> Span:
    return t.field("k"), t.field("k") + t.field("k_len")


def _groups(span: Span) -> Span:
    return span[0] // GROUP, -(-span[1] // GROUP)


def _pow2(t: Task) -> bool:
    return t.flag("scale_pow2")


def _gemm_fp8(t: Task, cols: Span) -> Tensor:
    """FP32 [rows, cols] over the task's K: 128 columns at a time, scaled, added in ascending K."""
    rows, depth = _rows(t), _depth(t)
    a = t.load("a", rows, depth).float().unflatten(1, (-1, GROUP))
    a_scales = t.load("a_scales", rows, _groups(depth))
    w = t.load("w", cols, depth).float().unflatten(1, (-1, GROUP))
    blocks = t.load("w_scales", _groups(cols), _groups(depth))
    w_scales = blocks.repeat_interleave(GROUP, 0)[cols[0] % GROUP :][: cols[1] - cols[0]]
    total = torch.zeros(a.shape[0], w.shape[0])
    for kb in range(a.shape[1]):
        partial = a[:, kb] @ w[:, kb].T
        total += partial * (a_scales[:, kb, None] * w_scales[None, :, kb])
    return total


def _store_partial(t: Task, value: Tensor, cols: Span) -> None:
    part = t.field("part")
    t.store("partials", value.unsqueeze(1), _rows(t), (part, part + 1), cols)


def _sum_parts(t: Task, role: str, parts: int, cols: Span) -> Tensor:
    """FP32 [rows, cols]: parts added in ascending order."""
    stored = t.load(role, _rows(t), (0, parts), cols)
    total = stored[:, 0].clone()
    for part in range(1, parts):
        total += stored[:, part]
    return total


def _table(t: Task) -> Tensor:
    """Rows of the rotation table for the task's tokens."""
    positions = t.load("positions", _rows(t)).long()
    return t.tensor("rope")[positions]


def _slots(t: Task) -> Tensor:
    return t.load("slots", _rows(t))


def _norm_quant(t: Task) -> None:
    rows, cols = _rows(t), (0, t.field("cols"))
    x = t.load("x", rows, cols).float()
    if t.flag("has_residual"):
        x = (x + t.load("residual", rows, cols).float()).bfloat16()
        t.store("residual_out", x, rows, cols)
        x = x.float()
    normed = rms_norm(x, t.load("weight", cols), t.shape["rmsnorm_eps"]).bfloat16()
    if t.flag("has_normed"):
        t.store("normed", normed, rows, cols)
    codes, scales = quantize(normed, pow2=_pow2(t))
    t.store("codes", codes, rows, cols)
    t.store("scales", scales, rows, _groups(cols))


def _qkv_a(t: Task) -> None:
    _store_partial(t, _gemm_fp8(t, _cols(t)), _cols(t))


def _qkv_a_rows(t: Task) -> None:
    rows = _rows(t)
    q_lora, kv_lora = int(t.shape["q_lora"]), int(t.shape["kv_lora"])
    out = _sum_parts(t, "partials", t.field("parts"), (0, int(t.shape["n"])))
    q_a, kv_a, k_pe = out.split((q_lora, kv_lora, out.shape[1] - q_lora - kv_lora), 1)
    eps = t.shape["rmsnorm_eps"]
    query = rms_norm(q_a, t.load("q_norm", (0, q_lora)), eps)
    codes, scales = quantize(query, pow2=_pow2(t))
    t.store("codes", codes, rows, (0, q_lora))
    t.store("scales", scales, rows, (0, q_lora // GROUP))
    latent = rms_norm(kv_a, t.load("kv_norm", (0, kv_lora)), eps)
    codes, scales = quantize(latent, pow2=_pow2(t))
    slots = _slots(t)
    for slot in slots.tolist():
        t.note("cache", ((slot, slot + 1),), writes=True)
    write_latent(t.tensor("cache"), slots, codes, scales, rotate(k_pe, _table(t)))


def _head_gate(t: Task) -> None:
    a, w = t.load("a", _rows(t), _depth(t)), t.load("w", _cols(t), _depth(t))
    _store_partial(t, a.float() @ w.float().T, _cols(t))


def _reduced(finish: Callable[[Task, Tensor], None]) -> Body:
    """A split-K GEMM: partials, then ``finish`` by the last; a single part finishes at once."""

    def main(t: Task) -> None:
        out = _gemm_fp8(t, _cols(t))
        if t.field("parts") == 1:
            finish(t, out)
        else:
            _store_partial(t, out, _cols(t))

    def last(t: Task) -> None:
        finish(t, _sum_parts(t, "partials", t.field("parts"), _cols(t)))

    return main, last


def _finish(finish: Callable[[Task, Tensor], None]) -> Callable[[Task], None]:
    """A task that sums the parts of others."""

    def main(t: Task) -> None:
        finish(t, _sum_parts(t, "partials", t.field("parts"), _cols(t)))

    return main


def _rotate_first(t: Task, x: Tensor) -> Tensor:
    """Rotates the first columns of an index head."""
    r = int(t.shape["rope"])
    return torch.cat([rotate(x[:, :r], _table(t)), x[:, r:]], 1)


def _index_key(t: Task, out: Tensor) -> None:
    weight, bias = t.load("norm_weight", (0, INDEX_DIM)), t.load("norm_bias", (0, INDEX_DIM))
    key = _rotate_first(t, layer_norm(out, weight, bias, t.shape["layernorm_eps"]))
    codes, scales = quantize(key, pow2=_pow2(t))
    slots = _slots(t)
    for slot in slots.tolist():
        page, place = divmod(slot, INDEX_PAGE)
        t.note("cache", ((page, page + 1), (place, place + 1)), writes=True)
    write_index(t.tensor("cache"), slots, codes, scales[:, 0])


def _index_query(t: Task, out: Tensor) -> None:
    head = t.field("item"), t.field("item") + 1
    codes, scales = quantize(_rotate_first(t, out), pow2=_pow2(t))
    gate = _sum_parts(t, "gate", t.field("aux"), head)
    t.store("codes", codes.unsqueeze(1), _rows(t), head, (0, INDEX_DIM))
    t.store("weights", gate * (scales * t.shape["fold_factor"]), _rows(t), head)


def _main_query(t: Task) -> None:
    out = _gemm_fp8(t, _cols(t))
    if t.flag("has_rope"):
        r = int(t.shape["rope"])
        out = torch.cat([out[:, :-r], rotate(out[:, -r:], _table(t))], 1)
    head = t.field("item")
    first = t.field("col") - head * t.tensor("out").shape[2]
    t.store("out", out.unsqueeze(1), _rows(t), (head, head + 1), (first, first + t.field("cols")))


def _absorb_query(t: Task) -> None:
    head = t.field("item"), t.field("item") + 1
    a = t.load("a", _rows(t), head, _depth(t))[:, 0].float()
    w = t.load("w", head, _depth(t), _cols(t))[0].float()
    t.store("out", (a @ w).unsqueeze(1), _rows(t), head, _cols(t))


def _index_score(t: Task) -> None:
    rows, kv, kv_len = _rows(t), t.field("kv"), t.field("kv_len")
    request, heads = t.field("item"), int(t.shape["heads"])
    length = int(t.load("context_lens", (request, request + 1)))
    logits = torch.full((rows[1] - rows[0], kv_len), -torch.inf)
    count = min(length - kv, kv_len)
    if count > 0:
        # The table is flat for the kernel: `page` already counts the rows of earlier requests.
        table = t.tensor("block_table").flatten()[t.field("page") :]
        pages = table[: -(-count // INDEX_PAGE)]
        for i, page in enumerate(pages.tolist()):
            places = min(count - i * INDEX_PAGE, INDEX_PAGE)
            t.note("cache", ((page, page + 1), (0, places)), writes=False)
        keys, scales = read_index(t.tensor("cache"), pages, count)
        query = t.load("codes", rows, (0, heads), (0, INDEX_DIM)).float()
        weights = t.load("weights", rows, (0, heads))
        dots = torch.einsum("thd,ld->thl", query, keys.float()).relu()
        scores = torch.einsum("th,thl->tl", weights, dots) * scales
        visible = length - t.field("aux") + 1 + torch.arange(rows[1] - rows[0])
        hidden = kv + torch.arange(count) >= visible[:, None]
        logits[:, :count] = scores.masked_fill(hidden, -torch.inf)
    t.store("logits", logits, rows, (kv, kv + kv_len))


def _gemm_swiglu(t: Task) -> None:
    cols = _cols(t)
    up_first = int(t.shape["n"])
    gate = _gemm_fp8(t, cols)
    up = _gemm_fp8(t, (cols[0] + up_first, cols[1] + up_first))
    codes, scales = quantize(gate / (1 + torch.exp(-gate)) * up, pow2=_pow2(t))
    t.store("codes", codes, _rows(t), cols)
    t.store("scales", scales, _rows(t), _groups(cols))


def _gemm_store(t: Task, out: Tensor) -> None:
    if t.flag("has_residual"):
        out = out + t.load("residual", _rows(t), _cols(t)).float()
    t.store("out", out, _rows(t), _cols(t))


def _nothing(t: Task) -> None:
    """Padding and relays."""


BODIES: Final[Mapping[str, Body]] = {
    "no_op": (_nothing, None),
    "norm_quant": (_norm_quant, None),
    "qkv_a": (_qkv_a, _qkv_a_rows),
    "qkv_a_final": (_qkv_a_rows, None),
    "head_gate": (_head_gate, None),
    "index_key": _reduced(_index_key),
    "index_key_final": (_finish(_index_key), None),
    "index_query": _reduced(_index_query),
    "index_query_final": (_finish(_index_query), None),
    "main_query": (_main_query, None),
    "absorb_query": (_absorb_query, None),
    "index_score": (_index_score, None),
    "gemm_swiglu": (_gemm_swiglu, None),
    "gemm_store": _reduced(_gemm_store),
}
