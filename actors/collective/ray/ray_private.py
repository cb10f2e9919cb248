"""The private names of Ray that the actors use: those of its key-value store.

No other file of actors/ may name one, and a test says so (tests/test_house.py); the driver has a file of its own,
raypar/cluster/ray_private.py. Every function says why Ray's public way will not do. Private names may change with every
release: **at each upgrade of Ray, retry the public way for every function of this file**. Nothing works without these,
so one that is gone fails at once. The names are those of Ray 2.60.
"""

from __future__ import annotations

from raypar.actors.private_names import module_with

internal_kv = module_with(
    "ray.experimental.internal_kv",
    ("_internal_kv_put", "_internal_kv_exists", "_internal_kv_del", "internal_kv_get_gcs_client"),
)

_NAMESPACE = b"raypar"


def put(key: bytes, data: bytes, *, overwrite: bool = True) -> bool:
    """Store bytes under a key in the key-value store of Ray's head, and return whether the key was new.

    With ``overwrite`` an old value is replaced, else it stays.

    Ray's public ways are a named actor, which would be one more process, and the object store, which has no names.
    Retry at upgrades.
    """
    return not internal_kv._internal_kv_put(key, data, overwrite=overwrite, namespace=_NAMESPACE)


def get_all(keys: list[bytes]) -> dict[bytes, bytes]:
    """Return the values of the keys that are there, with one message to Ray's head.

    See ``put``. The functions of ``internal_kv`` take one key a call; its client takes many. Retry at upgrades.
    """
    client = internal_kv.internal_kv_get_gcs_client()
    found: dict[bytes, bytes] = client.internal_kv_multi_get(keys, _NAMESPACE)
    return found


def has(key: bytes) -> bool:
    """Return whether something is stored under a key. See ``put``."""
    return bool(internal_kv._internal_kv_exists(key, namespace=_NAMESPACE))


def delete(prefix: bytes) -> None:
    """Delete all keys that begin with a prefix. See ``put``."""
    internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=_NAMESPACE)
