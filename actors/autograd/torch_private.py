"""The private names of torch that the actors use.

No other file of actors/ or raypar/ may name one; tests/test_house.py checks that.

Every docstring has the reason why torch's public way does not suffice. Private names may change with every release:
**at each upgrade of torch, retry the public way for every function of this file**, run the tests, and measure again
where a figure is given. The names are those of torch 2.13. Where one is missing that nothing can replace, the import
fails, with the versions that are known to work (``actors/private_names.py``).

Some mechanisms exist only because the public way would import torch's compiler (``torch._dynamo``) or sympy at its
first use. That costs 3 s of CPU time and 80 to 90 MiB in every actor, at every launch (docs/decisions/actors.md). They
are in the files of their subjects, import the private names from this file, and are retried at upgrades, too:

- ``actors/autograd/recompute.py``: ``rerun`` instead of ``torch.utils.checkpoint``, which imports the compiler.
- ``actors/autograd/backward.py``: ``GraphEnd`` instead of ``torch.autograd.backward`` with gradients, which imports
  sympy to check their shapes: 2 s and 40 MiB.
- ``actors/optim/optimizer.py``: ``add_param_group`` and ``step`` of torch's optimizers without their decorators, which
  import the compiler.
- ``actors/models/init/deferred_init.py``: modes that do not import it (``DispatchMode``), and that skip the ops that
  fill a meta tensor with random values, which import it too.
- ``actors/layers/positions.py``: tables of positions are computed at first use: on the meta device that imports sympy.

Attributes of modules that torch's own documentation and all libraries around it use (``_parameters``, ``_buffers``,
``_modules``, and ``_flat_weights`` of ``nn.RNNBase``) are no private names in this sense, and are used where needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node
from torch.nn.attention import SDPBackend

from raypar.actors.private_names import module_with

module_with(
    "torch",
    (
        "Tensor._version",
        "Tensor._base",
        "Tensor._is_view",
        "Tensor._backward_hooks",
        "UntypedStorage._cdata",
        "autograd.graph._engine_run_backward",
        "autograd.forward_ad._current_level",
        "utils._python_dispatch.TorchDispatchMode",
        "utils._python_dispatch._get_current_dispatch_mode_stack",
        "utils._pytree.tree_iter",
        "utils._pytree.tree_map",
        "nn.modules.module._has_any_global_hook",
        "_C._are_functorch_transforms_active",
        "_C._autograd._top_saved_tensors_default_hooks",
        "_C.DisableTorchFunction",
        "_softmax_backward_data",
        "_fused_sdp_choice",
        "_assert_async",
        "_foreach_copy_",
        "_foreach_mul_",
        "_foreach_lerp_",
        "ops.aten._unsafe_view",
        "ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "ops.aten.add.Tensor._schema",
    ),
)

# --- tensors and the autograd graph ----------------------------------------------------------------------------------


def num_writes(tensor: Tensor) -> int:
    """Return the number of writes to the memory of a tensor: its version, which all its views share.

    Autograd compares versions itself, but only for tensors that it has saved, and there is no public way to read them.
    Comparing values would need a copy of the tensor. Some kernels (batch_norm's) do not count. Retry at upgrades.
    """
    return tensor._version


def viewed_tensor(tensor: Tensor) -> Tensor | None:
    """Return the base of a view, or None if the tensor is not a view.

    torch has no public way: equal storages do not show which tensor is autograd's base. Retry at upgrades.
    """
    return tensor._base


def as_no_view(tensor: Tensor) -> Tensor:
    """Return the same tensor, which autograd does not treat as a view any more. Nothing is copied.

    Autograd forbids writing into a view that a custom function returns. The public way is ``clone``, which copies the
    whole output of a linear layer; its cost is not measured. Retry at upgrades.

    Args:
        tensor: A tensor of any shape and dtype. It must be the only one that refers to its memory.
    """
    may_be_view = torch.compiler.is_compiling() or tensor._is_view()  # torch's compiler can't trace the question
    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if may_be_view else tensor


def storage_id(tensor: Tensor) -> int:
    """Return a number that is the same for all tensors of one storage, and unique while the storage is alive.

    The public ``untyped_storage().data_ptr()`` is 0 for all meta tensors and all empty ones. Retry at upgrades.
    """
    return int(tensor.untyped_storage()._cdata)


def has_gradient_hooks(one: Tensor | nn.Module) -> bool:
    """Return whether a tensor, or the call of a module, has hooks that are called in the backward.

    torch has public functions that add such hooks, and none that finds them. Retry at upgrades.
    """
    later = "_backward_pre_hooks" if isinstance(one, nn.Module) else "_post_accumulate_grad_hooks"
    return bool(one._backward_hooks or getattr(one, later, None))


def notes_of(node: Node) -> dict[Any, Any]:
    """Return the dictionary of notes of a node of the autograd graph, to read and to write.

    ``Node.metadata`` is public, but is documented and typed as a function. It is an attribute. Retry at upgrades.
    """
    notes: Any = node.metadata
    return cast("dict[Any, Any]", notes)


Starts = Sequence[Tensor | GradientEdge]


def run_backward(starts: Starts, gradients: Sequence[Tensor], leaves: Sequence[Tensor], *, keep: bool = False) -> None:
    """Run a backward from some starts, and accumulate gradients into some leaves only. ``keep`` retains the graph.

    The public ``torch.autograd.backward`` imports sympy to check shapes (see the docstring above). Retry at upgrades.
    """
    run = torch.autograd.graph._engine_run_backward
    run(tuple(starts), tuple(gradients), keep, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True)


# --- interception of calls by torch ----------------------------------------------------------------------------------


def is_intercepted() -> bool:
    """Return whether something other than plain autograd intercepts this thread's calls of torch.

    This is a dispatch mode that changes calls (or counts FLOPs), a transform of ``torch.func``, or forward-mode
    differentiation, for which private kernels would be wrong. Not public in torch. Retry at upgrades.
    """
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return (
        not all(getattr(mode, "only_looks", False) for mode in modes)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def has_saved_tensor_hooks(known: object = None) -> bool:
    """Return whether ``torch.autograd.graph.saved_tensors_hooks`` other than a known first one are active here.

    A layer must not save tensors without these hooks. torch has no public way to find them. Retry at upgrades.
    """
    return (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None and hooks[0] is not known


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether a module's forward or backward calls hooks: those of the module, or global ones.

    torch has public functions that add such hooks, and none that finds them. Retry at upgrades.
    """
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or bool(torch.nn.modules.module._has_any_global_hook())


# --- kernels ---------------------------------------------------------------------------------------------------------

_ONEDNN_LINEAR: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def has_onednn_linear() -> bool:
    """Return whether this build of torch has oneDNN's linear layer, see ``onednn_linear``."""
    return _ONEDNN_LINEAR is not None


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a linear layer's weight with oneDNN's kernel. Autograd does not record it.

    The public ``F.linear`` goes through MKL, which is slower on CPUs that are not Intel's. On one thread a forward and
    backward of gpt-small took 1,064 ms with oneDNN's and 1,095 ms with MKL's (3 to 4 %); of a wider model 217 and 230
    ms (6 %); of 2 samples 282 and 284 ms (docs/decisions/layers.md, 23 November 2026). torch has no public operator
    that passes plain tensors to oneDNN. Retry at upgrades.

    Args:
        x: Inputs (..., in) float32 on the CPU.
        weight: Weight (out, in) float32, of any strides.
        bias: Bias (out,) float32, or None.

    Returns:
        Outputs (..., out) float32.

    Raises:
        RuntimeError: This build of torch does not have the kernel.
    """
    if _ONEDNN_LINEAR is None:
        raise RuntimeError("this build of torch has no oneDNN: ask has_onednn_linear first")
    return _ONEDNN_LINEAR(x, weight, bias, "none", [], "")


def softmax_gradient_(gradient: Tensor, weights: Tensor) -> None:
    """Replace the gradient of a softmax by the gradient of its input, in the same memory.

    Autograd would call the same kernel, but with new memory for the result, which for attention in blocks is a tensor
    of scores for each block. Public operators would pass over the scores several times. Retry at upgrades.

    Args:
        gradient: Gradient of the softmax over the last dim, (..., T) float32. It is overwritten.
        weights: The softmax, (..., T) float32.
    """
    torch._softmax_backward_data(gradient, weights, -1, torch.float32, grad_input=gradient)


def keeps_attention_scores(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> bool:
    """Return whether ``F.scaled_dot_product_attention`` would choose the plain kernel, which keeps all scores.

    The public ``torch.nn.attention.sdpa_kernel`` forces a kernel; no public function returns the one that torch would
    choose. Retry at upgrades.

    Args:
        q: Queries (B, N, S, d).
        k: Keys (B, K, S, d).
        v: Values (B, K, S, d).
        **settings: The remaining arguments of ``F.scaled_dot_product_attention``, by name.
    """
    return torch._fused_sdp_choice(q, k, v, **settings) == SDPBackend.MATH.value


def flash_attention_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute attention with torch's CPU kernel, which also returns the logarithms with which blocks are combined.

    The public ``F.scaled_dot_product_attention`` calls this kernel and drops the logarithms. Without them every block's
    scores would have to be computed twice, or saved; the cost is not measured. Retry at upgrades.

    Args:
        q: Queries (B, N, S, d), floating. The last stride of all tensors must be 1: the kernel does not check it.
        k: Keys (B, N, T, d) of the same dtype.
        v: Values (B, N, T, d) of the same dtype.
        causal: Whether a query attends only to keys up to its position.
        mask: Numbers to add to the scores, (1, N, S, T) of the same dtype; None for none.

    Returns:
        Outputs (B, N, S, d), and the logarithm of each query's denominator (B, N, S).
    """
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
    return result


def flash_attention_cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention over some of the keys, with torch's CPU kernel.

    Autograd calls this kernel with the outputs and logarithms of the same keys. Attention across actors must pass those
    over all keys, which the public way does not allow. Retry at upgrades.

    Args:
        gradient: Gradient of the outputs over all keys, (B, N, S, d).
        q: Queries (B, N, S, d).
        k: Some of the keys, (B, N, T, d).
        v: Some of the values, (B, N, T, d).
        out: Outputs over all keys, (B, N, S, d).
        logs: Logarithm of each query's denominator over all keys, (B, N, S).
        causal: As in ``flash_attention_cpu``.
        mask: As in ``flash_attention_cpu``.

    Returns:
        The addend of these keys in the gradient of the queries, and the gradients of these keys and values.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, logs, 0.0, causal, attn_mask=mask
    )
    return result


def demand_later(condition: Tensor, message: str) -> None:
    """Fail if a condition is false, without waiting for the device that computes it.

    Reading it in Python (``bool(condition)``) would make the host wait for a GPU at every call. Retry at upgrades.

    Args:
        condition: One bool, () on any device.
        message: The error message.

    Raises:
        RuntimeError: The condition is false and on the CPU. On a GPU the device fails, at this or a later call.
    """
    torch._assert_async(condition, message)


# --- one op for many tensors ------------------------------------------------------------------------------------------
# On a GPU it is one kernel, or a few; the results have the bits of the ops on single tensors. torch documents these
# ops, but their names are private. Retry at upgrades.


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of the same shapes, which may have other dtypes and strides."""
    if targets:
        torch._foreach_copy_(targets, sources)


def scale_each(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place by a factor: a number, or a tensor () on their device."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def lerp_each(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move tensors in place toward others: by ``weight`` times the difference."""
    if tensors:
        torch._foreach_lerp_(tensors, ends, weight)


# --- modes and ops of a recorded build -------------------------------------------------------------------------------


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    """Base class of dispatch modes: while one is active, its ``__torch_dispatch__`` gets every op.

    torch documents the class, but in a private module. At its first use a subclass imports torch's compiler, to be
    hidden from it (the module's docstring has the cost). This class is not hidden. Retry at upgrades.
    """

    only_looks = False  # if True, layers compute under it as without it

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which neither tensor subclasses nor function modes see torch's functions.

    The public ``torch.overrides`` finds overrides of a function, but can't switch them off. Retry at upgrades.
    """
    return torch._C.DisableTorchFunction()


def leaves_of(tree: Any) -> Iterable[Any]:
    """Return all values in nested tuples, lists and dictionaries, in order.

    torch passes the arguments of ops in these. It has no public function that walks them. Retry at upgrades.
    """
    return torch.utils._pytree.tree_iter(tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree, as of ``leaves_of``, with a function applied to every value."""
    return torch.utils._pytree.tree_map(function, tree)


def op_name(op: Any) -> str:
    """Return the name of an op, such as "aten::add_". Only the op's schema has it. Retry at upgrades."""
    return str(op._schema.name)


def argument_names(op: Any) -> list[str]:
    """Return the names of an op's arguments, in order. Only the op's schema has them. Retry at upgrades."""
    return [argument.name for argument in op._schema.arguments]


def written_arguments(op: Any) -> list[str]:
    """Return the names of the arguments that an op writes to. Only the op's schema has them. Retry at upgrades."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


@contextmanager
def replaced_trunc_normal(replacement: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which another function is called instead of ``torch.nn.init.trunc_normal_``.

    It replaces the private function that the public one calls, so it also affects users who have imported the public
    function by name. The process has one such function, so only one thread may enter. Retry at upgrades.

    Args:
        replacement: Called with the original function and the arguments of the call. If torch does not have the private
            function any more, the original is None, and nothing calls the replacement.
    """
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name, None)
    setattr(nn.init, name, partial(replacement, original))
    try:
        yield
    finally:
        setattr(nn.init, name, original)


# --- process groups --------------------------------------------------------------------------------------------------


def gloo_options(device: Any, timeout: timedelta) -> Any:
    """Return the options of a ``ProcessGroupGloo`` with one thread.

    The public constructor has no device, and creates an event loop and a listener for every group. Retry at upgrades.

    Args:
        device: The process's Gloo device, from ``ProcessGroupGloo.create_device``.
        timeout: Deadline for members to connect.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch types only a part of it
    options = gloo._Options()
    options._devices, options._threads = [device], 1
    set_timeout(options, timeout)
    return options


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout of the ops of a process group that will be created with these options.

    The public one is for ``init_process_group``, which creates one default group a process. Retry at upgrades.
    """
    options._timeout = timeout


def all_gather_flat(group: Any, out: Tensor, part: Tensor) -> Any:
    """Start an all_gather of equal parts into one tensor.

    The public ``dist.all_gather_into_tensor`` accepts only groups of ``init_process_group``. Retry at upgrades.

    Args:
        group: A ``ProcessGroupNCCL``.
        out: The whole, (size of the group x n,), contiguous.
        part: This member's part, (n,), contiguous.

    Returns:
        torch's handle of the operation.
    """
    return group._allgather_base(out, part)


def reduce_scatter_flat(group: Any, out: Tensor, source: Tensor, options: Any) -> Any:
    """Start a reduce_scatter of one tensor into equal parts. See ``all_gather_flat``. Retry at upgrades.

    Args:
        group: A ``ProcessGroupNCCL``.
        out: This member's part of the result, (n,), contiguous.
        source: This member's summands, (size of the group x n,), contiguous.
        options: A ``ReduceScatterOptions``.
    """
    return group._reduce_scatter_base(out, source, options)


# --- memory of a GPU -------------------------------------------------------------------------------------------------


def record_memory_history(most: int) -> None:
    """Record allocations and frees of GPU memory from now on, with their lines of Python; 0 stops it.

    torch documents it, under this private name only. Retry at upgrades.

    Args:
        most: Number of events that are kept, the latest ones.
    """
    if most:
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=most)
    else:
        torch.cuda.memory._record_memory_history(None)


def memory_history() -> bytes:
    """Return what torch's viewer shows: GPU memory now, and the recorded events. See ``record_memory_history``."""
    with TemporaryDirectory() as folder:
        torch.cuda.memory._dump_snapshot(str(Path(folder) / "snapshot"))
        return (Path(folder) / "snapshot").read_bytes()
