"""A process that ends without closing its store: it ends soon, and leaves nothing behind."""

from __future__ import annotations

import pytest

import jax_mlp_offload as jmo
from tests.processes import finish, start_python

pytest_plugins = ("tests.server_fixtures",)

CODE = """
kind, place, endpoint = sys.argv[1:]
if kind == "s3":
    tier = jmo.Remote({"driver": "s3", "bucket": place, "path": "exit/", "endpoint": endpoint, "aws_region": "us-east-1"})
else:
    tier = {"memory": "memory://exit/", "native": place, "tensorstore": jmo.File(place, io="tensorstore")}[kind]
store = jmo.Store(tier, host_memory="110KB", subgroup_elements=4096)
params = make_params(SMALL_SHAPES)
tx = jmo.adam(1e-2, store=store)
step, state = make_step(tx), tx.init(params)
for grad in record_gradients(params, 3):
    params, state = step(params, state, grad)  # dispatched, and not waited for
print("ends", flush=True)
"""


@pytest.mark.parametrize("kind", ["native", "tensorstore", "memory"])
def test_a_store_that_is_not_closed(kind, tmp_path):
    assert finish(start_python(CODE, kind, tmp_path, ""), timeout_s=60) == "ends\n"
    assert not list(tmp_path.iterdir())


def test_a_remote_store_that_is_not_closed(s3):
    kvstore = s3.spec
    process = start_python(CODE, "s3", kvstore["bucket"], kvstore["endpoint"])
    assert finish(process, timeout_s=60) == "ends\n"
    assert not s3.keys("exit/")


def test_many_stores_one_after_another():
    """Threads come and go, and get each other's ids."""
    for _ in range(200):
        with jmo.Store():
            pass
