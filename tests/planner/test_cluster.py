import pytest

from rotorch.core.errors import ConfigError
from rotorch.planner.cluster import known_clusters, load_cluster

FILE = """
name = "two nodes"
nodes = 2
devices_per_node = 4

[device]
name = "some GPU"
type = "cuda"
memory = { value = 80e9, efficiency = 0.9, source = "datasheet", date = 2023-03-01 }
bandwidth = { value = 2e12, efficiency = 0.8, source = "datasheet", date = 2023-03-01 }
half_size = { value = 64, source = "measured", date = 2023-03-01 }
launch = { value = 4e-6, source = "measured", date = 2023-03-01 }
operator = { value = 6e-6, source = "measured", date = 2023-03-01 }
overlap = { value = 0.1, source = "measured", date = 2023-03-01 }
flops.bfloat16 = { value = 300e12, efficiency = 0.7, source = "datasheet", date = 2023-03-01 }

[[links]]
name = "inside"
devices = 4
bandwidth = { value = 300e9, efficiency = 0.8, source = "datasheet", date = 2023-03-01 }
latency = { value = 10e-6, source = "measured", date = 2023-03-01 }
hop = { value = 1e-6, source = "measured", date = 2023-03-01 }

[[links]]
name = "between"
devices = 8
bandwidth = { value = 25e9, efficiency = 0.8, source = "datasheet", date = 2023-03-01 }
latency = { value = 10e-6, source = "measured", date = 2023-03-01 }
hop = { value = 1e-6, source = "measured", date = 2023-03-01 }
"""


def load(tmp_path, text):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return load_cluster(str(file))


@pytest.mark.parametrize("name", known_clusters())
def test_clusters_that_rotorch_brings_can_be_read(name):
    found = load_cluster(name)
    assert found.links[-1].devices == found.num_devices
    assert all(figure.source and figure.date for figure in (found.device.memory, found.device.bandwidth))


def test_the_clusters_that_users_ask_for_are_there():
    assert {"h100x8", "h100x16", "h100x1024", "a100x64", "v100x64", "cpu2"} <= set(known_clusters())


def test_a_group_needs_the_link_that_its_reach_needs(tmp_path):
    found = load(tmp_path, FILE)
    assert [found.link_of(reach).name for reach in (1, 2, 4, 5, 8)] == ["inside"] * 3 + ["between"] * 2
    assert found.device.flops["bfloat16"].reached == pytest.approx(210e12)
    assert found.with_nodes(16).num_devices == found.with_nodes(16).links[-1].devices == 64


@pytest.mark.parametrize(
    ("ranks", "nodes", "links"),
    [(8, 2, [4, 8]), (7, 7, [7]), (6, 2, [3, 6]), (5, 5, [5]), (4, 1, [4]), (3, 1, [3]), (1, 1, [1])],
)
def test_ranks_that_are_left_lie_on_nodes_with_equally_many(tmp_path, ranks, nodes, links):
    found = load(tmp_path, FILE).with_ranks(ranks)
    assert (found.num_devices, found.nodes) == (ranks, nodes)
    assert [link.devices for link in found.links] == links
    assert [link.name for link in found.links] == {1: ["inside"], 2: ["inside", "between"]}.get(nodes, ["between"])
    assert ranks == 8 or "ranks of it" in found.name


def test_levels_between_nodes_and_the_whole_stay():
    found = load_cluster("h100x1024")
    rack = found.links[-1].model_copy(update={"name": "rack", "devices": 64})
    found = found.model_copy(update={"links": (found.links[0], rack, found.links[-1])})
    assert [link.devices for link in found.with_ranks(512).links] == [8, 64, 512]
    assert [(link.name, link.devices) for link in found.with_ranks(48).links][1:] == [("rack", 48)]
    assert [link.devices for link in found.with_ranks(96).links] == [8, 96]


WRONG = {
    "missing": ("operator = {", "# operator = {", "device.operator is missing. Write it"),
    "no efficiency": ("value = 80e9, efficiency = 0.9,", "value = 80e9,", "device.memory.efficiency is missing"),
    "above 1": (
        "value = 80e9, efficiency = 0.9,",
        "value = 80e9, efficiency = 1.2,",
        "device.memory.efficiency = '1.2'",
    ),
    "misspelt": ("devices_per_node = 4", "device_per_node = 4", "unknown key 'device_per_node' (did you mean 'devices"),
    "unknown dtype": ("flops.bfloat16", "flops.bf16", "device.flops.bf16"),
    "not all joined": (
        "devices = 8",
        "devices = 16",
        "2 nodes of 4 devices are 8, but the last link 'between' joins 16",
    ),
    "no multiple": ("devices = 4\n", "devices = 3\n", "joins 8 devices, no multiple of the 3 that 'inside' joins"),
    "slower inside": ("value = 300e9", "value = 3e9", "link 'between' has 2.5e+10 bytes/s, more than 'inside' inside"),
    "other unit": ("value = 2e12", "value = 2000", "device.bandwidth.value = 2000 is not between"),
    "no source": ('source = "datasheet"', 'source = ""', "source = ''"),
    "no date": ("date = 2023-03-01", 'date = "spring"', "date"),
    "no number": ("value = 80e9", "value = nan", "device.memory.value"),
    "no TOML": ("[device]", "[device", "is not TOML"),
    "no nodes": ("nodes = 2", "nodes = 0", "nodes = '0'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_figures_are_refused_in_one_line(tmp_path, case):
    old, new, message = WRONG[case]
    assert old in FILE
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, FILE.replace(old, new, 1))
    assert message in str(caught.value) and "\n" not in str(caught.value) and "cluster.toml" in str(caught.value)


def test_an_unknown_cluster_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'h100x8'"):
        load_cluster("h100_8")
    with pytest.raises(ConfigError, match="is a directory"):
        load_cluster(str(tmp_path))
