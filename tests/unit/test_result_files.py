"""Result files are whole or as they were before, wherever they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher import bench_moe
from launcher.checked import need_writable
from launcher.cmp_rows import merge_rows
from launcher.results import write_whole
from launcher.stress_file import write_results

_WRITERS = pytest.mark.parametrize(
    "write",
    [bench_moe._write, write_results, lambda path, found: merge_rows(path, found["rows"], {})],
    ids=["bench moe", "stress", "bench cmp"],
)


@_WRITERS
def test_results_go_where_a_link_points_to(write, tmp_path):
    (tmp_path / "file").write_text('{"meta": {}, "rows": []}')
    (tmp_path / "link").symlink_to(tmp_path / "file")
    need_writable("--output", tmp_path / "link")
    write(tmp_path / "link", {"rows": [{"case": 1}]})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text())["rows"] == [{"case": 1}]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("write", [bench_moe._write, write_results], ids=["bench moe", "stress"])
def test_results_go_to_devices(write, tmp_path):
    (tmp_path / "device").symlink_to("/dev/null")
    need_writable("--output", tmp_path / "device")
    write(tmp_path / "device", {"rows": []})
    assert (tmp_path / "device").is_char_device()
    assert not Path("/dev/null.partial").exists()


def test_results_go_to_pipes():
    read, write = os.pipe()
    try:
        write_whole(Path(f"/dev/fd/{write}"), "results")
        assert os.read(read, 100) == b"results"
    finally:
        os.close(read)
        os.close(write)


@_WRITERS
def test_a_kill_leaves_the_results_that_were_there(write, tmp_path, monkeypatch):
    path, before = tmp_path / "x.json", '{"meta": {}, "rows": [{"case": 1}]}'
    path.write_text(before)
    whole = Path.write_text

    def half(self, text, **options):
        whole(self, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt):
            write(path, {"rows": [{"case": 2}]})
    assert path.read_text() == before
    write(path, {"rows": [{"case": 2}]})  # what the kill has left is not in its way
    assert json.loads(path.read_text())["rows"][-1] == {"case": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_results_in_a_folder_that_takes_no_new_files_are_written_all_the_same(
    tmp_path, monkeypatch
):
    path = tmp_path / "x.json"
    path.write_text("before")
    monkeypatch.setattr("os.access", lambda folder, mode: False)  # root may write anywhere
    monkeypatch.setattr(Path, "replace", lambda *a: pytest.fail("a file was put there"))
    write_whole(path, "after")
    assert path.read_text() == "after"
