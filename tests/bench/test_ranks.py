"""Rows and time splits of studies on several cards."""

import argparse
import json

from bench_lib.kernel_split import split, union
from bench_lib.ranks import rows_of


def test_a_row_is_on_the_disk_once_it_is_measured(tmp_path):
    path = tmp_path / "rows.jsonl"
    options = argparse.Namespace(commit="0" * 40, out=path, layers=2)
    rows = rows_of(options, ("layers",), size="tiny")
    for number in (1, 2):
        rows.write({"median_ms": number})
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [row["median_ms"] for row in found] == [1, 2][:number]
    assert (found[0]["layers"], found[0]["size"]) == (2, "tiny")
    assert found[0]["run"] == found[1]["run"]


def test_times_of_a_step_are_split_without_counting_overlaps_twice():
    compute = [(0.0, 4000.0), (2000.0, 5000.0), (9000.0, 10000.0)]
    communication = [(4000.0, 7000.0), (4500.0, 6000.0)]
    assert union(compute) == [(0.0, 5000.0), (9000.0, 10000.0)]
    assert split(compute, communication) == {
        "compute_ms": 6.0, "exposed_ms": 2.0, "hidden_ms": 1.0, "idle_ms": 2.0
    }  # fmt: skip
