"""What all tests share: one Ray cluster for each process that runs them, started when the first test asks for it."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.thinned import mark_long

os.environ["RAYPAR_CALIBRATION"] = ""  # predictions do not depend on the machine that runs the tests

# Converted texts go to a folder of the tests, not to the user's, which may be one that cannot be written to.
_cache = tempfile.TemporaryDirectory(prefix="raypar-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# Started in the background of a script, tests inherit that SIGINT is ignored; what they test is what Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests share a machine of two cores with Ray's processes: how long one example takes says nothing.
ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("raypar", ANY_SPEED, max_examples=15)
settings.register_profile("long", ANY_SPEED, max_examples=200)  # of make test-long
settings.register_profile("few", ANY_SPEED, max_examples=3)  # of tests/newest.sh
settings.load_profile("raypar")

QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}

ON_REAL_ACTORS = re.compile(r"^ *(def |@?pytest.*usefixtures).*\b(cluster|kept_actors|job_on|job_of)\b", re.MULTILINE)
HERE = Path(__file__).parent
ON_ACTORS = pytest.StashKey()
END_CLUSTER = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)  # pytest leaves out what is marked as long after it
def pytest_collection_modifyitems(items):
    """The files with tests on real actors come first: they take longest, and the short ones even out two processes.

    Behind them are those of no folder, most of which run whole programs.
    """
    mark_long(items)
    on_actors = {item.path for item in items if "cluster" in item.fixturenames}
    items.sort(key=lambda item: (item.path not in on_actors, item.path.parent != HERE))
    if items:
        items[0].config.stash[ON_ACTORS] = on_actors


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of several processes one runs all files with tests on real actors, for each would start a Ray and actors."""
    from xdist.scheduler import LoadFileScheduling

    class OnOneRay(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "on actors" if names_actors(config.rootpath / file) else file

    return OnOneRay(config, log) if config.getoption("dist") == "loadfile" else None


@cache
def names_actors(path):
    """Whether tests of a file take a fixture that has actors; a file that is missed runs on any process."""
    return ON_REAL_ACTORS.search(path.read_text()) is not None


def pytest_collection_finish():
    """Garbage is not looked for among modules and tests, which stay: each time takes about 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Ray ends before the first file without tests on actors: what it and idle actors do takes a tenth of a core."""
    if item.path not in item.config.stash[ON_ACTORS]:
        item.config.stash.get(END_CLUSTER, lambda: None)()


@pytest.fixture
def catalog_as_before():
    """What a test registers is gone after it."""
    from raypar.schedules import catalog

    before = dict(catalog.CATALOG)
    yield
    catalog._TABLE.clear()
    catalog._TABLE.update(before)


@pytest.fixture(scope="session")
def torch_for_cpus():
    """Forecasts of memory do not depend on the build of torch that runs the tests."""
    from raypar.planner.memory import worker as memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "torch_has_cuda", lambda: False)
        yield


@pytest.fixture(scope="session")
def cluster(request):
    """A local Ray cluster with 16 CPU slots, so that what is held for other tests leaves room."""
    os.environ.update(QUIET)
    from raypar.cluster.ray_private import ray_folder

    request.config.stash[END_CLUSTER] = partial(request._fixturedef.finish, request)  # with what stands on it
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        namespace="raypar",
        _temp_dir=str(ray_folder()),
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def pool(cluster):
    """Actors that no job has."""
    from tests.support.kept_actors import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def kept_actors(pool):
    """What a test launches gets actors that are there already, where how they start is not its subject."""
    with pool.serving():
        yield
