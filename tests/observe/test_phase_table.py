"""The layer × phase table, by the rules that AOSP's headers and its parser's specification state. (OBS-7)"""

from __future__ import annotations

import pytest

from nnfmq.observe.phase_table import Tag, phase_table, tag_of
from nnfmq.observe.trace_files import Slice, Trace

Spec = tuple[str, int, int]


def table_of(*spec: Spec, request: int = 0) -> tuple[dict[str, int], dict[str, int]]:
    """Return the overall and the own times of slices of one thread by `layer_phase`."""
    trace = Trace([Slice(1, 1, begin, end, name, request) for name, begin, end in spec])
    trace.sort()
    found = phase_table(trace)
    overall, own = ({"_".join(key): ns for key, ns in times.items()} for times in (found.overall, found.own))
    return overall, own


def test_OBS_7_a_slice_counts_for_its_layer_and_phase() -> None:
    assert table_of(("[NN_LR_PP]f", 3, 10)) == ({"LR_PP": 7}, {"LR_PP": 7})


def test_OBS_7_a_call_to_a_lower_layer_counts_for_both_but_own_time_is_without_it() -> None:
    overall, own = table_of(("[NN_LA_PP]f", 0, 100), ("[NN_LR_PP]g", 20, 50))
    assert overall == {"LA_PP": 100, "LR_PP": 30}
    assert own == {"LA_PP": 70, "LR_PP": 30}


def test_OBS_7_detail_within_the_same_layer_and_phase_counts_once() -> None:
    assert table_of(("[NN_LR_PE]f", 0, 100), ("[NN_LR_PE]g", 20, 50)) == ({"LR_PE": 100}, {"LR_PE": 100})


def test_OBS_7_parts_of_an_execution_count_for_the_execution() -> None:
    overall, own = table_of(("[NN_LR_PE]f", 0, 100), ("[NN_LC_PCO]g", 20, 50), ("[NN_LC_PCO]h", 30, 40))
    assert overall == {"LR_PE": 100, "LC_PCO": 30, "LC_PE": 30}
    assert own == {"LR_PE": 70, "LC_PCO": 30, "LC_PE": 30}


def test_OBS_7_results_of_the_application_are_a_part_of_its_execution() -> None:
    _, own = table_of(("[NN_LA_PE]f", 0, 100), ("[NN_LA_PR]g", 20, 50))
    assert own == {"LA_PE": 100, "LA_PR": 30}


def test_OBS_7_a_phase_inside_another_one_does_not_count_for_that() -> None:
    overall, own = table_of(("[NN_LR_PC]f", 0, 100), ("[NN_LI_PI]getCapabilities", 20, 50))
    assert overall == {"LR_PC": 70, "LI_PI": 30}
    assert own == overall


def test_OBS_7_overall_phases_contain_all_others() -> None:
    overall, _ = table_of(("[NN_LA_PO]f", 0, 100), ("[NN_LA_PWU]w", 10, 90), ("[NN_LA_PE]g", 20, 50))
    assert overall == {"LA_PO": 100, "LA_PWU": 80, "LA_PE": 30}


def test_OBS_7_a_switch_ends_the_slice_around_it() -> None:
    overall, _ = table_of(("[NN_LC_PTR]f", 0, 100), ("[SW][NN_LC_PCO]f", 40, 90))
    assert overall == {"LC_PTR": 40, "LC_PE": 90, "LC_PCO": 50}


def test_OBS_7_a_subtracted_slice_does_not_count_for_the_layer_around_it() -> None:
    overall, _ = table_of(
        ("[NN_LA_PC]a", 0, 200), ("[NN_LI_PC]f", 10, 100), ("[NN_LI_PC]g", 20, 90), ("[SUB][NN_LR_PC]h", 30, 60)
    )
    assert overall == {"LA_PC": 200, "LI_PC": 60, "LR_PC": 30}


def test_OBS_7_utility_code_and_names_without_a_tag_count_for_what_is_around_them() -> None:
    assert table_of(("[NN_LR_PP]f", 0, 100), ("[NN_LU_PU]u", 20, 50), ("other", 25, 30))[0] == {"LR_PP": 100}
    assert table_of(("other", 25, 30)) == ({}, {})


def test_OBS_7_the_time_of_the_driver_is_not_the_own_time_of_waiting_for_it() -> None:
    trace = Trace(
        [
            Slice(1, 1, 0, 100, "[NN_LI_PE]wait", 5),
            Slice(1, 1, 200, 300, "[NN_LI_PE]wait", 6),
            Slice(2, 2, 30, 120, "[NN_LD_PE]request", 5),
            Slice(2, 2, 30, 35, "[NN_LD_PIO]decode", 5),
        ]
    )
    trace.sort()
    found = phase_table(trace)
    assert found.overall["LI", "PE"] == 200
    assert found.own["LI", "PE"] == 200 - 70
    assert found.counts["LI", "PE"] == 2


def test_a_slice_that_outlasts_the_one_around_it_is_cut() -> None:
    overall, _ = table_of(("[NN_LR_PE]f", 0, 100), ("[NN_LI_PE]g", 50, 150), ("[NN_LA_PE]h", 160, 170))
    assert overall == {"LR_PE": 100, "LI_PE": 50, "LA_PE": 10}


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("[NN_LC_PTR]x", Tag("LC", "PTR")),
        ("[SW][NN_LC_PCO]x", Tag("LC", "PCO", "SW")),
        ("[SUB][NN_LR_PC]x", Tag("LR", "PC", "SUB")),
        ("[NN_LX_PE]x", None),
        ("[NN_LR_PX]x", None),
        ("x [NN_LR_PE]", None),
    ],
)
def test_UTL_5_names_have_tags_of_layer_and_phase(name: str, tag: Tag | None) -> None:
    assert tag_of(name) == tag
