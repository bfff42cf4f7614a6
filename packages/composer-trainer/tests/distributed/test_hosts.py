"""Two hosts, each with one torchrun, train together over a network that fails.

The hosts are network namespaces with names of their own, connected by a pair of virtual network devices, and share the
file system. Each test starts processes, and takes more than 5 seconds; with ``FAULTS=all`` in the environment also the
cuts that take minutes are tested.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("failing_training.py")
PORT = 29517
OWN_NAMES = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
DIST_TIMEOUT = 20.0


def reason_to_skip():
    """Return why network namespaces cannot be created; an empty string if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces require root on Linux"
    if missing := [program for program in ("ip", "unshare") if shutil.which(program) is None]:
        return f"network namespaces require the programs ip and unshare, and {' and '.join(missing)} cannot be found"
    name = f"composer-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"ip netns fails here: {tried.stderr.strip()}" if tried.returncode else ""


REASON = reason_to_skip()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
takes_minutes = pytest.mark.skipif(os.environ.get("FAULTS") != "all", reason="takes minutes; set FAULTS=all")


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


class Hosts:
    """Two hosts and the link between them."""

    def __init__(self, environment):
        self.environment, self.started = environment, []
        self.names = [f"composer-{os.getpid()}-{index}" for index in range(2)]
        for name in self.names:
            ip("netns", "add", name)
        one, other = self.names
        ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", other)
        for name, address in zip(self.names, ("10.93.0.1", "10.93.0.2"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
        self.set_link("up")

    def set_link(self, to):
        """Set the link up or down."""
        for name in self.names:
            ip("-n", name, "link", "set", "eth0", to)

    def start(self, folder, *options, how="trains", host_name=None, **variables):
        """Start one torchrun per host, with one process each; their output is in files of the folder.

        The hosts are named host0 and host1, or both ``host_name``.
        """
        settings = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "DIST_TIMEOUT": str(DIST_TIMEOUT),
            "PARALLELISM": "fsdp",  # with checkpoints to which both hosts write
        }
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n10.93.0.1 host0\n10.93.0.2 host1\n")
        started = []
        for rank, name in enumerate(self.names):
            own_name = host_name or f"host{rank}"
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", OWN_NAMES, own_name]
            command += [str(names), sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=10.93.0.1:{PORT}", "--rdzv-id=test"]
            command += [*options, str(PROGRAM), how, str(folder)]
            with (folder / f"output-{rank}.txt").open("w") as output:
                started.append(
                    subprocess.Popen(
                        command, env=self.environment | settings | variables, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        self.started += started
        return started

    def finish(self, folder, started, timeout=120):
        """Wait for both torchruns, assert that they succeed, and return the final weights."""
        codes = [process.wait(timeout) for process in started]
        assert codes == [0, 0], "\n".join((folder / f"output-{rank}.txt").read_text() for rank in range(2))
        return torch.load(folder / "weights.pt")

    def end_processes(self):
        """Kill what still runs on the hosts."""
        for name in self.names:
            for process in ip("netns", "pids", name).split():
                os.kill(int(process), signal.SIGKILL)
        for process in self.started:
            process.wait()
        self.started.clear()

    def remove(self):
        """Remove the hosts, and the link with them."""
        for name in self.names:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def both_hosts(environment):
    """The two hosts, created once."""
    made = Hosts(environment)
    yield made
    made.end_processes()
    made.remove()


@pytest.fixture
def hosts(both_hosts):
    """The two hosts, connected and without processes of another test."""
    yield both_hosts
    both_hosts.end_processes()
    both_hosts.set_link("up")


def wait_for_checkpoint(folder):
    """Wait until the training has saved its third checkpoint, in the middle of an epoch."""
    until = time.monotonic() + 180
    while not (folder / "run" / "ep1-ba8").exists():
        assert time.monotonic() < until, (folder / "output-0.txt").read_text()
        time.sleep(0.02)


def assert_same_bits(weights, expected):
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


@pytest.fixture(scope="module")
def resumed(both_hosts, tmp_path_factory):
    """Return a function that resumes a run from its third checkpoint on a network without failures, once."""
    weights = []

    def from_third(run):
        if not weights:
            folder = tmp_path_factory.mktemp("resumed")
            shutil.copytree(run / "run" / "ep1-ba8", folder / "run" / "ep1-ba8")
            weights.append(both_hosts.finish(folder, both_hosts.start(folder)))
            assert not (folder / "run" / "ep0-ba2").exists()  # it has not trained from the start
        return weights[0]

    return from_third


@takes_minutes
def test_link_is_down_for_seconds(hosts, resumed, tmp_path):
    """A training without restarts waits for the link, and ends in the bits of one resumed from before the cut."""
    started = hosts.start(tmp_path, BATCH_SECONDS="0.1", DIST_TIMEOUT="60")
    wait_for_checkpoint(tmp_path)
    hosts.set_link("down")
    time.sleep(8)
    running = [process.poll() for process in started]
    hosts.set_link("up")

    weights = hosts.finish(tmp_path, started)

    assert running == [None, None]
    assert_same_bits(weights, resumed(tmp_path))


def test_hosts_of_the_same_name(hosts, resumed, tmp_path):
    """Hosts that have the same name, as copies of a virtual machine do, train and save together."""
    started = hosts.start(tmp_path, host_name="host0")

    weights = hosts.finish(tmp_path, started)

    assert_same_bits(weights, resumed(tmp_path))


@takes_minutes
def test_restarts_after_a_cut(hosts, resumed, tmp_path):
    """A cut above ``dist_timeout`` ends the processes, and the restarted ones end in the same bits."""
    started = hosts.start(tmp_path, "--max-restarts=3", BATCH_SECONDS="0.1")
    wait_for_checkpoint(tmp_path)
    hosts.set_link("down")
    time.sleep(35)
    hosts.set_link("up")

    weights = hosts.finish(tmp_path, started, timeout=300)

    assert_same_bits(weights, resumed(tmp_path))


@takes_minutes
@pytest.mark.parametrize("options", [[], ["--max-restarts=3", "--rdzv-conf=join_timeout=30"]])
def test_cut_for_good_ends_both(hosts, tmp_path, options):
    """Both torchruns end with an error within ``dist_timeout`` and 60 seconds.

    The torchrun of the second host waits for the store on the first until the system closes the connection: here after
    51 seconds, with Linux's defaults after 15 minutes.
    """
    for name in hosts.names:
        ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_retries2=7")
    started = hosts.start(tmp_path, *options, BATCH_SECONDS="0.1")
    wait_for_checkpoint(tmp_path)
    hosts.set_link("down")
    until = time.monotonic() + DIST_TIMEOUT + 60

    while time.monotonic() < until and any(process.poll() is None for process in started):
        time.sleep(0.1)

    assert [process.returncode for process in started] == [1, 1]
