"""All ranks as threads of one process, under ThreadSanitizer and AddressSanitizer with UBSan.

The figures asserted are lower bounds of what a run covers, so that a driver that stops early fails.
"""

from __future__ import annotations

import pytest

from tests import drivers

SANITIZERS = ("thread", "address,undefined")

pytestmark = pytest.mark.timeout(1200)  # two builds on a busy machine


@pytest.fixture(params=SANITIZERS, scope="module")
def folder(request):
    if not drivers.sanitizer_works(request.param):
        pytest.skip(f"this machine's C++ compiler has no -fsanitize={request.param}")
    return drivers.build(request.param, "protocol_driver", "session_driver")


def test_every_row_is_exact(folder):
    """Unequal, empty, masked, duplicate and all-to-one routes; 1 to 4 ranks; minimum rings."""
    (result,) = drivers.run(folder / "protocol_driver", 6, timeout=300)
    assert "wrong" not in result
    assert result["rounds"] >= 6
    assert result["calls"] >= 120
    assert result["rows"] > 1000
    assert result["ring_waits"] > 0, "no back-pressure: the rings were never full"


def test_thread_sanitizer_sees_a_missing_release(monkeypatch):
    """Additions without order give the right outputs on this machine; the tool must object."""
    if not drivers.sanitizer_works("thread"):
        pytest.skip("this machine's C++ compiler has no -fsanitize=thread")
    folder = drivers.build("thread", "protocol_driver", "session_driver")
    monkeypatch.setenv("TSAN_OPTIONS", "halt_on_error=1")
    result, text = drivers.call(folder / "protocol_driver", 2, "relaxed", timeout=300)
    assert result.returncode != 0, text
    assert "WARNING: ThreadSanitizer: data race" in result.stderr, text


def test_equal_bits_for_every_ring_and_group(folder):
    (result,) = drivers.run(folder / "session_driver", "equal", timeout=300)
    assert "wrong" not in result
    assert result["groups"] == 8


def test_absent_rank_is_named_and_reset_recovers(folder):
    (result,) = drivers.run(folder / "session_driver", "faults", timeout=300)
    assert "wrong" not in result
    assert result["records"] == 8
