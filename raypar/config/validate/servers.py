"""Check the parameter servers of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run


def server_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the settings that do not go together with parameter servers, or need them.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("servers", "data_parallel") and run.servers > 1 and run.data_parallel != "parameter_server":
        fix = "leave servers out, or set data_parallel to 'parameter_server'"
        yield f"servers is {run.servers}, but data_parallel is {run.data_parallel!r}: {fix}"
    if right("zero", "data_parallel") and run.zero and run.data_parallel == "parameter_server":
        yield f"zero is {run.zero}, but data_parallel is 'parameter_server': servers hold the optimizer, leave zero out"
    served = right("model", "data_parallel") and run.data_parallel == "parameter_server"
    if served and isinstance(run.model, Transformer) and run.model.moe is not None and run.model.moe.bias_rate:
        told = f"model.moe.bias_rate is {run.model.moe.bias_rate:g}, but with servers replicas do not sum their loads"
        yield f"{told}: set data_parallel to 'all_reduce', or bias_rate to 0 and give alpha"
