"""What the attention-pre benchmark works out before it measures anything."""

from __future__ import annotations

import pytest
import torch

from launcher.bench_attention_pre import batch_of, empty_frame, floor_us, with_splits
from megamoe.attention_pre.check import check_instructions
from megamoe.attention_pre.encode import encode, instruction_format
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.stages import partition
from megamoe.spec import ATTENTION_MODELS
from tests.attention import SMALL

GLM = ATTENTION_MODELS["glm-5.2"]


@pytest.mark.parametrize(("rows", "requests"), [(1, 1), (8, 1), (16, 2), (128, 16)])
def test_batches_have_the_rows_asked_for(rows, requests):
    batch = batch_of(rows, 2048)
    assert (batch.rows, len(batch.requests)) == (rows, requests)


def test_the_floor_counts_weights_keys_and_inputs_once():
    tensors = {
        "w_a": torch.zeros(1000, dtype=torch.uint8),
        "w_a_scales": torch.zeros(10),
        "q_norm": torch.zeros(100),
    }
    batch = batch_of(16, 8192)
    expected = 1000 + 40 + 2 * 8192 * 132 + 2 * 16 * GLM.hidden * 2
    assert floor_us(tensors, batch, GLM) == pytest.approx(expected / 4.7e6)


def test_the_empty_frame_has_a_record_per_worker_and_nothing_to_do():
    encoded = encode(Planner(attention_pre_graph(SMALL), 5, queue="dynamic").plan(batch_of(4, 90)))
    frame = empty_frame(encoded)
    fmt = instruction_format()
    assert frame.instructions.shape == (5, 1, fmt.words)
    assert not frame.dynamic
    assert check_instructions(frame.instructions, frame.num_events) == []
    for record in frame.instructions[:, 0]:
        assert fmt.opcode_name(fmt.get(record, "opcode")) == "no_op"
        assert set(fmt.get_all(record, "wait_event")) == {fmt.no_counter}
        assert set(fmt.get_all(record, "signal_event")) == {fmt.no_counter}


def test_splits_change_only_the_stages_named():
    graph = partition(attention_pre_graph(GLM))
    batch = batch_of(16, 8192)
    tiles = with_splits(graph, batch, 132, "D1=1")
    assert tiles is not None
    assert tiles.of("D1").split_k == 1
    assert tiles.of("B0").split_k == 6
    assert with_splits(graph, batch, 132, "") is None


def test_default_costs_order_the_queues_as_the_device_did():
    """Round robin 39.3 µs, list 48.8 on one kernel (docs/attention_pre.md)."""
    plan = Planner(attention_pre_graph(GLM), 132).plan(batch_of(16, 8192))
    estimates = plan.estimates_us
    assert plan.queues.kind == "round_robin"
    assert estimates["round_robin"] < min(estimates["list"], estimates["dynamic"])
