"""Clocks and power of a row: the summary of a file of samples, and a missing sampler."""

import json

import pytest
from bench_lib import clocks, presets

from tests.support import bench_cases

pytestmark = bench_cases.NEEDS_GROUPED_MM


def sample(at, **changes):
    known = {"sm": 1980, "memory": 3201, "milliwatts": 500000, "millijoules": None, "celsius": 50,
             "reasons": 0}  # fmt: skip
    return {"at": at, **known, **changes}


def test_a_summary_holds_median_least_power_and_every_reason():
    # The counter steps at 0.2 and 0.6 s: 280 J in 0.4 s. Its value before 0.2 s is unknown.
    samples = [
        sample(0.0, sm=1200, millijoules=1000, celsius=49),
        sample(0.2, sm=1980, millijoules=50_000),
        sample(0.4, sm=1755, millijoules=50_000, reasons=0x4),
        sample(0.6, sm=1905, millijoules=330_000, reasons=0x44),
        sample(0.8, sm=1980, millijoules=330_000, celsius=63),
    ]
    assert clocks.summary(samples) == {
        "sm_mhz": 1905, "sm_mhz_min": 1200, "mem_mhz": 3201, "power_w": 700.0, "temperature_c": 63,
        "throttle": "power_cap,hw_thermal",
    }  # fmt: skip
    few = clocks.summary([sample(0.0), sample(0.1, milliwatts=600000)])
    assert (few["power_w"], few["throttle"]) == (550.0, "none")
    nothing = sample(0.0, **dict.fromkeys(("sm", "memory", "milliwatts", "celsius", "reasons")))
    assert clocks.summary([nothing]) == clocks.summary([]) == clocks.UNKNOWN


def test_only_the_samples_of_the_timing_count(tmp_path, monkeypatch):
    log = tmp_path / "log"
    lines = [json.dumps(sample(at, sm=int(100 * at))) + "\n" for at in (1, 2, 3, 4, 5)]
    log.write_text(lines[0])
    times = iter((1.5, 3.5))
    monkeypatch.setattr(clocks.time, "monotonic", lambda: next(times))
    with clocks.watched(str(log)) as seen:
        # The last line is still being written.
        log.write_text("".join(lines[:4]) + lines[4][:9])
    assert (seen["sm_mhz"], seen["sm_mhz_min"]) == (250, 200)


def test_without_a_card_nothing_is_logged(tmp_path, capfd):
    assert clocks.main("GPU-none", tmp_path / "log", 0.01) == 0
    assert "clocks are not logged" in capfd.readouterr().err
    with clocks.sampler("GPU-none", tmp_path / "log"):
        pass
    with clocks.sampler(None, tmp_path / "log"), clocks.watched(str(tmp_path / "log")) as seen:
        pass
    assert seen == clocks.UNKNOWN
    with clocks.watched(None) as seen:
        pass
    assert seen == clocks.UNKNOWN


@pytest.mark.parametrize("preset", ["h100", "repeat"])
def test_ours_and_torch_compile_route_in_one_segment(preset):
    both = {"moe_patch", "torch_compile"}
    assert any(
        segment.op == "routing" and both <= set(segment.impls) and 32768 in segment.tokens
        for segment in presets.PRESETS[preset]
        if segment.impls and segment.tokens
    )
