"""Devices by name, estimated by a calibrated roofline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from poplar.hardware import roofline
from poplar.hardware.gpu_specifications import SPECIFICATIONS, find_device
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.hardware.roofline import device_profile, spread

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from published_curves import CURVES
from roofline_errors import THROUGHPUTS, errors, held_out_errors

LLAMA = TrainingJob(architecture=architecture("llama-1.1b"))
KINDS = [known.gpu for known in SPECIFICATIONS]


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("A100-SXM-80", "A100-SXM-80"),
        ("a100-sxm-80", "A100-SXM-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40"),
        ("A100-80GB", "A100-SXM-80"),
        ("A800-80GB", "A800-80"),
        ("V100S-32GB", "V100S-PCIe-32"),
        ("V100-32", "V100-SXM2-32"),
        ("T4-16GB", "T4"),
        ("RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
    ],
)
def test_devices_are_found_by_common_names(name, gpu):
    assert find_device(name).gpu == gpu


def test_an_ambiguous_name_raises_with_all_candidates():
    with pytest.raises(ValueError, match=r"'A100-40' matches several.*A100-PCIe-40, A100-SXM-40"):
        find_device("A100-40")


@pytest.mark.parametrize("name", ["A1000", "", "  ", "RTX 4090 Laptop", "40"])
def test_an_unknown_device_raises_with_the_known_names(name):
    with pytest.raises(ValueError, match=r"(not a known device|several).*A100"):
        find_device(name)


def errors_of(*words):
    return [one.error for one in errors() if all(word in one.what for word in words)]


def test_calibration_errors_match_the_docstring():
    assert len(list(errors())) == len(THROUGHPUTS) + 4
    on_a100 = [one.error for one in errors() if " over " not in one.what and "on A100" in one.what]
    assert len(on_a100) == 8
    assert max(map(abs, on_a100)) < 0.04
    assert max(map(abs, errors_of("on H100"))) < 0.15
    assert max(map(abs, errors_of("on V100", " over "))) < 0.02
    assert max(map(abs, errors_of("on A100-SXM-80 over "))) < 0.04
    (geforce,) = errors_of("RTX-3090")
    assert geforce == pytest.approx(-0.17, abs=0.01), "the roofline is too slow"


def test_held_out_errors_match_the_docstring():
    held_out = {one.what.partition(":")[0]: one.error for one in held_out_errors()}
    assert held_out == {
        "bert-large (512 tokens) on V100-SXM2-16": pytest.approx(0.33, abs=0.01),
        "bert-large (128 tokens) on V100-SXM2-16": pytest.approx(0.19, abs=0.01),
        "bert-large (512 tokens) on V100-SXM2-32": pytest.approx(0.25, abs=0.01),
        "bert-large (128 tokens) on V100-SXM2-32": pytest.approx(-0.02, abs=0.01),
        "bert-large (512 tokens) on A100-SXM-40": pytest.approx(0.89, abs=0.01),
        "bert-large (128 tokens) on A100-SXM-40": pytest.approx(0.56, abs=0.01),
    }


def test_held_out_ratios_are_within_the_tilted_interval():
    # The A100 over the V100, by the spreads that a tilted cluster has.
    measured = [70.856 / 31.23, 356.845 / 168.63]
    for sequence, ratio in zip((512, 128), measured, strict=True):
        job = TrainingJob(architecture=architecture("bert-large"), sequence=sequence)
        a100, v100 = (
            1 / device_profile(find_device(gpu), job).seconds(1)
            for gpu in ("A100-SXM-40", "V100-SXM2-32")
        )
        assert a100 / v100 * 0.7 / 1.3 < ratio < a100 / v100 * 1.3 / 0.7


def test_errors_of_unmeasured_chips_match_the_docstring(monkeypatch):
    monkeypatch.setattr(roofline, "EFFICIENCIES", {})
    assert errors_of("on V100", " over ") == [pytest.approx(0.47, abs=0.02)]
    assert errors_of("RTX-3090") == [pytest.approx(-0.39, abs=0.02)]


def test_calibrated_chips_have_the_narrower_interval():
    published = {one.gpu for one in (*CURVES, *THROUGHPUTS)}
    assert {spread(find_device(gpu)) for gpu in published} == {0.3}
    assert spread(find_device("A800-80")) == 0.3 < spread(find_device("T4")) == 0.5
    wide = {gpu for gpu in KINDS if spread(find_device(gpu)) == 0.5}
    geforce = {f"RTX-{name}" for name in ("3060", "3070", "3080", "4090", "5090")}
    others = {"P100", "T4", "L4", "A40", "L40S", "RTX-A6000", "RTX-5060-Ti", "RTX-5070-Ti"}
    assert wide == geforce | others


def test_every_calibration_error_is_within_the_interval():
    assert all(0.7 < 1 / (1 + one.error) < 1.3 for one in errors())


@pytest.mark.parametrize("gpu", KINDS)
def test_larger_batches_are_faster_per_sample(gpu):
    profile = device_profile(find_device(gpu), LLAMA)
    rates = [point.batch / point.seconds for point in profile.points]
    assert rates == sorted(rates), "launches count less in larger batches"
    mfu = rates[-1] * LLAMA.flops_per_sample / profile.peak_flops
    assert 0.05 < mfu < 0.9
    assert profile.peak_flops == find_device(gpu).half_flops


def test_checkpointing_lengthens_passes_by_a_third_and_allows_larger_ones():
    t4 = find_device("T4")
    job = TrainingJob(architecture=LLAMA.architecture, checkpointing=True)
    plain, less = device_profile(t4, LLAMA), device_profile(t4, job)
    assert less.seconds(1) == pytest.approx(plain.seconds(1) * 4 / 3)
    assert less.max_batch > 2 * plain.max_batch


def test_memory_is_as_specified_unless_given():
    t4 = find_device("T4")
    assert device_profile(t4, LLAMA).memory_bytes == 16 << 30
    assert device_profile(t4, LLAMA, memory_gib=14.5).memory_bytes == 29 << 29
