"""Benchmark rows, and the tables, documents and charts made from them."""

import bench
import pytest
from bench_lib import aims, blocks, charts, newest, rows, table
from bench_lib.ops import OPS
from bench_lib.rows import RowError

from tests.support import bench_cases
from tests.support.bench_cases import COMMIT, FIELDS, LOGGED, ROOT, good_row, logged_row

pytestmark = bench_cases.NEEDS_GROUPED_MM


def test_good_rows_pass():
    rows.check_row(good_row())
    rows.check_row(good_row(shape="E256_K8_G8", op="routing", D=None, F=None, impl="torch"))
    rows.check_row(good_row(impl="sonicmoe", median_ms=None, skipped="not installed"))
    rows.check_row(good_row(op="model", shape="qwen3_30b_12L_4x4096_ckpt", commit=f"{COMMIT}+dirty",
                            moe_ms=1.5, tokens_per_s=1e4))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"impl": "moe_patsch"}, "impl"),
        ({"impl": "peft:fast"}, "impl"),
        ({"shape": "qwen3_31b"}, "shape"),
        ({"shape": "E128"}, "shape"),
        ({"op": "expert"}, "op"),
        ({"dtype": "float32"}, "dtype"),
        ({"pass": "bwd"}, "pass"),
        ({"date": "2026-11-27T23:00Z"}, "date"),
        ({"commit": "e8d9507"}, "commit"),
        ({"T": None}, "T"),
        ({"T": 4096.0}, "T"),
        ({"median_ms": "2.0"}, "median_ms"),
        ({"median_ms": float("nan")}, "median_ms"),
        ({"median_ms": -1.0}, "median_ms"),
        ({"median_ms": True}, "median_ms"),
        ({"median_ms": None}, "skipped"),
        ({"skipped": "slow"}, "skipped"),
        ({"skipped": "", "median_ms": None}, "skipped"),
        ({"rel_err": None}, "rel_err"),
        ({"bitwise": None}, "bitwise"),
        ({"bitwise": "yes"}, "bitwise"),
        ({"mood": "fine"}, "mood"),
        ({"moe_ms": 1.0}, "moe_ms"),
        ({"op": "model"}, "tokens_per_s"),
    ],
)
def test_bad_rows_are_refused_by_field(changes, named):
    with pytest.raises(RowError, match=rf"\b{named}\b"):
        rows.check_row(good_row(**changes))


def test_a_row_logs_everything_or_nothing():
    """Rows without machine, clocks or plain time, as older ones are, stay readable."""
    rows.check_row(good_row())
    rows.check_row(logged_row())
    rows.check_row(logged_row(**dict.fromkeys(LOGGED - {"machine"})))
    for field in sorted(LOGGED):
        row = logged_row()
        del row[field]
        with pytest.raises(RowError, match=f"{field} is missing"):
            rows.check_row(row)
    for field, value in (("machine", None), ("machine", ""), ("throttle", 4), ("sm_mhz", "fast")):
        with pytest.raises(RowError, match=f"{field} is {value!r}"):
            rows.check_row(logged_row(**{field: value}))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_missing_field_is_named(field):
    row = good_row()
    del row[field]
    with pytest.raises(RowError, match=f"{field} is missing"):
        rows.check_row(row)


def test_nothing_is_written_when_one_row_is_bad(tmp_path):
    out = tmp_path / "new" / "experts.jsonl"
    with pytest.raises(RowError):
        rows.append_rows(out, [good_row(), good_row(op="expert")])
    assert not out.exists()
    rows.append_rows(out, [good_row()])
    rows.append_rows(out, [good_row(run="r2")])
    assert [row["run"] for row in rows.read_rows(out)] == ["r1", "r2"]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")), ids=str)
def test_committed_rows_are_valid(path):
    if path.stem in rows.OPS:
        assert all(row["op"] == path.stem for row in rows.read_rows(path))


def test_ratios_stay_within_one_run_and_point():
    slow, fast = good_row(median_ms=3.0), good_row(impl="hf_eager", median_ms=1.5)
    assert table.ratio(slow, fast) == 2.0
    for change in ({"run": "r2"}, {"T": 16384}, {"pass": "fwd+bwd"}, {"dtype": "fp16"}):
        with pytest.raises(RowError, match="no ratio across different"):
            table.ratio(slow, fast | change)
    with pytest.raises(RowError, match="hf_eager, which was skipped: absent"):
        table.ratio(slow, fast | {"median_ms": None, "skipped": "absent"})


def test_a_table_is_of_one_run():
    mixed = [good_row(), good_row(run="r2", impl="hf_eager", median_ms=9.0)]
    with pytest.raises(RowError, match="of one run, these rows are of 2"):
        table.markdown(mixed)
    assert table.of_run(mixed, None) == mixed[1:]
    assert table.of_run(mixed, "r1") == mixed[:1]
    with pytest.raises(RowError, match="no rows of run 'r3'; the file has r1, r2"):
        table.of_run(mixed, "r3")


def test_table_shows_ratios_and_reasons():
    text = table.markdown(
        [
            good_row(impl="moe_patch", median_ms=2.0),
            good_row(impl="hf_eager", median_ms=5.0),
            good_row(impl="sonicmoe", median_ms=None, skipped="not installed: sonicmoe"),
        ],
        over="hf_eager",
    )
    assert "| 2 ms, 300 TF, 2.50x | 5 ms, 300 TF | skipped |" in text
    assert "- skipped sonicmoe: not installed: sonicmoe" in text


def test_a_document_shows_the_newest_run_that_has_the_peers():
    def rows_of(run, day, peers, **changes):
        when = {"run": run, "date": f"2026-11-{day}T00:00:00Z", "impl": "moe_patch"}
        return [good_row(**when | {"impl": impl}, **changes) for impl in ("moe_patch", *peers)]

    required = OPS["experts"].required
    full = rows_of("full", 20, required)
    newer = rows_of("newer", 22, required, shape="mixtral")
    alone = rows_of("alone", 25, ())
    on_cpu = rows_of("laptop", 26, required, card="CPU: some")
    lines = newest.newest_lines([*full, *newer, *alone, *on_cpu], OPS["experts"])
    assert [(line.shape, line.ours["run"]) for line in lines] == [
        ("olmoe", "full"),
        ("mixtral", "newer"),
    ]
    assert newest.newest_lines(alone, OPS["experts"])[0].ours["run"] == "alone"


def test_blocks_are_made_from_rows_alone(tmp_path):
    timed = [good_row(impl="moe_patch"), good_row(impl="hf_grouped_mm", median_ms=5.0)]
    skipped = good_row(impl="sonicmoe", median_ms=None, skipped="needs another card")
    rows.append_rows(tmp_path / "experts.jsonl", [*timed, skipped])
    text = "before\n<!-- bench: experts -->\nold\n<!-- end of bench -->\nafter\n"
    new = blocks.rewrite(text, tmp_path)
    assert "| olmoe | 4096 | fwd | card | 2 | 5 (2.50x) | skipped | 300 (0.50) |" in new
    assert "- sonicmoe skipped at olmoe T=4096 fwd (card): needs another card" in new
    assert "Run r1 (2026-11-27 23:00 UTC, commit 0123456789)." in new
    assert "old" not in new
    assert blocks.rewrite(new, tmp_path) == new
    with pytest.raises(RowError, match="no block 'expert'; there are headline, experts"):
        blocks.rewrite(text.replace("experts", "expert"), tmp_path)
    empty = {name: block(tmp_path / "nothing") for name, block in blocks.BLOCKS.items()}
    assert empty.pop("releases").startswith("No rows of two releases")
    assert set(empty.values()) == {blocks.NOTHING}


def test_aims_are_judged_within_one_run(tmp_path):
    def row(**changes):
        return good_row(**{"op": "lora", "impl": "moe_patch", "shape": "qwen3_30b", "T": 16384,
                           "pass": "fwd+bwd", "tflops": 400.0} | changes)  # fmt: skip

    bases = [row(run=run, median_ms=ms) for run, ms in (("r1", 5.0), ("r2", 9.0))]
    adapted = [row(R=16, median_ms=6.0), row(R=16, impl="peft", median_ms=18.0)]
    rows.append_rows(tmp_path / "lora.jsonl", [*adapted, bases[0]])
    found = {line[1]: line[3:] for line in aims.table(tmp_path, aims.all_aims())}
    assert found["over the fastest peer"] == ["card", "≥ 2.5", "3.00", "met"]
    assert found["times the frozen base"] == ["card", "≤ 1.35", "1.20", "met"]
    assert found["share of bmm"] == ["card", "≥ 0.65", "0.67", "met"]
    other = tmp_path / "other"
    rows.append_rows(other / "lora.jsonl", [*adapted, bases[1]])
    assert "times the frozen base" not in {line[1] for line in aims.table(other, aims.all_aims())}


def rows_of_run(run, machine, ours_ms, theirs_ms, **changes):
    """Ours and hf_grouped_mm at a point of op experts, and the ceiling as fast as ours at 4 ms."""
    common = {
        "run": run, "machine": machine, "pass": "fwd+bwd", "shape": "qwen3_30b", "T": 16384,
        "date": f"2026-11-3{len(run) % 10}T00:00:00Z", "ceiling_tflops": 300.0,
    }  # fmt: skip
    common |= changes
    return [
        logged_row(**common, impl="moe_patch", median_ms=ours_ms, tflops=1200.0 / ours_ms),
        logged_row(**common, impl="hf_grouped_mm", median_ms=theirs_ms, tflops=None),
    ]


def three_runs(**changes):
    """The median of the ratios (2.5) is not the ratio of the medians (3.0)."""
    return [
        *rows_of_run("a", "m1", 4.0, 20.0, **changes),
        *rows_of_run("aa", "m2", 5.0, 10.0, **changes),
        *rows_of_run("aaa", "m1", 6.0, 15.0, **changes),
    ]


def test_runs_of_one_commit_are_shown_by_their_median(tmp_path):
    (line,) = newest.newest_lines(three_runs(), OPS["experts"])
    assert (len(line.runs), line.machines, line.enough) == (3, 2, True)
    assert line.time("moe_patch") == 5.0
    assert line.ratios("hf_grouped_mm") == [2.0, 2.5, 5.0]
    assert aims.share(line, ()) == pytest.approx(0.8)
    rows.append_rows(tmp_path / "experts.jsonl", three_runs())
    text = blocks.BLOCKS["experts"](tmp_path)
    assert "| card | 5 [4, 6] | 15 (2.50x) | 240 (0.80) | 3 (2) |" in text
    assert "\\*" not in text
    headline = blocks.BLOCKS["headline"](tmp_path)
    assert "| 5 [4, 6] | 2.50x [2.00, 5.00] hf_grouped_mm | 3 (2) |" in headline
    assert all(run in headline for run in ("a (2026", "aa (2026", "aaa (2026"))


def test_the_headline_says_which_torch_and_triton_its_numbers_hold_for(tmp_path):
    for release in ("3.6.0", "3.8.0"):
        path = tmp_path / release
        several = [row | {"torch": "2.11.0", "triton": release} for row in three_runs()]
        rows.append_rows(path / "experts.jsonl", several)
        first = blocks.BLOCKS["headline"](path).partition("\n")[0]
        assert first == f"These numbers hold for torch 2.11.0 with Triton {release}."


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"machine": "m1"}, "3 (1)"),
        ({"commit": "f" * 40}, "1 (1)"),
        ({"triton": "3.8.0"}, "1 (1)"),
        ({"card": "card 2"}, "1 (1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_too_few_runs_or_machines_are_marked(tmp_path, changes, shown):
    found = three_runs() if "machine" in changes else three_runs()[:4]
    found = [row | changes if row["run"] == "aa" else row for row in found]
    rows.append_rows(tmp_path / "experts.jsonl", found)
    text = blocks.BLOCKS["experts"](tmp_path)
    assert f"| {shown} \\* |" in text
    assert "\\* Fewer than 3 runs or 2 machines." in text
    assert blocks.BLOCKS["headline"](tmp_path) == blocks.NOTHING


def test_portable_rows_stand_beside_the_peers_of_their_own_run(tmp_path):
    found = [row for row in three_runs() if row["impl"] != "moe_patch"]
    ours = [row | {"impl": "moe_patch:portable"} for row in three_runs() if row not in found]
    others = [row | {"run": f"{row['run']}x", "impl": "hf_grouped_mm"} for row in three_runs()]
    rows.append_rows(tmp_path / "experts.jsonl", [*found, *ours, *others])
    text = blocks.BLOCKS["portable"](tmp_path)
    assert "| card | 5 [4, 6] | 15 (2.50x) hf_grouped_mm | 240 (0.80) | 3 (2) |" in text
    rows.append_rows(tmp_path / "none" / "experts.jsonl", others)
    assert blocks.BLOCKS["portable"](tmp_path / "none") == blocks.NOTHING


def test_releases_are_compared_on_one_machine_and_commit(tmp_path):
    def run(name, triton, ms, host_us, **changes):
        both = {"host_us": host_us, "triton": triton} | changes
        ours, _ = rows_of_run(name, "m1", ms, 9.0, **both)
        small, _ = rows_of_run(name, "m1", ms, 9.0, **both | {"T": 1024})
        return [ours, small]

    found = [*run("a", "3.6.0", 4.0, 100.0), *run("aa", "3.8.0", 5.0, 80.0)]
    found += [*run("aaa", "3.6.0", 6.0, 100.0), *run("aaaa", "3.8.0", 7.0, 60.0)]
    elsewhere = run("aaaaa", "3.9.0", 1.0, 1.0, commit="f" * 40)
    rows.append_rows(tmp_path / "experts.jsonl", [*found, *elsewhere])
    text = blocks.BLOCKS["releases"](tmp_path)
    cells = "– | bf16 | fwd+bwd | 5 [4, 6] | 6 [5, 7] | 100 [100, 100] | 70 [60, 80]"
    assert f"| 16384 | {cells} | +20.0% |" in text
    assert f"| 1024 | {cells} | -30.0% |" in text
    assert "3.9.0" not in text


def test_releases_in_turn_have_no_line_in_other_tables():
    def alone(name, triton, **changes):
        return rows_of_run(name, "m1", 1.0, 9.0, triton=triton, **changes)[:1]

    found = [*alone("b" * 8, "3.6.0"), *alone("b" * 9, "3.8.0")]
    small = [*alone("c" * 8, "3.6.0", T=1024), *alone("c" * 9, "3.8.0", T=1024)]
    (line,) = newest.newest_lines([*three_runs(), *found, *small], OPS["experts"])
    assert (line.T, line.time("moe_patch")) == (16384, 5.0)
    (line,) = newest.newest_lines(found[:1], OPS["experts"])
    assert line.time("moe_patch") == 1.0, "one release took no turns"


def test_one_later_run_does_not_take_the_place_of_three(tmp_path):
    later = rows_of_run("aaaa", "m1", 9.0, 10.0, commit="f" * 40)
    (line,) = newest.newest_lines([*three_runs(), *later], OPS["experts"])
    assert line.time("moe_patch") == 5.0
    dirty = three_runs(commit=f"{COMMIT}+dirty")
    (line,) = newest.newest_lines([*dirty, *later], OPS["experts"])
    assert line.time("moe_patch") == 9.0, "trees that nobody knows do not count together"


def test_a_pass_is_held_to_its_base_within_each_run(tmp_path):
    def lora(run, R, ms):
        return logged_row(run=run, op="lora", R=R, median_ms=ms, shape="qwen3_30b", T=16384,
                          impl="moe_patch", **{"pass": "fwd+bwd"})  # fmt: skip

    bases = {"a": 4.0, "b": 10.0, "c": 6.0}
    found = [lora(run, None, ms) for run, ms in bases.items()]
    found += [lora(run, 16, ms) for run, ms in (("a", 5.2), ("b", 15.0), ("c", 6.6))]
    lines = newest.newest_lines(found, OPS["lora"])
    (adapted,) = (line for line in lines if line.R)
    assert aims.times_frozen_base(adapted, lines) == pytest.approx(1.3)


def test_each_card_has_a_line_of_its_own(tmp_path):
    def rows_of(card, day, ms):
        when = {"run": card, "date": f"2026-11-{day}T00:00:00Z", "card": card}
        ours = good_row(**when, impl="moe_patch", median_ms=ms)
        return [ours, good_row(**when, impl="hf_grouped_mm", median_ms=6.0)]

    found = [*rows_of("NVIDIA H100 80GB HBM3", 20, 2.0), *rows_of("NVIDIA H200", 22, 1.5)]
    rows.append_rows(tmp_path / "experts.jsonl", found)
    text = blocks.BLOCKS["experts"](tmp_path)
    assert "| olmoe | 4096 | fwd | H100 | 2 | 6 (3.00x) |" in text
    assert "| olmoe | 4096 | fwd | H200 | 1.5 | 6 (4.00x) |" in text
    both = newest.newest_lines(found, OPS["experts"], each_card=True)
    assert [line.card for line in both] == ["H100", "H200"]
    assert [line.card for line in newest.newest_lines(found, OPS["experts"])] == ["H200"]


def test_documents_are_not_older_than_their_rows():
    bench.write_docs(check=True)


def test_charts_are_drawn_and_repeat(tmp_path):
    pytest.importorskip("matplotlib", reason="charts need the extra plots")
    impls = ("moe_patch", "hf_grouped_mm")
    timed = [good_row(impl=impl, **{"pass": "fwd+bwd"}) for impl in impls]
    rows.append_rows(tmp_path / "experts.jsonl", timed)
    (first,) = charts.draw(tmp_path, tmp_path / "a")
    (second,) = charts.draw(tmp_path, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert "hf_grouped_mm" in first.read_text()
