"""Token tables between runs: they come back, and no file on the way can end a run."""

from __future__ import annotations

import numpy as np
import pytest

from compute_node.prediction.table_file import TableFile
from tierd.policy.token_table import TokenTable


def counted():
    table = TokenTable([4, 4])
    for token in range(9):
        table.count(token, np.array([[token % 4], [4 + token % 4]], np.int32), previous=token - 1 if token else None)
    return table


def same(left, right):
    return all(np.array_equal(array, right.as_arrays()[name]) for name, array in left.as_arrays().items())


def test_a_saved_table_is_loaded_by_the_next_run(tmp_path):
    file, table, again = TableFile(tmp_path / "new" / "folder", "f" * 64), counted(), TokenTable([4, 4])
    assert file.save(table) == ""
    assert file.load(again) == ""
    assert same(table, again)
    assert again.counted == 0
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_no_file_is_no_problem(tmp_path):
    table = TokenTable([4, 4])
    assert TableFile(tmp_path, "f" * 64).load(table) == ""
    assert len(table.now) == 0


def test_stores_do_not_share_a_table(tmp_path):
    assert TableFile(tmp_path, "a" * 64).path != TableFile(tmp_path, "b" * 64).path


@pytest.mark.parametrize("damage", ["truncated", "junk", "empty", "other model", "objects"])
def test_a_damaged_file_is_told_and_the_run_goes_on(tmp_path, damage):
    file, table = TableFile(tmp_path, "f" * 64), TokenTable([4, 4])
    file.save(counted() if damage != "other model" else TokenTable([4]))
    content = file.path.read_bytes()
    if damage == "truncated":
        file.path.write_bytes(content[: len(content) // 2])
    elif damage in {"junk", "empty"}:
        file.path.write_bytes(b"" if damage == "empty" else b"junk" * 100)
    elif damage == "objects":
        with file.path.open("wb") as out:
            np.savez(out, **{"now.tokens": np.array([{}], object)})
    assert str(file.path) in file.load(table)
    assert len(table.now) == 0
    assert file.save(counted()) == ""
    assert file.load(table) == ""


def test_a_place_that_cannot_be_written_is_told_and_the_old_file_stays(tmp_path):
    (tmp_path / "taken").write_text("a file")
    file = TableFile(tmp_path / "taken", "f" * 64)
    assert "cannot be saved" in file.save(counted())
    assert str(file.path) in file.load(TokenTable([4, 4]))
