"""How tests speak to the model ``attention_pre``, and the same layer in their own process."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import tritonclient.http as oip

from tests.service.echo import ATTENTION

SPEC = "hidden=256,heads=2,q_lora=128,kv_lora=128,nope=64,rope=64,index_heads=8"
OUTPUTS = ("residual", "queries", "absorbed", "index_weights", "logits")


def tokens(n: int, seed: int = 0, hidden: int = ATTENTION.hidden):
    """(hidden, residual) BF16 [n, H]."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, hidden), np.float32).astype(ml_dtypes.bfloat16) for _ in "xr"]


def put(name, array, datatype):
    tensor = oip.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def inputs_of(x, residual, **more):
    made = [put("hidden_states", x, "BF16"), put("residual", residual, "BF16")]
    for name, value in more.items():
        array = np.asarray(value, np.uint8 if name == "index_cache" else np.int32)
        made.append(put(name, array, "UINT8" if name == "index_cache" else "INT32"))
    return made


def infer(
    client, x, residual, *, outputs=None, sequence=0, start=False, end=False, parameters=None,
    **more,
):  # fmt: skip
    wanted = None
    if outputs is not None:
        wanted = [oip.InferRequestedOutput(name, binary_data=True) for name in outputs]
    return client.infer(
        "attention_pre", inputs_of(x, residual, **more), outputs=wanted, sequence_id=sequence,
        sequence_start=start, sequence_end=end, parameters=parameters,
    )  # fmt: skip


def keys_of(client, sequence, **more) -> int:
    """What a request without tokens says of a sequence."""
    result = infer(client, *tokens(0), sequence=sequence, **more)
    return result.get_response()["parameters"]["sequence_keys"]


def assert_same(have, want):
    assert have.shape == want.shape
    have, want = np.ascontiguousarray(have), np.ascontiguousarray(want)
    differ = np.argwhere(have.view(f"u{have.itemsize}") != want.view(f"u{want.itemsize}"))
    assert not len(differ), f"at {differ[0]}: {have[tuple(differ[0])]} != {want[tuple(differ[0])]}"


class Peer:
    """The layer that the ranks hold, in this process: the same weights, caches of its own."""

    def __init__(self, num_pages: int) -> None:
        import torch

        from launcher.serving.source import AttentionSource
        from megamoe.attention_layer import open_attention_pre
        from megamoe.attention_pre.data import random_weights

        self.torch = torch
        spec = AttentionSource(SPEC, num_pages, 0).spec()
        weights = random_weights(spec, num_pages * 64, 0)
        self.layer = open_attention_pre(spec, weights, num_pages=num_pages, engine="oracle")

    def run(self, x, residual, new, keys, table) -> dict[str, np.ndarray]:
        torch = self.torch
        rows = [torch.from_numpy(t.view(np.uint16)).view(torch.bfloat16) for t in (x, residual)]
        out = self.layer.run(
            *rows, new_tokens=new, context_lens=keys,
            block_table=torch.tensor(table, dtype=torch.int32),
        )  # fmt: skip
        named = {**out._asdict(), "logits": out.logits[:, : max(keys)]}
        return {
            name: (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).contiguous().numpy()
            for name, t in named.items()
        }


def bits(result, name):
    array = result.as_numpy(name)
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
