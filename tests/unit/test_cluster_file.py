"""A `cluster.toml` gives profiles to plan on; errors name the file and the key."""

from __future__ import annotations

import re

import pytest

from poplar.hardware.cluster_file import ClusterFile, DeviceEntry, HostEntry
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.hardware.simulated_cluster import (
    LINK_EFFICIENCY,
    OVERLAP,
    network_profile,
    simulated_cluster,
)
from poplar.values.profile import ModelProfile

JOB = TrainingJob(architecture=architecture("llama-1.1b"))
TWO_HOSTS = """
name = "two kinds"
network_gbit_per_s = 100

[[host]]
name = "big"

  [[host.device]]
  gpu = "A100-SXM-80"
  count = 4

[[host]]
network_gbit_per_s = 25
link_gb_per_s = 12

  [[host.device]]
  gpu = "T4"
  memory_gib = 14.5

  [[host.device]]
  gpu = "V100-PCIe-16"
"""
ALONE = '[[host]]\n[[host.device]]\ngpu = "T4"\ncount = 2\n'


def read(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return ClusterFile.read(path)


def test_ranks_are_numbered_in_file_order(tmp_path):
    described = read(tmp_path, TWO_HOSTS)
    simulated = simulated_cluster(described, JOB)
    assert [device.name for device in simulated.middle.devices] == [
        *["A100-SXM-80"] * 4,
        "T4",
        "V100-PCIe-16",
    ]
    assert [device.host for device in simulated.middle.devices] == ["big"] * 4 + ["host1"] * 2
    assert simulated.middle.devices[4].memory_bytes == 29 << 29
    assert simulated.spreads == {"A100-SXM-80": 0.3, "T4": 0.5, "V100-PCIe-16": 0.3}
    assert simulated.middle.overlap == OVERLAP
    assert "simulated" in simulated.middle.notes[0]


def test_the_default_link_is_the_slowest_device_link(tmp_path):
    big, small = read(tmp_path, TWO_HOSTS).host
    assert (big.link_bytes_per_s, big.network_gbit_per_s) == (300e9, 100)
    assert (small.link_bytes_per_s, small.network_gbit_per_s) == (12e9, 25)
    mixed = read(tmp_path, TWO_HOSTS.replace("link_gb_per_s = 12\n", ""))
    assert mixed.host[1].link_bytes_per_s == 16e9
    (fast,) = mixed.only(mixed.device_types[2]).host
    assert fast.link_bytes_per_s == 16e9, "a part of a cluster has the same links"


def test_a_count_makes_several_hosts(tmp_path):
    described = read(
        tmp_path,
        'network_gbit_per_s = 10\n[[host]]\nname = "node"\ncount = 3\n'
        '[[host.device]]\ngpu = "T4"\ncount = 2\n',
    )
    assert [host.name for host in described.host] == ["node-0", "node-1", "node-2"]
    assert len(described.devices) == 6
    assert described.name == "cluster", "the file's name, if it has no other"


def test_outlooks_are_faster_slower_and_tilted_by_device(tmp_path):
    simulated = simulated_cluster(read(tmp_path, TWO_HOSTS), JOB)
    middle, best, worst = simulated.middle, simulated.optimistic, simulated.pessimistic
    for rank in range(6):
        seconds = [cluster.devices[rank].seconds(1) for cluster in (best, middle, worst)]
        assert seconds == sorted(seconds)
    assert (
        best.network.reduce_scatter_seconds
        < middle.network.reduce_scatter_seconds
        < worst.network.reduce_scatter_seconds
    )
    assert (best.overlap, worst.overlap) == (pytest.approx(0.9), pytest.approx(0.3))
    assert len(simulated.tilted) == 3
    first = simulated.tilted[0]
    assert first.devices[0].seconds(1) > middle.devices[0].seconds(1)
    assert first.devices[4].seconds(1) < middle.devices[4].seconds(1)


def test_outlooks_of_one_type_have_equal_batches_and_differ_by_the_spread(tmp_path):
    simulated = simulated_cluster(read(tmp_path, ALONE), JOB)
    assert simulated.tilted == ()
    middle, best, worst = (cluster.devices[0] for cluster in simulated.outlooks)
    assert middle.max_batch == best.max_batch == worst.max_batch
    assert best.seconds(1) == pytest.approx(middle.seconds(1) / 1.5)
    assert worst.seconds(1) == pytest.approx(middle.seconds(1) / 0.5)
    assert worst.activation_bytes(1) == pytest.approx(1.3 * middle.activation_bytes(1), abs=1)


def test_a_given_overlap_is_the_same_in_all_outlooks(tmp_path):
    simulated = simulated_cluster(read(tmp_path, f"overlap = 0.8\n{TWO_HOSTS}"), JOB)
    assert {cluster.overlap for cluster in simulated.outlooks} == {0.8}


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        ('"T4"', '"T5"', "host[1].device[0]", "'T5' is not a known device"),
        ("count = 4", "count = 0", "host[0].device[0].count", "from 1 to 65536, got 0"),
        ("count = 4", "cuont = 4", "host[0].device[0].cuont", "is unknown; expected gpu, count"),
        ("network_gbit_per_s = 100", "", "network_gbit_per_s", "is missing for host 'big'"),
        ('name = "two kinds"', "speed = 2", "speed", "is unknown; expected host, name"),
        ('name = "big"', 'name = "host1"', "two hosts", "'host1'"),
    ],
)
def test_invalid_values_raise_with_file_and_key(tmp_path, old, new, key, words):
    text = TWO_HOSTS.replace(old, new, 1)
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        read(tmp_path, text)
    assert f"cluster.toml: {key}" in str(raised.value)


def test_a_file_without_hosts_or_devices_raises(tmp_path):
    with pytest.raises(ValueError, match="host is missing"):
        read(tmp_path, 'name = "empty"')
    with pytest.raises(ValueError, match=r"host\[0\]\.device is missing"):
        read(tmp_path, '[[host]]\nname = "empty"')


def test_a_file_that_is_not_toml_raises_with_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"cluster\.toml is not valid TOML"):
        read(tmp_path, "[[host")


# Collectives between described hosts

MODEL = ModelProfile(unit_numels=(10**9,), param_bytes=2, wire_bytes=4)


def links(ranks, network=1e9, link=1e10):
    return HostEntry(
        device=(DeviceEntry(gpu="T4", count=ranks),),
        link_gb_per_s=link / 1e9,
        network_gbit_per_s=network * 8 / 1e9,
    )


def test_one_device_does_not_communicate():
    network = network_profile([links(1)], MODEL)
    assert network.reduce_scatter_seconds == network.all_gather_seconds == 0.0


def test_one_host_is_bound_by_its_links():
    network = network_profile([links(4)], MODEL)
    expected = 4e9 * 3 / 4 / 1e10 / LINK_EFFICIENCY
    assert network.reduce_scatter_seconds == pytest.approx(expected, rel=1e-3)
    assert network.all_gather_seconds == pytest.approx(expected / 2, rel=1e-3)


def test_hosts_send_one_copy_for_any_number_of_ranks():
    few = network_profile([links(1), links(1)], MODEL)
    many = network_profile([links(8, link=1e20), links(8, link=1e20)], MODEL)
    assert few.reduce_scatter_seconds == pytest.approx(4e9 / 2 / 1e9 / LINK_EFFICIENCY, rel=1e-3)
    assert many.reduce_scatter_seconds == pytest.approx(few.reduce_scatter_seconds, rel=1e-3)


def test_the_slowest_network_bounds_all_hosts():
    fast = network_profile([links(2), links(2)], MODEL)
    slow = network_profile([links(2), links(2, network=1e8)], MODEL)
    assert slow.all_gather_seconds > 5 * fast.all_gather_seconds
    assert slow.send_seconds_per_byte[2] > slow.send_seconds_per_byte[0]
