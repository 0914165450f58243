"""Claims about writes in place: a traced graph has none, and computes what plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar_torch.errors import TraceError
from autopar_torch.shard.rows import at_batch
from autopar_torch.trace import functional
from autopar_torch.trace.call import take_apart
from autopar_torch.trace.capture import Captured, capture, describe_params
from autopar_torch.trace.clean import drop_no_ops, flatten, is_mutable

Body = Callable[[Tensor, Tensor, Tensor], Tensor]
CPU = torch.device("cpu")


class Net(nn.Module):
    """A function of the batch, a parameter and a buffer."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(1, 6))
        self.register_buffer("kept", torch.ones(2, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.w, self.kept)


def _older_view(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = x * w
    view = y[:, 1:]
    y.mul_(2)
    view[:, 0] = w.sum(1)
    return (view * y[:, :-1]).sum()


def _view_of_view(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = (x * w).reshape(-1, 2, 3)
    y.transpose(1, 2)[:, 1].unsqueeze(1).add_(w[0, 0])
    return y.square().sum()


def _pieces(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = x * 1.5
    a, b, c = y.split(2, dim=1)
    b.mul_(3)
    c.copy_(a)
    for i, column in enumerate(y.unbind(1)):
        column.add_(i)
    return (y * w).sum() + a.sum()


def _masked(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = x * w
    y[:, ::2].masked_fill_(x[:, ::2] > 0, 0.5)
    y[y < 0] = 1.5
    return (y * w).sum()


def _grown(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = torch.zeros(len(x), 3, 6, dtype=x.dtype)
    for t in range(3):
        y[:, t] = (y[:, t - 1].clone() if t else x) * w
    return y.sum()


def _halves(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :3], y[:, 3:] = w[:, :3], 2.0
    return (y * x).sum()


def _permuted(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = (x * w).view(-1, 2, 3)
    y.permute(2, 0, 1)[1].fill_(7.0)
    y.narrow(2, 0, 1).mul_(w[0, 0])
    y.movedim(1, 2)[:, :1].zero_()
    return y.cos().sum()


def _stopped(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = x * w
    z = (y * 2).detach()
    z[:, 0] = w[:, 1]
    front = z[:, :2]
    z[:, 1] *= 2
    with torch.no_grad():
        s = y.softmax(-1)
        s[:, 0] = 3.0
    return (y * z * s).sum() + (front * w[:, :2]).sum()


def _mixed_types(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = (x * w).float()
    y[:, 1:] += w[:, 1:]
    y[:, 0] = w[:, 0]
    return y.sum().double()


def _complex(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    z = torch.view_as_complex((x * w).view(-1, 3, 2))
    torch.view_as_real(z)[..., 0].mul_(2)
    return z.abs().sum()


def _input(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    x[:, 0] = 5
    return (x * w).sum()


def _itself(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = x * w
    view = y[:, 0]
    y.unsqueeze_(1)
    y[:, 0, 0] = 4
    return (y * w[:, None]).sum() + view.sum()


def _by_dropout(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = x * w
    F.dropout(y, 0.5, training=False).mul_(3)
    F.dropout(y, 0.0)[:, 0] = 4
    return F.relu(y[:, 1:] * 2, inplace=True).sum() + y.sum()


def _items(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    values, places = (x * w).topk(3)
    values[:, 0].mul_(2)
    return (values.sum(1) + places.sum(1)).square().sum()


BODIES = [_items, _older_view, _view_of_view, _pieces, _masked, _grown, _halves, _permuted,
          _stopped, _mixed_types, _complex, _input, _itself, _by_dropout]


def _captured(body: Body) -> tuple[Net, Captured]:
    net = Net(body)
    call, _ = take_apart((torch.zeros(4, 6, dtype=torch.float64),), {})
    return net, capture(net, call, device=CPU, loss_fn=None, wanted=None,
                        shapes=describe_params(net))


def _functional(captured: Captured) -> fx.Graph:
    flat = flatten(captured)
    drop_no_ops(flat)
    functional.functionalize(flat, captured.sources)
    return flat


def _run(net: Net, captured: Captured, flat: fx.Graph, x: Tensor) -> Tensor:
    """The graph, on real tensors."""
    state: dict[str, Any] = {**dict(net.named_parameters()), **dict(net.named_buffers()),
                             **captured.consts}
    given = [x if source.kind == "input" else state[source.name]
             for source in (captured.sources[n.name] for n in flat.find_nodes(op="placeholder"))]
    real = at_batch(flat, len(x), CPU)
    return fx.GraphModule(nn.Module(), real)(*given)[0]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_writes_into_views_become_values_with_the_same_gradients(body: Body) -> None:
    net, captured = _captured(body)
    flat, x = _functional(captured), torch.sin(torch.arange(24.0, dtype=torch.float64)).view(4, 6)
    assert not any(is_mutable(node) for node in flat.nodes)
    plain = copy.deepcopy(net)
    want = plain(x.clone())
    want.backward()
    got = _run(net, captured, flat, x.clone())
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(net.w.grad, plain.w.grad)


def _counts(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    with torch.no_grad():
        kept.mul_(0.5).add_(x.mean(0))
        row = kept[1]
        kept[:, 0] = 3.0
        row += 1
        torch.add(kept, 1, out=kept)
    return (x * w * kept.sum(0)).sum() + row.sum()


def test_writes_to_buffers_and_to_views_of_them_stay() -> None:
    net, captured = _captured(_counts)
    flat, x = _functional(captured), torch.rand(4, 6, dtype=torch.float64)
    plain = copy.deepcopy(net)
    for _ in range(2):
        torch.testing.assert_close(_run(net, captured, flat, x), plain(x))
    torch.testing.assert_close(net.kept, plain.kept)


@pytest.mark.parametrize("body", [_halves, _grown])
def test_writes_that_fill_a_dim_are_one_cat(body: Body) -> None:
    names = [str(node.target) for node in _functional(_captured(body)[1]).nodes]
    assert "aten.cat.default" in names and ("slice_scatter" not in str(names))


def _detached(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    y = x * w
    with torch.no_grad():
        y[:, 0] = 1
    return y.square().sum()


def _data(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    with torch.no_grad():
        w.clamp_(-0.5, 0.5)
    return (x * w).sum()


@pytest.mark.parametrize("body", [_detached, _data])
def test_what_cannot_be_a_value_is_refused_with_the_line(body: Body) -> None:
    captured = _captured(body)[1]
    with pytest.raises(TraceError, match=r"test_functional.py.*line"):
        _functional(captured)
