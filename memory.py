"""A simulated CUDA device: run the program on fake tensors that know their device but hold no data. Knows no model."""

from contextlib import ExitStack, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


class _Indexing(TorchFunctionMode):
    """A CPU build refuses Python indexing, assignment and `copy_` on fake CUDA tensors ("not linked with support for cuda
    devices"): those three are answered with the aten operators that they stand for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _index(*args)
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            view = _index(target, index)
            value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=view.dtype, device=view.device)
            torch.ops.aten.copy_(view, value)
            return None
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _index(x, index):
    """x[index] for integers, slices, None and Ellipsis."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at, taken = index.index(Ellipsis), sum(i is not None for i in index) - 1
        index = index[:at] + (slice(None),) * (x.dim() - taken) + index[at + 1 :]
    dim = 0
    for i in index:
        if i is None:
            x = torch.ops.aten.unsqueeze(x, dim)
        elif isinstance(i, int):
            x, dim = torch.ops.aten.select(x, dim, i), dim - 1
        elif isinstance(i, slice):
            x = torch.ops.aten.slice(x, dim, i.start, i.stop, i.step or 1)
        else:
            raise NotImplementedError(f"indexing with {type(i).__name__} is not simulated")
        dim += 1
    return x


@contextmanager
def simulated_cuda():
    """Within it, tensors are fake, and device "cuda:0" exists; a tensor on the wrong device is an error as on a card. The
    index is needed: plain "cuda" fails in a CPU build."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Indexing())
        yield torch.device("cuda:0")
