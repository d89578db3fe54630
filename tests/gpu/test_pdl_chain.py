"""The PDL chain on a GPU: every way of launching gives the CPU's bits, and a missing wait shows."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.pdl_chain import MODES, Chain, Launch

pytestmark = pytest.mark.gpu

LAYERS, COUNT = 50, 5000  # the last CTA is ragged
BY_NAME = {mode.name: mode for mode in MODES}


@pytest.mark.parametrize("trigger", ["end", "start"])
@pytest.mark.parametrize("name", BY_NAME)
def test_result_is_the_cpus_to_the_bit(name, trigger):
    chain = Chain(LAYERS, COUNT, seed=3, trigger=trigger)
    launch = Launch(chain, BY_NAME[name])
    for _ in range(20):
        chain.poison()
        launch.launch()
        np.testing.assert_array_equal(chain.result(), chain.expected)
    if BY_NAME[name].graph:
        ahead = LAYERS - 1 if BY_NAME[name].pdl else 0
        assert launch.edges == {"full": LAYERS - 1 - ahead, "programmatic": ahead}


@pytest.mark.parametrize("name", ["stream_pdl", "graph_pdl"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_late_writer_exposes_a_missing_wait(name, wait):
    """Trigger first, then sleep 20 µs, then write: a reader that does not wait reads poison."""
    chain = Chain(LAYERS, COUNT, seed=3, trigger="start", wait=wait, delay_ns=20_000)
    Launch(chain, BY_NAME[name]).launch()
    right = bool((chain.result() == chain.expected).all())
    assert right == wait
