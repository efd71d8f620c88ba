"""Networks: the one published with SkipPipe's code (arXiv 2502.19913; 20 nodes in 12 cities, 6
stages), more nodes in its cities, a file's, and what is left of one."""
import copy
import json
from itertools import combinations
from pathlib import Path

from skippipe import Network, per_node, read_network, without

DATA = json.loads(Path(__file__).with_name("published.json").read_text())
CITIES = DATA["cities"]
MESSAGE = 4 * 1024 * 1024 * 8       # bytes: fp32, width 1024, 1024 tokens, 8 samples


def city_links():
    """{(a, b): (latency in seconds, bytes per second)} both ways, from published.json; within a
    city 1 ms and 2 GiB/s (the released figures)."""
    links = {(city, city): (0.001, 2 * 2**30) for city in CITIES}
    for i, line in enumerate(DATA["links"]):
        for city, link in zip(CITIES[i + 1:], line.split()):
            latency, speed = link.split("/")        # "milliseconds/Mbit/s"
            seconds_and_speed = float(latency) / 1000, float(speed) * 2**20 / 8
            links[CITIES[i], city] = seconds_and_speed
            links[city, CITIES[i]] = seconds_and_speed
    return links


def city_delays(names, links, message=MESSAGE):
    """delay[i][j] in seconds between nodes in these cities: latency + bytes / bandwidth + 0.35."""
    def delay(i, j):
        latency, speed = links[names[i], names[j]]
        return 0.0 if i == j else latency + message / speed + 0.35
    delays = []
    for i in range(len(names)):
        delays.append([delay(i, j) for j in range(len(names))])
    return delays


def city_tables(count):
    """(Mbit/s, milliseconds one way) of nodes in the twelve cities in turn: tables of
    tools.hosts.Hosts."""
    links = city_links()
    mbit, latency = {(): 0}, {}         # the rate of all other links is that of ()
    for i, j in combinations(range(count), 2):
        seconds, speed = links[CITIES[i % len(CITIES)], CITIES[j % len(CITIES)]]
        mbit[i, j], latency[i, j] = speed * 8e-6, seconds * 1000
    return mbit, latency


def published_network(corrected=False):
    """The published instance: (Network of 20 nodes, their cities). The released table has NL-London
    1024 times too slow: so it is here, or corrected."""
    names, links = (CITIES * 2)[:20], city_links()
    if not corrected:
        for pair in (("NL", "London"), ("London", "NL")):
            latency, speed = links[pair]
            links[pair] = latency, speed / 1024
    return Network(city_delays(names, links), [0.44] * 20, DATA["stages"], 3, 0.13, 0.09), names


def spread_network(sizes):
    """(Network, cities) of nodes in the twelve cities in turn, sizes[s] of them in stage s in this
    order."""
    names = [CITIES[i % len(CITIES)] for i in range(sum(sizes))]
    stages = []
    for s, size in enumerate(sizes):
        first = sum(sizes[:s])
        stages.append(list(range(first, first + size)))
    return Network(city_delays(names, city_links()), 0.44, stages, 3, 0.13, 0.09), names


def read_instance(file):
    """(Network, names or None) of a JSON file: an object with delay, compute, stages and what else
    a Network takes, and names. Raises ValueError with one line."""
    network = read_network(file)
    names = json.loads(Path(file).read_text()).get("names")
    return network, names and per_node(names, len(network.delay), "names")


def network_without(network, nodes):
    """The network in which these nodes are idle: dead, or another region's. Delays are shared."""
    left = copy.copy(network)
    left.stages = without(nodes, network.stages)
    left.stage_of = {r: s for r, s in network.stage_of.items() if r not in nodes}
    return left
