"""Weights in the kernel's layout, read back as the kernel's threads read them."""

import torch

from megamoe.backends.cuda_pack import (
    num_tiles,
    pack_scale,
    pack_weight,
    rows_linear1,
    rows_linear2,
    scale_floats,
)


def test_linear1_rows_are_a_permutation_with_gate_and_up_alternating():
    inter = 384
    rows = rows_linear1(inter)
    assert sorted(rows.tolist()) == list(range(2 * inter))
    groups = rows.view(-1, 2, 8)  # groups of 8 rows, gate then up
    assert bool((groups[:, 0] < inter).all())
    assert torch.equal(groups[:, 1], groups[:, 0] + inter)
    # Four neighbouring columns: positions 2q, 2q + 1 of an even pair of groups, then of an odd one.
    gate = groups[:, 0].view(-1, 2, 4, 2)  # [pairs of groups, parity, q, position]
    four = gate.transpose(1, 2).reshape(-1, 4)
    assert torch.equal(four, four[:, :1] + torch.arange(4))


def test_linear2_rows_give_a_thread_eight_neighbours():
    for hidden in (256, 384):
        rows = rows_linear2(hidden)
        assert rows.numel() == num_tiles(hidden) * 256
        assert sorted(r for r in rows.tolist() if r >= 0) == list(range(hidden))
        # groups i = 0..3 of 8 rows; lane q holds rows 2q, 2q + 1 of each
        eight = rows.view(-1, 4, 4, 2).transpose(1, 2).reshape(-1, 8)
        kept = eight[(eight >= 0).all(1)]
        assert torch.equal(kept, kept[:, :1] + torch.arange(8))
        assert bool(((eight >= 0).all(1) | (eight < 0).all(1)).all())


def test_tiles_hold_blocks_of_128_bytes():
    weight = torch.randint(0, 256, (384, 256), dtype=torch.uint8)
    rows = rows_linear2(384)
    out = torch.full((2, 2, 256, 128), 7, dtype=torch.uint8)
    pack_weight(weight, rows, out)
    for tile, block, row in ((0, 0, 0), (0, 1, 33), (1, 0, 127), (1, 1, 200)):
        source = int(rows[tile * 256 + row])
        want = weight[source, block * 128 : block * 128 + 128] if source >= 0 else torch.zeros(128)
        assert torch.equal(out[tile, block, row], want.to(torch.uint8)), (tile, block, row)


def test_scales_of_a_tile_lie_in_pairs():
    assert [scale_floats(k) for k in (128, 256, 384)] == [4, 4, 8]
    s1 = torch.arange(4 * 3.0).view(4, 3)  # [2I/128, H/128]
    out = torch.full((2, 8), -1.0)
    pack_scale(s1, out, linear1=True)
    assert out[1].tolist() == [3, 9, 4, 10, 5, 11, 0, 0]
    s2 = torch.arange(3 * 1.0).view(3, 1)  # [H/128, I/128]
    out = torch.full((2, 4), -1.0)
    pack_scale(s2, out, linear1=False)
    assert out.tolist() == [[0, 1, 0, 0], [2, 0, 0, 0]]
